"""A ``StorageReader``: what is read is checked, nothing that is read is run, and of a chunk only what is asked for."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import mul
from os import PathLike
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
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
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from holdfast.errors import InvalidArgumentError, MismatchError
from holdfast.formats.arrange.contents import kept
from holdfast.formats.arrange.reader import TreeReader
from holdfast.formats.dcp import checksums, metadata
from holdfast.formats.dcp.checksums import Verified
from holdfast.formats.dcp.folder import Folder, chunk_of
from holdfast.formats.dcp.metadata import Place
from holdfast.formats.torchfile import archive
from holdfast.formats.torchfile.zips import Reads
from holdfast.layout.dtypes import width
from holdfast.layout.files import TensorInfo
from holdfast.state.tensors import DTYPES
from holdfast.storage import local
from holdfast.storage.readers import Readers
from holdfast.view import Checkpoint


@dataclass(frozen=True)
class _Opened:
    """A folder under a path, what it holds, and what reads its records, each known by its name and offset."""

    folder: Folder
    found: metadata.Metadata
    readers: Reads
    records: Mapping[tuple[str, tuple[int, ...] | None], tuple[TensorInfo | None, Place]]

    @classmethod
    def of(cls, path: Path, *, verify: bool) -> _Opened:
        plain = Readers()
        found, raw = Folder(path, plain).read_metadata()
        known = checksums.read(path, raw) if verify else None
        readers: Reads = plain if known is None else Verified(plain, path, known.files)
        return cls(Folder(path, readers), found, readers, dict(_records(found)))

    def record(self, item: ReadItem) -> tuple[TensorInfo | None, Place]:
        """What a read is of: a chunk of a tensor, or a value."""
        index = item.storage_index
        return self.records[index.fqn, None if index.offset is None else tuple(index.offset)]


def _records(
    found: metadata.Metadata,
) -> Iterator[tuple[tuple[str, tuple[int, ...] | None], tuple[TensorInfo | None, Place]]]:
    yield from (((name, None), (None, place)) for name, place in found.values.items())
    for name, tensor in found.tensors.items():
        for box, place in tensor.chunks.items():
            yield (name, box.offset), (TensorInfo(tensor.info.dtype, box.shape), place)


class FileSystemReader(StorageReader):
    """Reads a folder for ``dcp.load``, whoever wrote it.

    The metadata must be whole: each tensor covered by its chunks, each chunk inside of its file. Where there is a
    ``checksums.json``, all that is read is verified in blocks of 16 MiB. Of a chunk that a rank needs a part of, it
    reads that part.

    Args:
        path: the folder; ``checkpoint_id`` of a load takes its place.
        verify: whether checksums are looked at where there are any.
        weights_only: of values, only tensors and plain types are read, and no code runs, whatever is in the file.
            With ``False`` torch unpickles them, which can run anything: for folders that you trust.

    Errors of any rank come out of ``dcp.load`` as torch's ``CheckpointException``, with those of holdfast in it.
    """

    def __init__(self, path: str | PathLike[str], *, verify: bool = True, weights_only: bool = True) -> None:
        self.path = local.local_path(path)
        self._verify, self._weights_only = verify, weights_only
        self._opened: _Opened | None = None

    @property
    def checkpoint_id(self) -> str:
        """The folder's path."""
        return str(self.path)

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """A new load begins."""
        if checkpoint_id:
            self.path = local.local_path(checkpoint_id)
        self._opened = None

    def read_metadata(self) -> Metadata:
        """See torch's ``StorageReader``, here and below. Raises ``DamagedError`` where it is not whole."""
        self._opened = opened = _Opened.of(self.path, verify=self._verify)
        entries: dict[str, Any] = {name: BytesStorageMetadata() for name in opened.found.values}
        places = {MetadataIndex(name): _info(place) for name, place in opened.found.values.items()}
        for name, place in opened.found.values.items():
            opened.folder.window(name, place)
        for name, tensor in opened.found.tensors.items():
            opened.folder.tensor(name, tensor)
            chunks = [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)) for box in tensor.chunks]
            properties = TensorProperties(DTYPES[tensor.info.dtype])
            entries[name] = TensorStorageMetadata(properties, torch.Size(tensor.info.shape), chunks)
            for box, place in tensor.chunks.items():
                places[MetadataIndex(name, torch.Size(box.offset))] = _info(place)
        meta = StorageMeta(checkpoint_id=self.checkpoint_id, load_id=str(uuid4()))
        return Metadata(entries, dict(opened.found.paths), places, meta)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is left to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank needs, in the order of the files."""
        opened = self._opened
        if opened is None:
            raise InvalidArgumentError(f"the metadata of {self.path} is to be read first")
        for item in sorted(plan.items, key=lambda item: opened.record(item)[1]):
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self._value(opened, item)))
                continue
            target = planner.resolve_tensor(item).detach()
            if target.size() != item.lengths:
                raise MismatchError(
                    f"{item.storage_index.fqn!r} is to be read into {list(target.size())}, and {list(item.lengths)} of "
                    "it was asked for"
                )
            target.copy_(_part(opened, item))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _value(self, opened: _Opened, item: ReadItem) -> bytes:
        """The pickle that torch is to load: ours, of what is in the file, as it will run what it is given."""
        window = opened.folder.window(item.storage_index.fqn, opened.record(item)[1])
        raw = window.read(0, window.size)
        if not self._weights_only:
            return raw
        tree = archive.read(window)
        reader = TreeReader(self.path, "dcp", [], "", kept(tree.root, tree.nbytes, window.label))
        stream = io.BytesIO()
        torch.save(Checkpoint(reader).values["user_content"], stream)
        return stream.getvalue()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Whether this is a path of a file system."""
        return "://" not in str(checkpoint_id)


def _info(place: Place) -> _StorageInfo:
    return _StorageInfo(place.file, place.offset, place.size)


def _part(opened: _Opened, item: ReadItem) -> torch.Tensor:
    """A box of a chunk: the bytes from its first element to its last are read, and seen as it."""
    info, place = opened.record(item)
    if info is None:
        raise MismatchError(f"{item.storage_index.fqn!r} is a tensor here, and a value in {opened.folder.path}")
    there = chunk_of(item.storage_index.fqn, info, opened.folder.window(item.storage_index.fqn, place))
    size = width(info.dtype)
    first = there.offset + sum(map(mul, item.storage_offsets, there.strides))
    reach = sum((length - 1) * stride for length, stride in zip(item.lengths, there.strides, strict=True)) + size
    data = torch.empty(reach if item.lengths.numel() else 0, dtype=torch.uint8)
    opened.readers.read(there.file, first, memoryview(data.numpy()))
    return data.view(DTYPES[info.dtype]).as_strided(item.lengths, [stride // size for stride in there.strides])
