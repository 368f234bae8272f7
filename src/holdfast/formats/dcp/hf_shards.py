"""Shards of safetensors files, as ``HuggingFaceStorageWriter(save_distributed=True)`` writes them, with no index.

Each file says in its header where in the whole tensors its parts begin; how large these are, nobody says.
Source: ``torch/distributed/checkpoint/hf_storage.py`` of torch 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec

from holdfast.engine.io.sources import SourceChunk, StridedLocation, row_major_strides
from holdfast.engine.plan.ranges import IndexBox
from holdfast.errors import CorruptCheckpointError
from holdfast.formats.dcp.chunked_tensor import ChunkedTensor
from holdfast.formats.dcp.tiling import LEAST, check_tiling
from holdfast.formats.safetensors import SafetensorsFile
from holdfast.formats.tree.contents import classify_tree
from holdfast.formats.tree.tree_reader import TreeReader
from holdfast.ondisk.blocks import crc64
from holdfast.ondisk.dtypes import dtype_width
from holdfast.ondisk.files import TensorInfo
from holdfast.ondisk.read_budget import ReadBudget
from holdfast.storage import posix

_NAME = re.compile(r"shard-\d{5,9}-model-\d{5,9}-of-\d{5,9}\.safetensors")

#: Key of the header's metadata that has the offsets.
_OFFSETS = "DCP_SHARDING_INFO"


class _Offsets(msgspec.Struct, frozen=True):
    saved_offsets: tuple[int, ...]


def is_sharded(path: Path) -> bool:
    """Whether a folder has such files."""
    return posix.is_directory(path) and any(_NAME.fullmatch(file.name) for file in posix.list_files(path))


class ShardsReader(TreeReader):
    """A folder of shards: a model, and nothing else."""

    def __init__(self, path: Path, keys: Mapping[str, str]) -> None:
        files = [file for file in posix.list_files(path) if _NAME.fullmatch(file.name)]
        parts: dict[tuple[str, str], dict[IndexBox, SourceChunk]] = {}
        for file in files:
            posix.check_regular(file, within=(path,))
            for name, dtype, part in _parts(SafetensorsFile.open(file)):
                parts.setdefault((name, dtype), {}).setdefault(part.box, part)
        if len({name for name, _ in parts}) < len(parts):
            raise CorruptCheckpointError(f"{path}: a tensor has different dtypes in different shards")
        tiling = ReadBudget(sum(len(own) for own in parts.values()), LEAST)
        tree = {name: _tensor(path, name, dtype, tuple(own.values()), tiling) for (name, dtype), own in parts.items()}
        known = [(name, one.info, [(*part.box, part.near[1]) for part in one.parts]) for name, one in tree.items()]
        text = repr(sorted(known)).encode()
        super().__init__(
            path, "dcp", files, f"{crc64(text):016x}", classify_tree(tree, keys, ReadBudget(len(text)), str(path))
        )


def _parts(file: SafetensorsFile) -> list[tuple[str, str, SourceChunk]]:
    """The name, dtype and place of each tensor's part in a file."""
    text = file.header.metadata.get(_OFFSETS, "")
    try:
        offsets = msgspec.json.decode(text, type=dict[str, _Offsets])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{file.path} does not say what its parts are parts of: {_OFFSETS} is {error}"
        ) from error
    found = []
    for name, entry in file.header.entries.items():
        if name not in offsets or len(offsets[name].saved_offsets) != len(entry.shape):
            raise CorruptCheckpointError(
                f"{file.path} does not say where in the whole tensor its part of {name!r} begins"
            )
        start = file.extent(name, 0, 0).offset
        place = StridedLocation(file.path, start, row_major_strides(entry.shape, dtype_width(entry.dtype)))
        box = IndexBox(offsets[name].saved_offsets, entry.shape)
        found.append((name, entry.dtype, SourceChunk(box, partial(StridedLocation._make, place), (file.path, start))))
    return found


def _tensor(path: Path, name: str, dtype: str, parts: tuple[SourceChunk, ...], budget: ReadBudget) -> ChunkedTensor:
    try:
        shape = tuple(
            max(start + size for start, size in dims)
            for dims in zip(*(zip(*part.box, strict=True) for part in parts), strict=True)
        )
        filled = tuple(part for part in parts if 0 not in part.box.shape)
        check_tiling([part.box for part in filled], shape, budget)
    except ValueError as error:
        raise CorruptCheckpointError(f"{path}: tensor {name!r} is not whole: {error}") from error
    return ChunkedTensor(TensorInfo(dtype, shape), filled)
