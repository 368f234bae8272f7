"""The file ``.metadata``: which chunks a tensor has, in which file each lies, and where in a tree each thing belongs.

Source: ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py`` of torch 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from holdfast.engine.plan.ranges import IndexBox
from holdfast.errors import CorruptCheckpointError, FormatError
from holdfast.formats.pickles.builtin_types import plain_record
from holdfast.formats.pickles.unpickle import unpickle
from holdfast.formats.pickles.unpickler import AllowedCallable, OpaqueObject
from holdfast.formats.stored_tensor import UnreadableTensor
from holdfast.formats.torchfile.allowed_globals import NAMES
from holdfast.formats.torchfile.dtypes import DTYPES
from holdfast.formats.torchfile.objects import TorchDtype, TorchSize
from holdfast.formats.tree.expanded_size import check_expanded_size
from holdfast.formats.tree.traversal import Path
from holdfast.ondisk.dtypes import WIDTHS
from holdfast.ondisk.files import TensorInfo
from holdfast.ondisk.hash_limits import check_hashes
from holdfast.ondisk.read_budget import ReadBudget
from holdfast.ondisk.values import MAX_DEPTH

_LARGEST = 2**63

_MODULE = "torch.distributed.checkpoint"
_CLASSES = (
    *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
    *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
)

#: What to do about pickles that would run code: in folders of ``torch.distributed.checkpoint``.
DCP_LOAD = (
    "If you trust who wrote it, load it with torch.distributed.checkpoint.load, by torch's own FileSystemReader or by "
    "holdfast.dcp.FileSystemReader(path, weights_only=False), and save it again without that"
)

#: Where torch had two of these before 2.3.
_BEFORE = "torch.distributed._shard.sharded_tensor.metadata"

#: The allow-list of metadata.
_NAMES: Mapping[str, object] = {
    **NAMES,
    **{f"{_MODULE}.metadata.{name}": AllowedCallable(name, plain_record(name)) for name in _CLASSES},
    f"{_MODULE}.filesystem._StorageInfo": AllowedCallable("_StorageInfo", plain_record("_StorageInfo")),
    **{
        f"{_BEFORE}.{name}": AllowedCallable(name, plain_record(name))
        for name in ("MEM_FORMAT_ENCODING", "TensorProperties")
    },
}


class RecordLocation(NamedTuple):
    """Where something lies: a file beside the metadata, and a range of it in bytes."""

    file: str
    offset: int
    size: int


@dataclass
class TensorMetadata:
    """A tensor, and where each of its chunks lies, by the box that it is."""

    info: TensorInfo
    chunks: dict[IndexBox, RecordLocation] = field(default_factory=dict)


@dataclass
class DcpMetadata:
    """What a checkpoint holds: tensors, other values, and tensors that holdfast does not read, by their flat names.

    ``paths`` has the path of each in a tree. ``save_id`` is what torch has told the save from others by.
    """

    tensors: dict[str, TensorMetadata] = field(default_factory=dict)
    values: dict[str, RecordLocation] = field(default_factory=dict)
    unreadable: dict[str, UnreadableTensor] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    save_id: str | None = None

    def merge(self, other: DcpMetadata, source: str) -> None:
        """Take in what another rank has saved by itself; what both have is this one's."""
        for name, tensor in other.tensors.items():
            mine = self.tensors.setdefault(name, tensor)
            if mine.info != tensor.info or name in self.values:
                raise CorruptCheckpointError(
                    f"{source}: tensor {name!r} is of another shape or dtype there than on another rank"
                )
            mine.chunks = {**tensor.chunks, **mine.chunks}
        self.values = {**other.values, **self.values}
        self.unreadable = {**other.unreadable, **self.unreadable}
        self.paths = {**other.paths, **self.paths}
        self.save_id = self.save_id or other.save_id


def decode_metadata(raw: bytes, source: str, budget: ReadBudget | None = None) -> DcpMetadata:
    """Read metadata, whose bytes ``budget`` earns.

    Raises ``CorruptCheckpointError`` or ``UnsafePickleError`` naming ``source``.
    """
    paid = ReadBudget() if budget is None else budget
    paid.earn(len(raw))
    root = unpickle(raw, _NAMES, source, budget=paid, advice=DCP_LOAD)
    try:
        check_expanded_size(root, paid)
        return _decode(_state(root, "Metadata"), source)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, CorruptCheckpointError | FormatError):
            raise _naming(error, source) from error
        raise CorruptCheckpointError(f"{source} is no metadata of a distributed checkpoint: {error}") from error


def _naming(error: CorruptCheckpointError | FormatError, source: str) -> CorruptCheckpointError | FormatError:
    return error if str(error).startswith(source) else type(error)(f"{source}: {error}")


def _decode(state: Mapping[str, Any], source: str) -> DcpMetadata:
    if state["storage_data"] is None:
        raise ValueError("it does not say where anything lies")
    rows = list(_places(state["storage_data"], source))
    check_hashes([key for key, _ in rows])
    places = dict(rows)
    found = DcpMetadata()
    for name, entry in _table(state["state_dict_metadata"]).items():
        if isinstance(entry, OpaqueObject) and entry.name == "BytesStorageMetadata":
            if (name, None) not in places:
                raise CorruptCheckpointError(f"{source}: nothing was saved of {name!r}: a rank failed to write it")
            found.values[name] = places[name, None]
        else:
            tensor = _tensor(name, entry, places, source)
            if isinstance(tensor, UnreadableTensor):
                found.unreadable[name] = tensor
            else:
                found.tensors[name] = tensor
    paths = state.get("planner_data")
    if isinstance(paths, dict):
        found.paths = {name: _path(path) for name, path in _table(paths).items()}
    found.save_id = _save_id(state.get("storage_meta"))
    return found


def _save_id(meta: Any) -> str | None:
    """Checkpoints before torch 2.4 have none."""
    known = _state(meta, "StorageMeta").get("save_id") if isinstance(meta, OpaqueObject) else None
    return known if isinstance(known, str) else None


def _tensor(
    name: str, entry: Any, places: Mapping[tuple[str, Any], RecordLocation], source: str
) -> TensorMetadata | UnreadableTensor:
    state = _state(entry, "TensorStorageMetadata")
    properties = state["properties"].state
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    if not isinstance(dtype, TorchDtype):
        raise TypeError(f"tensor {name!r} has no dtype")
    if dtype.name not in DTYPES:
        return UnreadableTensor(f"has dtype {dtype.name}, which holdfast does not read")
    found = TensorMetadata(TensorInfo(DTYPES[dtype.name], _shape(state["size"])))
    if math.prod(size or 1 for size in found.info.shape) * WIDTHS[found.info.dtype] >= _LARGEST:
        raise ValueError(f"no tensor can have the shape {list(found.info.shape)} that {name!r} has")
    for chunk in state["chunks"]:
        box = IndexBox(*(_shape(_state(chunk, "ChunkStorageMetadata")[part]) for part in ("offsets", "sizes")))
        if not math.prod(box.shape):
            continue
        if (name, box.offset) not in places:
            raise CorruptCheckpointError(
                f"{source}: nothing was saved of tensor {name!r} at {list(box.offset)}: a rank failed to write it"
            )
        found.chunks.setdefault(box, places[name, box.offset])
    return found


def _places(table: Any, source: str) -> Iterator[tuple[tuple[str, Any], RecordLocation]]:
    for index, info in table.items():
        key, value = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
        if value.get("transform_descriptors"):
            raise FormatError(
                f"{source}: {key['fqn']!r:.100} was written by way of {value['transform_descriptors']!s:.100}, which "
                "holdfast does not undo: load it with torch.distributed.checkpoint, and save it without extensions"
            )
        place = RecordLocation(value["relative_path"], value["offset"], value["length"])
        if not isinstance(place.file, str) or not all(type(one) is int and 0 <= one < _LARGEST for one in place[1:]):
            raise ValueError(f"the place of {key['fqn']!r} is none")
        offset = key.get("offset")
        yield (key["fqn"], None if offset is None else _shape(offset)), place


def _state(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, OpaqueObject) or value.name != name or not isinstance(value.state, dict):
        raise TypeError(f"where {name} should be is something else")
    return value.state


def _table(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise TypeError("where names should be is something else")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, TorchSize):
        raise TypeError("where a size should be is something else")
    return tuple(value)


def _path(value: Any) -> Path:
    if not isinstance(value, tuple) or not value or not all(type(part) in {str, int} for part in value):
        raise TypeError("where a path should be is something else")
    if len(value) > MAX_DEPTH:
        raise ValueError(f"a path has {len(value)} parts")
    return value
