"""The files that hold tensors: files of torch.save, and safetensors files, those with pickles in them included."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.errors import CorruptCheckpointError
from holdfast.formats.contained_paths import check_contained
from holdfast.formats.pickles.arrays import NUMPY
from holdfast.formats.pickles.builtin_types import PLAIN
from holdfast.formats.pickles.unpickle import unpickle
from holdfast.formats.reader import FileExtent
from holdfast.formats.safetensors import SafetensorsFile
from holdfast.formats.stored_tensor import StoredTensor
from holdfast.formats.torch_file import read_tree
from holdfast.ondisk import strict_json
from holdfast.ondisk.blocks import crc64
from holdfast.ondisk.files import TensorInfo
from holdfast.ondisk.read_budget import ReadBudget
from holdfast.storage import posix
from holdfast.storage.direct_io import BufferedReader

#: Key of ColossalAI's header metadata with the names of values that are pickled into bytes: asynchronous saves.
PICKLED = "non_tensor_keys"

#: Key of one state of one parameter: ColossalAI's asynchronous saves.
_STATE = re.compile(r"state\.(?P<number>[0-9]{1,9})\.(?P<state>.+)")

#: The largest pickled value that is read, in bytes.
_LARGEST = 2**30


class ShardFile(NamedTuple):
    """What is in one file; ``digest`` stands for that."""

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
        """Those in files of ours."""
        return self.file.crcs.get(self.name)

    def extents(self, start: int, stop: int) -> Sequence[FileExtent]:
        """See :class:`StoredTensor`."""
        return [self.file.extent(self.name, start, stop)]


def read_shard(path: Path, root: Path, budget: ReadBudget) -> ShardFile:
    """What is in a file that an index names. Raises ``CorruptCheckpointError`` where it is missing, or not whole.

    ``root`` is the folder that was opened; ``budget`` earns what is read.
    """
    if not posix.path_exists(path):
        raise CorruptCheckpointError(f"{path} is missing; the index names it. A save may have been cut short")
    check_contained(path, root)
    if path.suffix == ".safetensors":
        return _safetensors(SafetensorsFile.open(path), budget)
    tree = read_tree(path, budget)
    return ShardFile(tree.root, tree.digest)


def _safetensors(file: SafetensorsFile, budget: ReadBudget) -> ShardFile:
    pickled = _pickled(file)
    tree: dict[str, Any] = {name: ShardEntry(info, file, name) for name, info in file.tensors.items()}
    budget.earn(file.header.size)
    for name in dict.fromkeys(pickled):
        raw = _bytes(file, name)
        budget.earn(len(raw))
        tree[name] = unpickle(raw, {**PLAIN, **NUMPY}, f"{file.path}: {name!r}", budget=budget)
    return ShardFile(tree, crc64(repr(sorted((name, file.tensors[name]) for name in file.tensors)).encode()))


def _pickled(file: SafetensorsFile) -> list[str]:
    """The names of values that are no tensors."""
    text = file.header.metadata.get(PICKLED)
    names = strict_json.parse_json(text.encode(), f"{PICKLED} of {file.path}") if text else []
    if not isinstance(names, list) or not all(isinstance(name, str) and name in file.tensors for name in names):
        raise CorruptCheckpointError(f"{PICKLED} of {file.path} names what is not in the file")
    return names


def _bytes(file: SafetensorsFile, name: str) -> bytes:
    info = file.tensors[name]
    if info.dtype != "U8" or info.nbytes > _LARGEST:
        raise CorruptCheckpointError(f"{file.path}: {name!r} is no row of bytes")
    raw = bytearray(info.nbytes)
    with BufferedReader(file.path) as reader:
        reader.read(file.extent(name, 0, 0).offset, memoryview(raw))
    return bytes(raw)


def state_entries(shards: Sequence[Any]) -> dict[Any, dict[str, Any]]:
    """The states of an optimizer by number, from files by number, or by names such as ``state.3.exp_avg``."""
    found: dict[Any, dict[str, Any]] = {}
    for shard in shards:
        if not isinstance(shard, Mapping):
            raise CorruptCheckpointError("a file of optimizer states holds no dict")
        for number, own in _by_number(shard):
            states = found.setdefault(number, {})
            again = next((name for name in own if name in states), None)
            if again is not None:
                raise CorruptCheckpointError(f"state {str(again)[:80]!r} of parameter {number} is there twice")
            states.update(own)
    return found


def _by_number(shard: Mapping[Any, Any]) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    for key, value in shard.items():
        if isinstance(key, int) and isinstance(value, Mapping):
            yield key, value
        elif isinstance(key, str) and (named := _STATE.fullmatch(key)):
            yield int(named["number"]), {named["state"]: value}
        elif key != "param_groups":
            raise CorruptCheckpointError(
                f"a file of optimizer states holds {key!r:.80}, which is no number of a parameter"
            )
