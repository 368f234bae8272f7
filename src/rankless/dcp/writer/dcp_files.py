"""A writer of ``torch.distributed.checkpoint`` files. torch writes them with holes in place of tensor data.

Source: ``torch/distributed/checkpoint/filesystem.py`` of torch 2.13.

The conversion targets ``dcp``, ``lightning-folder`` and ``megatron`` call it on rank 0, in the vote "preparing". The
files must be those that torch reads.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
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

from rankless.dcp.reader.dcp_directory import METADATA
from rankless.dcp_versions import DCP_VERSION
from rankless.engine.plan.element_ranges import IndexBox
from rankless.errors import InvalidArgumentError
from rankless.observe.warning import warn_caller
from rankless.ondisk.data_files import split_by_size
from rankless.storage.posix import new_file, write_small

#: The maximum bytes of one chunk: torch reads a whole chunk to get any part of it.
_CHUNK = 64 * 2**20


@dataclass(frozen=True)
class FlatState:
    """A tree by torch's flat names, with the path of each; no paths if the tree was flat."""

    values: Mapping[str, Any]
    paths: Mapping[str, Any] | None = None

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> FlatState:
        """Flatten a tree. Raises ``InvalidArgumentError`` if two values would have one name.

        Warn of the first table that the flat names cannot describe.
        """
        changed = next(_list_changed_tables(tree, ()), None)
        if changed is not None:
            warn_caller(f"torch.distributed.checkpoint joins keys to one text, so that {changed}")
        planner = DefaultSavePlanner()
        try:
            planner.set_up_planner(tree, is_coordinator=True)
        except ValueError as error:
            raise InvalidArgumentError(
                f"torch.distributed.checkpoint joins keys by dots, so that these keys are equal: {error}"
            ) from error
        return cls(planner.state_dict, planner.mappings)


def _list_changed_tables(tree: Any, path: tuple[str, ...]) -> Iterator[str]:
    """Yield changes that a load will find. Schedulers, and optimizers by number, get the numbers in keys back."""
    if isinstance(tree, list):
        for number, value in enumerate(tree):
            yield from _list_changed_tables(value, (*path, str(number)))
    if not isinstance(tree, Mapping) or path[:1] == ("scheduler",):
        return
    is_by_number = path[:1] == ("optim",) and path[-1] == "state"
    if not tree and path and path != ("model",) and not is_by_number:
        yield f"the empty table {'.'.join(path)!r} is left out"
    for key, value in tree.items():
        if not isinstance(key, str) and not is_by_number:
            yield f"the key {key!r} in {'.'.join(path)!r} is loaded as {str(key)!r}"
        yield from _list_changed_tables(value, (*path, str(key)))


@dataclass(frozen=True)
class _TorchRecord:
    """A value or a chunk of a tensor: one ``torch.save`` record in a file of several."""

    index: MetadataIndex
    value: Any
    nbytes: int = 0


def write_records(folder: Path, flat: FlatState, limit: int) -> None:
    """Write a tree in files of at most ``limit`` bytes of tensors, unless one chunk is larger.

    A tensor with several names is stored once. Only the metadata is durable afterwards.
    """
    metadata = Metadata(
        _describe_values(flat),
        planner_data=None if flat.paths is None else dict(flat.paths),
        storage_data={},
        storage_meta=StorageMeta(),
    )
    metadata.version = DCP_VERSION
    records = list(_list_records(flat))
    sizes = {number: record.nbytes for number, record in enumerate(records)}
    for number, numbers in enumerate(split_by_size(sizes, limit)):
        metadata.storage_data |= dict(_write_file(folder / f"__0_{number}.distcp", [records[i] for i in numbers]))
    for name, first in _first_names(flat).items():
        for chunk in _row_chunks(flat.values[name]):
            stored = metadata.storage_data[MetadataIndex(first, chunk.offsets)]
            metadata.storage_data[MetadataIndex(name, chunk.offsets)] = stored
    write_small(folder / METADATA, pickle.dumps(metadata))


def _describe_values(flat: FlatState) -> dict[str, Any]:
    return {name: _describe_value(value) for name, value in flat.values.items()}


def _describe_value(value: Any) -> BytesStorageMetadata | TensorStorageMetadata:
    if not isinstance(value, torch.Tensor):
        return BytesStorageMetadata()
    return TensorStorageMetadata(TensorProperties.create_from_tensor(value), value.size(), list(_row_chunks(value)))


def _row_chunks(tensor: torch.Tensor) -> Iterator[ChunkStorageMetadata]:
    """Split a tensor into chunks. Each is one range of the tensor's bytes."""
    for box in _split_rows(tuple(tensor.shape), tensor.element_size()):
        yield ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))


def _split_rows(shape: tuple[int, ...], width: int) -> Iterator[IndexBox]:
    """Split a tensor of elements of ``width`` bytes into whole rows, or a row that is too large into parts of it."""
    row_bytes = math.prod(shape[1:]) * width
    if not shape or shape[0] * row_bytes <= _CHUNK or math.prod(shape) == 0:
        yield IndexBox((0,) * len(shape), shape)
        return
    rows = _CHUNK // row_bytes
    if rows == 0 and len(shape) > 1:
        inner = list(_split_rows(shape[1:], width))
        for row in range(shape[0]):
            yield from (IndexBox((row, *box.offset), (1, *box.shape)) for box in inner)
        return
    for start in range(0, shape[0], rows):
        yield IndexBox((start, *(0 for _ in shape[1:])), (min(rows, shape[0] - start), *shape[1:]))


def _first_names(flat: FlatState) -> dict[str, str]:
    """Return the first name of each tensor by each of its names."""
    first_names: dict[int, str] = {}
    tensors = ((name, value) for name, value in flat.values.items() if isinstance(value, torch.Tensor))
    return {name: first_names.setdefault(id(value), name) for name, value in tensors}


def _list_records(flat: FlatState) -> Iterator[_TorchRecord]:
    """Iterate over values, then over the chunks of tensors, in torch's order."""
    for name, value in flat.values.items():
        if not isinstance(value, torch.Tensor):
            yield _TorchRecord(MetadataIndex(name), value)
    for name, first in _first_names(flat).items():
        if name == first:
            yield from _chunk_records(name, flat.values[name])


def _chunk_records(name: str, tensor: torch.Tensor) -> Iterator[_TorchRecord]:
    for chunk in _row_chunks(tensor):
        data = tensor if chunk.sizes == tensor.shape else tensor.new_empty(chunk.sizes)
        yield _TorchRecord(MetadataIndex(name, chunk.offsets), data, data.nbytes)


def _write_file(path: Path, records: Sequence[_TorchRecord]) -> Iterator[tuple[MetadataIndex, _StorageInfo]]:
    with new_file(path) as file, skip_data(materialize_fake_tensors=True):
        for record in records:
            start = file.tell()
            torch.save(record.value, file)
            yield record.index, _StorageInfo(path.name, start, file.tell() - start)
