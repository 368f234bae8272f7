"""The files of ``torch.distributed.checkpoint``, written by torch itself with holes where the data of tensors go.

Source: ``torch/distributed/checkpoint/filesystem.py`` of torch 2.13.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import skip_data

from holdfast.errors import InvalidArgumentError
from holdfast.formats.dcp.folder import METADATA
from holdfast.ondisk.files import split_by_size
from holdfast.storage.posix import new_file, write_small

#: The most bytes of a tensor in one chunk, but for a single row: torch reads whole chunks to get at any part of one.
_CHUNK = 64 * 2**20


@dataclass(frozen=True)
class FlatState:
    """A tree by flat names, as torch has them, with the path of each."""

    values: Mapping[str, Any]
    paths: Mapping[str, Any]

    @classmethod
    def of(cls, tree: dict[str, Any]) -> FlatState:
        """A tree, flattened. Raises ``InvalidArgumentError`` where two things would have one name."""
        planner = DefaultSavePlanner()
        try:
            planner.set_up_planner(tree, is_coordinator=True)
        except ValueError as error:
            raise InvalidArgumentError(
                f"torch.distributed.checkpoint joins keys by dots, and cannot tell these apart: {error}"
            ) from error
        return cls(planner.state_dict, planner.mappings)


@dataclass(frozen=True)
class _Record:
    """A value, or a chunk of a tensor: what is one file of ``torch.save`` in a file of several."""

    index: MetadataIndex
    value: Any
    nbytes: int = 0


def write_records(folder: Path, flat: FlatState, limit: int) -> None:
    """Write a tree, with ``limit`` bytes of tensors in a file at most, where one chunk is not larger.

    A tensor that is there under several names lies in the files once. Nothing is durable yet but the metadata.
    """
    metadata = Metadata(_described(flat), planner_data=dict(flat.paths), storage_data={}, storage_meta=StorageMeta())
    metadata.version = CURRENT_DCP_VERSION
    records = list(_records(flat))
    sizes = {number: record.nbytes for number, record in enumerate(records)}
    for number, shelf in enumerate(split_by_size(sizes, limit)):
        metadata.storage_data |= dict(_write(folder / f"__0_{number}.distcp", [records[one] for one in shelf]))
    for name, first in _first_names(flat).items():
        for chunk in _chunks(flat.values[name]):
            there = metadata.storage_data[MetadataIndex(first, chunk.offsets)]
            metadata.storage_data[MetadataIndex(name, chunk.offsets)] = there
    write_small(folder / METADATA, pickle.dumps(metadata))


def _described(flat: FlatState) -> dict[str, Any]:
    return {name: _metadata(value) for name, value in flat.values.items()}


def _metadata(value: Any) -> BytesStorageMetadata | TensorStorageMetadata:
    if not isinstance(value, torch.Tensor):
        return BytesStorageMetadata()
    return TensorStorageMetadata(TensorProperties(value.dtype), value.size(), list(_chunks(value)))


def _chunks(tensor: torch.Tensor) -> Iterator[ChunkStorageMetadata]:
    """Whole rows, so that each chunk is one range of the tensor's bytes."""
    length = len(tensor) if tensor.ndim else 1
    rows = max(1, _CHUNK * length // max(tensor.nbytes, 1))
    if rows >= length:
        yield ChunkStorageMetadata(torch.Size([0] * tensor.ndim), tensor.size())
        return
    for start in range(0, length, rows):
        offsets = torch.Size([start, *(0 for _ in tensor.shape[1:])])
        yield ChunkStorageMetadata(offsets, torch.Size([min(rows, length - start), *tensor.shape[1:]]))


def _first_names(flat: FlatState) -> dict[str, str]:
    """For each name of a tensor, the first of the names that it has."""
    known: dict[int, str] = {}
    tensors = ((name, value) for name, value in flat.values.items() if isinstance(value, torch.Tensor))
    return {name: known.setdefault(id(value), name) for name, value in tensors}


def _records(flat: FlatState) -> Iterator[_Record]:
    """Values first, then the chunks of tensors: as torch has them."""
    for name, value in flat.values.items():
        if not isinstance(value, torch.Tensor):
            yield _Record(MetadataIndex(name), value)
    for name, first in _first_names(flat).items():
        if name == first:
            yield from _pieces(name, flat.values[name])


def _pieces(name: str, tensor: torch.Tensor) -> Iterator[_Record]:
    for chunk in _chunks(tensor):
        piece = tensor if chunk.sizes == tensor.shape else tensor.new_empty(chunk.sizes)
        yield _Record(MetadataIndex(name, chunk.offsets), piece, piece.nbytes)


def _write(path: Path, shelf: Sequence[_Record]) -> Iterator[tuple[MetadataIndex, _StorageInfo]]:
    with new_file(path) as file, skip_data(materialize_fake_tensors=True):
        for record in shelf:
            start = file.tell()
            torch.save(record.value, file)
            yield record.index, _StorageInfo(path.name, start, file.tell() - start)
