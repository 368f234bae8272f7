"""The model files of a version: the places of their tensors, and the entry of each in the manifest. Pure.

:class:`~rankless.weights.version_output.VersionOutput` calls it on rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rankless.components.component_files import FileSet
from rankless.engine.io.upload_target import FileFrame
from rankless.ondisk.block_crcs import block_range, combine_crcs, count_blocks, crc64, from_hex
from rankless.ondisk.data_files import CRC_KEY
from rankless.ondisk.dtypes import dtype_width
from rankless.ondisk.header import LENGTH_BYTES, decode_header
from rankless.ondisk.weight_versions import VersionFile
from rankless.weights.version_parts import TensorPlaces


def locate_tensors(files: FileSet) -> TensorPlaces:
    """Return the places of all tensors, in the order of their numbers in parts."""
    rows = []
    for number, file in enumerate(files.files):
        for name, start in file.lay_out().starts.items():
            info = files.content.tensors[name]
            rows.append((number, start, start + info.nbytes, name, dtype_width(info.dtype)))
    rows.sort()
    return TensorPlaces(
        [row[0] for row in rows], [row[1] for row in rows], [row[4] for row in rows], [row[2] - row[1] for row in rows]
    )


def digest_layout(files: FileSet, frames: Sequence[FileFrame]) -> int:
    """Return a digest of all that two versions must have in common for a delta: everything but the bytes of tensors."""
    tensors = {name: (info.dtype, info.shape) for name, info in files.content.tensors.items()}
    starts = [sorted(file.lay_out().starts.items()) for file in files.files]
    sizes = [(frame.size, frame.header_bytes) for frame in frames]
    small = sorted(files.small_files.items())
    return crc64(msgspec.msgpack.encode([files.names, sizes, starts, sorted(tensors.items()), small]))


def describe_model_file(name: str, size: int, header: bytes) -> VersionFile:
    """Return a model file's entry in the manifest, given its header. The file need not exist."""
    parsed = decode_header(header, size, name)
    entries = sorted(parsed.entries.values(), key=lambda entry: entry.data_offsets)
    crcs = from_hex(parsed.metadata[CRC_KEY])
    blocks = [
        stop - start
        for entry in entries
        for start, stop in (block_range(block, entry.nbytes) for block in range(count_blocks(entry.nbytes)))
    ]
    crc = combine_crcs([(crc64(header), len(header)), *zip(crcs, blocks, strict=True)])
    text = header[LENGTH_BYTES:].rstrip(b" ").decode()
    return VersionFile(name, size, len(header), f"{crc:016x}", text)
