"""Decoding the file ``.metadata``: the chunks of each tensor, the file of each, and the path of each entry in the tree.

Source: ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py`` of torch 2.13.

:mod:`rankless.dcp.reader.dcp_directory` calls it on each rank that opens a folder. Only the names in the allow-list may
be looked up: the file is not trusted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rankless.engine.plan.element_ranges import IndexBox
from rankless.errors import CorruptCheckpointError, FormatError
from rankless.formats.pickles.builtin_types import plain_record
from rankless.formats.pickles.unpickle import unpickle
from rankless.formats.pickles.unpickler import AllowedCallable, OpaqueObject, kind_of
from rankless.formats.stored_tensor import UnreadableTensor
from rankless.formats.torchfile.allowed_globals import NAMES, check_sizes
from rankless.formats.torchfile.torch_placeholders import TorchDtype, TorchSize
from rankless.formats.tree.expanded_size import check_expanded_size
from rankless.formats.tree.tree_traversal import Path
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.dtypes import BY_TORCH_NAME, dtype_width
from rankless.ondisk.hash_limits import check_hashes
from rankless.ondisk.read_budget import ReadBudget
from rankless.ondisk.values import MAX_DEPTH

_LARGEST = 2**63

_MODULE = "torch.distributed.checkpoint"
_CLASSES = (
    *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
    *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
)

#: The classes of the plans of a save, which some writers keep in the metadata, and which are not needed for reading.
_PLANS = ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")

#: The module of Megatron's classes of metadata and plans, which have a few attributes more than torch's classes.
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"

#: Megatron's key, in the data of a tensor, of the shape that a tensor had before it was stored in another one.
_ORIGINAL_SHAPE = "nd_reformulated_orig_global_shape"

#: Advice in messages about unsafe pickles in folders of ``torch.distributed.checkpoint``.
DCP_LOAD = (
    "If you trust who wrote it, load it with torch.distributed.checkpoint.load, by torch's own FileSystemReader or by "
    "rankless.dcp.FileSystemReader(path, weights_only=False), and save it again without that"
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
    **{f"{_MODULE}.planner.{name}": AllowedCallable(name, plain_record(name)) for name in _PLANS},
    f"{_MEGATRON}.MCoreMetadata": AllowedCallable("Metadata", plain_record("Metadata")),
    f"{_MEGATRON}.MCoreSavePlan": AllowedCallable("SavePlan", plain_record("SavePlan")),
}


class RecordLocation(NamedTuple):
    """The location of a record: a file next to the metadata, and a byte range of it."""

    file: str
    offset: int
    size: int


@dataclass
class TensorMetadata:
    """A tensor, and the location of each of its chunks by the chunk's box."""

    info: TensorInfo
    chunks: dict[IndexBox, RecordLocation] = field(default_factory=dict)


@dataclass
class DcpMetadata:
    """The entries of a checkpoint by their flat names: tensors, other values, and tensors that rankless cannot read.

    ``paths`` has the path of each entry in the tree. ``original_shapes`` are the shapes of tensors that Megatron stored
    in another shape. ``save_id`` is the id that torch gave the save, and ``version``
    the version of torch's format; both are ``None`` in checkpoints of older releases.
    """

    tensors: dict[str, TensorMetadata] = field(default_factory=dict)
    values: dict[str, RecordLocation] = field(default_factory=dict)
    unreadable: dict[str, UnreadableTensor] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    original_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    save_id: str | None = None
    version: str | None = None

    def merge_rank(self, other: DcpMetadata, source: str) -> None:
        """Add the entries of another rank's metadata file. If both have an entry, ``self``'s stays."""
        for name, theirs in other.tensors.items():
            ours = self.tensors.setdefault(name, theirs)
            if ours.info != theirs.info or name in self.values:
                raise CorruptCheckpointError(
                    f"{source}: tensor {name!r} has another shape or dtype here than in the metadata of another rank"
                )
            ours.chunks = {**theirs.chunks, **ours.chunks}
        self.values = {**other.values, **self.values}
        self.unreadable = {**other.unreadable, **self.unreadable}
        self.paths = {**other.paths, **self.paths}
        self.original_shapes = {**other.original_shapes, **self.original_shapes}
        self.save_id = self.save_id or other.save_id
        self.version = self.version or other.version


def decode_metadata(raw: bytes, source: str, budget: ReadBudget | None = None) -> DcpMetadata:
    """Decode metadata. Its bytes are added to ``budget``, and decoding is charged to it.

    Raises ``CorruptCheckpointError``, ``FormatError`` or ``UnsafePickleError``, naming ``source``.
    """
    if budget is None:
        budget = ReadBudget()
    budget.earn(len(raw))
    root = unpickle(raw, _NAMES, source, budget=budget, advice=DCP_LOAD)
    try:
        check_expanded_size(root, budget)
        return _decode_state(_state_of(root, "Metadata"), source)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, CorruptCheckpointError | FormatError):
            raise _prefix_error(error, source) from error
        raise CorruptCheckpointError(f"{source} is not valid metadata of a distributed checkpoint: {error}") from error


def _prefix_error(error: CorruptCheckpointError | FormatError, source: str) -> CorruptCheckpointError | FormatError:
    return error if str(error).startswith(source) else type(error)(f"{source}: {error}")


def _decode_state(state: Mapping[str, Any], source: str) -> DcpMetadata:
    if state["storage_data"] is None:
        raise ValueError("storage_data is None, so the files of the entries are unknown")
    rows = list(_iterate_locations(state["storage_data"], source))
    check_hashes([key for key, _ in rows])
    locations = dict(rows)
    decoded = DcpMetadata()
    for name, entry in _check_table(state["state_dict_metadata"], "state_dict_metadata").items():
        if isinstance(entry, OpaqueObject) and entry.name == "BytesStorageMetadata":
            if (name, None) not in locations:
                raise CorruptCheckpointError(
                    f"{source}: value {name!r} has no entry in storage_data: a rank failed to write it"
                )
            decoded.values[name] = locations[name, None]
        else:
            tensor = _decode_tensor(name, entry, locations, source)
            if isinstance(tensor, UnreadableTensor):
                decoded.unreadable[name] = tensor
            else:
                decoded.tensors[name] = tensor
    paths = state.get("planner_data")
    if isinstance(paths, dict):
        decoded.paths = {name: _check_path(path, name) for name, path in _check_table(paths, "planner_data").items()}
    decoded.original_shapes = dict(_iterate_original_shapes(state.get("mcore_data")))
    decoded.save_id = _decode_save_id(state.get("storage_meta"))
    decoded.version = _text_or_none(state.get("version"))
    return decoded


def _iterate_original_shapes(table: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors that Megatron stored in another shape, with their own shapes."""
    for name, data in _check_table({} if table is None else table, "mcore_data").items():
        shape = data.get(_ORIGINAL_SHAPE) if isinstance(data, dict) else None
        if shape is not None:
            if not isinstance(shape, tuple | list) or not all(type(n) is int and 0 <= n < _LARGEST for n in shape):
                raise TypeError(f"the shape of {name!r} in mcore_data must be a tuple of integers")
            yield name, tuple(shape)


def _decode_save_id(meta: Any) -> str | None:
    """Return the id of the save, or ``None`` for checkpoints of torch before 2.4."""
    return _text_or_none(_state_of(meta, "StorageMeta").get("save_id")) if isinstance(meta, OpaqueObject) else None


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _decode_tensor(
    name: str, entry: Any, locations: Mapping[tuple[str, Any], RecordLocation], source: str
) -> TensorMetadata | UnreadableTensor:
    state = _state_of(entry, "TensorStorageMetadata")
    properties = state["properties"].state
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    if not isinstance(dtype, TorchDtype):
        raise TypeError(f"tensor {name!r} has no dtype")
    if dtype.name not in BY_TORCH_NAME:
        return UnreadableTensor(f"has dtype {dtype.name}, which rankless does not read")
    tensor = TensorMetadata(TensorInfo(BY_TORCH_NAME[dtype.name], _to_shape(state["size"], name)))
    if math.prod(size or 1 for size in tensor.info.shape) * dtype_width(tensor.info.dtype) >= _LARGEST:
        raise ValueError(f"tensor {name!r} has the shape {list(tensor.info.shape)}, which is too large for torch")
    for chunk in state["chunks"]:
        chunk_state = _state_of(chunk, "ChunkStorageMetadata")
        box = IndexBox(*(_to_shape(chunk_state[key], name) for key in ("offsets", "sizes")))
        if not math.prod(box.shape):
            continue
        if (name, box.offset) not in locations:
            raise CorruptCheckpointError(
                f"{source}: the chunk of tensor {name!r} at {list(box.offset)} has no entry in storage_data: a rank "
                "failed to write it"
            )
        tensor.chunks.setdefault(box, locations[name, box.offset])
    return tensor


def _iterate_locations(table: Any, source: str) -> Iterator[tuple[tuple[str, Any], RecordLocation]]:
    """Yield the location of each record with its name and, for a chunk of a tensor, its offset."""
    for index, info in table.items():
        key, value = _state_of(index, "MetadataIndex"), _state_of(info, "_StorageInfo")
        if value.get("transform_descriptors"):
            raise FormatError(
                f"{source}: {key['fqn']!r:.100} was written with the extension "
                f"{value['transform_descriptors']!s:.100}, which rankless cannot decode: load it with "
                "torch.distributed.checkpoint, and save it without extensions"
            )
        location = RecordLocation(value["relative_path"], value["offset"], value["length"])
        numbers = location.offset, location.size
        if not isinstance(location.file, str) or not all(type(n) is int and 0 <= n < _LARGEST for n in numbers):
            raise ValueError(f"the storage info of {key['fqn']!r:.100} must have a file name, an offset and a length")
        offset = key.get("offset")
        yield (key["fqn"], None if offset is None else _to_shape(offset, key["fqn"])), location


def _state_of(value: Any, name: str) -> Mapping[str, Any]:
    """Return the attributes of an object of the class ``name``. Raises ``TypeError`` if it is of another class."""
    if not isinstance(value, OpaqueObject) or value.name != name or not isinstance(value.state, dict):
        raise TypeError(f"expected an object of the class {name}, got {kind_of(value)}")
    return value.state


def _check_table(value: Any, field_name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{field_name} must be a dict whose keys are strings")
    return value


def _to_shape(value: Any, name: Any) -> tuple[int, ...]:
    if type(value) not in {TorchSize, tuple}:  # Megatron-FSDP writes the chunks of its tensors with tuples
        raise TypeError(f"the sizes and offsets of {name!r:.100} must be of type torch.Size, got {kind_of(value)}")
    return check_sizes(tuple(value))


def _check_path(value: Any, name: str) -> Path:
    if not isinstance(value, tuple) or not value or not all(type(part) in {str, int} for part in value):
        raise TypeError(f"the path of {name!r:.100} in planner_data must be a tuple of strings and integers")
    if len(value) > MAX_DEPTH:
        raise ValueError(
            f"the path of {name!r:.100} in planner_data has {len(value)} parts; at most {MAX_DEPTH} are allowed"
        )
    return value
