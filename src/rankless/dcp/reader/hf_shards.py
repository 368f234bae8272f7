"""A reader of sharded safetensors files without an index, from ``HuggingFaceStorageWriter(save_distributed=True)``.

The header of each file has the offsets of its chunks in the whole tensors. The shapes of these are not stored.
Source: ``torch/distributed/checkpoint/hf_storage.py`` of torch 2.13.

``formats/registry.py`` names it: each rank of a load or conversion opens one. The names of the files and the key of the
offsets are those that torch writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec

from rankless.engine.io.tensor_sources import SourceChunk, StridedLocation, row_major_strides
from rankless.engine.plan.element_ranges import IndexBox
from rankless.errors import CorruptCheckpointError
from rankless.formats.chunked_tensor import ChunkedTensor
from rankless.formats.safetensors import SafetensorsFile
from rankless.formats.tiling import LEAST, check_tiling
from rankless.formats.tree.tree_contents import classify_tree
from rankless.formats.tree.tree_reader import TreeReader
from rankless.ondisk.block_crcs import crc64
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.dtypes import dtype_width
from rankless.ondisk.read_budget import ReadBudget
from rankless.process.prepared_types import prepared
from rankless.storage.store import store_of

_NAME = re.compile(r"shard-\d{5,9}-model-\d{5,9}-of-\d{5,9}\.safetensors")

#: Key of the header's metadata that has the offsets.
_OFFSETS = "DCP_SHARDING_INFO"


@prepared
class _Offsets(msgspec.Struct, frozen=True):
    saved_offsets: tuple[int, ...]


def is_sharded(path: Path) -> bool:
    """Return whether a folder has such files."""
    return store_of(path).is_directory(path) and any(
        _NAME.fullmatch(file.name) for file in store_of(path).list_files(path)
    )


class ShardsReader(TreeReader):
    """A reader of a folder of shards, which holds a model and nothing else."""

    def __init__(self, path: Path, keys: Mapping[str, str]) -> None:
        files = [file for file in store_of(path).list_files(path) if _NAME.fullmatch(file.name)]
        chunks: dict[tuple[str, str], dict[IndexBox, SourceChunk]] = {}
        for file in files:
            store_of(file).check_regular(file, within=(path,))
            for name, dtype, chunk in _list_chunks(SafetensorsFile.open(file)):
                chunks.setdefault((name, dtype), {}).setdefault(chunk.box, chunk)
        if len({name for name, _ in chunks}) < len(chunks):
            raise CorruptCheckpointError(f"{path}: a tensor has different dtypes in different files")
        tiling_budget = ReadBudget(sum(len(by_box) for by_box in chunks.values()), LEAST)
        tree = {
            name: _join_chunks(path, name, dtype, tuple(by_box.values()), tiling_budget)
            for (name, dtype), by_box in chunks.items()
        }
        rows = [
            (name, tensor.info, [(*chunk.box, chunk.order_hint[1]) for chunk in tensor.chunks])
            for name, tensor in tree.items()
        ]
        text = repr(sorted(rows)).encode()
        super().__init__(
            path, "dcp", files, f"{crc64(text):016x}", classify_tree(tree, keys, ReadBudget(len(text)), str(path))
        )


def _list_chunks(file: SafetensorsFile) -> list[tuple[str, str, SourceChunk]]:
    """Return the chunks in a file, each with the name and dtype of its tensor."""
    text = file.header.metadata.get(_OFFSETS, "")
    try:
        offsets = msgspec.json.decode(text, type=dict[str, _Offsets])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{file.path}: the offsets of its chunks ({_OFFSETS} in the header) cannot be read: {error}"
        ) from error
    chunks = []
    for name, entry in file.header.entries.items():
        if name not in offsets or len(offsets[name].saved_offsets) != len(entry.shape):
            raise CorruptCheckpointError(
                f"{file.path}: {_OFFSETS} in the header must have an offset with {len(entry.shape)} dimensions for "
                f"tensor {name!r}"
            )
        start = file.tensor_extent(name, 0, 0).offset
        location = StridedLocation(file.path, start, row_major_strides(entry.shape, dtype_width(entry.dtype)))
        box = IndexBox(offsets[name].saved_offsets, entry.shape)
        chunk = SourceChunk(box, partial(StridedLocation._make, location), (file.path, start))
        chunks.append((name, entry.dtype, chunk))
    return chunks


def _join_chunks(
    path: Path, name: str, dtype: str, chunks: tuple[SourceChunk, ...], budget: ReadBudget
) -> ChunkedTensor:
    try:
        shape = tuple(
            max(start + size for start, size in dims)
            for dims in zip(*(zip(*chunk.box, strict=True) for chunk in chunks), strict=True)
        )
        non_empty = tuple(chunk for chunk in chunks if 0 not in chunk.box.shape)
        check_tiling([chunk.box for chunk in non_empty], shape, budget)
    except ValueError as error:
        raise CorruptCheckpointError(f"{path}: tensor {name!r} is incomplete: {error}") from error
    return ChunkedTensor(TensorInfo(dtype, shape), non_empty)
