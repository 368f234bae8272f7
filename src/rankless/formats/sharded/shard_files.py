"""Reading the tensor files that an index names: files of torch.save, and safetensors files, which may have pickles.

:mod:`rankless.formats.sharded.reader_files` reads with it, on each rank that opens such a folder, and so does
:mod:`rankless.formats.sharded.find_shard_faults`.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rankless.errors import CorruptCheckpointError
from rankless.formats.contained_paths import check_contained
from rankless.formats.pickles.builtin_types import PLAIN
from rankless.formats.pickles.numpy_arrays import NUMPY
from rankless.formats.pickles.unpickle import unpickle
from rankless.formats.reader import FileExtent
from rankless.formats.safetensors import SafetensorsFile
from rankless.formats.stored_tensor import StoredTensor
from rankless.formats.torch_file import read_tree
from rankless.ondisk import strict_json
from rankless.ondisk.block_crcs import crc64
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.read_budget import ReadBudget
from rankless.storage.direct_io import BufferedReader
from rankless.storage.store import store_of

#: Key of the header metadata in ColossalAI's asynchronous saves, with the names of values that are pickled into bytes.
PICKLED = "non_tensor_keys"

#: The name of a state of a parameter in ColossalAI's asynchronous saves.
_STATE = re.compile(r"state\.(?P<number>[0-9]{1,9})\.(?P<state>.+)")

#: The largest pickled value that is read, in bytes.
_LARGEST = 2**30


class ShardFile(NamedTuple):
    """The tree in a file, and a digest of the file's metadata."""

    tree: Any
    digest: int


@dataclass(frozen=True)
class ShardEntry(StoredTensor):
    """A tensor of a safetensors file."""

    info: TensorInfo
    file: SafetensorsFile
    name: str

    @property
    def identity(self) -> Hashable:
        """See :class:`StoredTensor`."""
        return self.file.path, self.name

    @property
    def crcs(self) -> Sequence[int] | None:
        """The CRCs that rankless wrote into the header, or ``None``."""
        return self.file.crcs.get(self.name)

    def find_extents(self, start: int, stop: int) -> Sequence[FileExtent]:
        """See :class:`StoredTensor`."""
        return [self.file.tensor_extent(self.name, start, stop)]


def read_shard(path: Path, root: Path, budget: ReadBudget) -> ShardFile:
    """Read a file that an index names. Raises ``CorruptCheckpointError`` if it is missing or truncated.

    The file must be inside ``root``, the folder that was opened. The bytes that are read are added to ``budget``.
    """
    if not store_of(path).path_exists(path):
        raise CorruptCheckpointError(f"{path} is missing; the index names it. Its save may not have finished")
    check_contained(path, root)
    if path.suffix == ".safetensors":
        return _read_safetensors(SafetensorsFile.open(path), budget)
    tree = read_tree(path, budget)
    return ShardFile(tree.root, tree.digest)


def _read_safetensors(file: SafetensorsFile, budget: ReadBudget) -> ShardFile:
    pickled = _pickled_names(file)
    tree: dict[str, Any] = {name: ShardEntry(info, file, name) for name, info in file.tensors.items()}
    budget.earn(file.header.size)
    for name in dict.fromkeys(pickled):
        raw = _read_pickle(file, name)
        budget.earn(len(raw))
        tree[name] = unpickle(raw, {**PLAIN, **NUMPY}, f"{file.path}: {name!r}", budget=budget)
    return ShardFile(tree, crc64(repr(sorted((name, file.tensors[name]) for name in file.tensors)).encode()))


def _pickled_names(file: SafetensorsFile) -> list[str]:
    """Return the names of the values that are pickled into bytes."""
    text = file.header.metadata.get(PICKLED)
    names = strict_json.parse_json(text.encode(), f"{PICKLED} of {file.path}") if text else []
    if not isinstance(names, list) or not all(isinstance(name, str) and name in file.tensors for name in names):
        raise CorruptCheckpointError(
            f"{file.path}: {PICKLED} in the header must be a list of names of tensors in the file"
        )
    return names


def _read_pickle(file: SafetensorsFile, name: str) -> bytes:
    info = file.tensors[name]
    if info.dtype != "U8" or info.nbytes > _LARGEST:
        raise CorruptCheckpointError(f"{file.path}: {name!r} must be a pickle in a tensor of dtype U8 of at most 1 GiB")
    raw = bytearray(info.nbytes)
    with BufferedReader(file.path) as reader:
        reader.read(file.tensor_extent(name, 0, 0).offset, memoryview(raw))
    return bytes(raw)


def merge_states(shards: Mapping[Path, Any]) -> dict[Any, dict[str, Any]]:
    """Return the states of an optimizer by parameter number, merged over the contents of all files.

    The keys in a file are parameter numbers, or names such as ``state.3.exp_avg``.
    """
    merged: dict[Any, dict[str, Any]] = {}
    for path, shard in shards.items():
        if not isinstance(shard, Mapping):
            raise CorruptCheckpointError(f"{path} must hold a dict of optimizer states, not a {type(shard).__name__}")
        for number, shard_states in _iterate_states(path, shard):
            states = merged.setdefault(number, {})
            duplicate = next((name for name in shard_states if name in states), None)
            if duplicate is not None:
                raise CorruptCheckpointError(
                    f"{path}: state {str(duplicate)[:80]!r} of optimizer parameter {number} is stored twice"
                )
            states.update(shard_states)
    return merged


def _iterate_states(path: Path, shard: Mapping[Any, Any]) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    for key, value in shard.items():
        if isinstance(key, int) and isinstance(value, Mapping):
            yield key, value
        elif isinstance(key, str) and (named := _STATE.fullmatch(key)):
            yield int(named["number"]), {named["state"]: value}
        elif key != "param_groups":
            raise CorruptCheckpointError(
                f"{path}: the key {key!r:.80} of an optimizer state is not the number of a parameter"
            )
