"""The files of torch.save and safetensors that one reader opens: their trees, a digest, and one budget for all.

:class:`~rankless.formats.sharded.sharded_reader.ShardedReader` and the reader of Accelerate have one. All ranks must
open the files in the same order: the fingerprint depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankless.errors import CorruptCheckpointError
from rankless.formats.sharded.index import ShardIndex, read_index
from rankless.formats.sharded.model_files import ModelFile
from rankless.formats.sharded.shard_files import read_shard
from rankless.ondisk.block_crcs import crc64
from rankless.ondisk.read_budget import ReadBudget
from rankless.storage.store import store_of


class OpenedFiles:
    """The files inside ``root`` that were opened: ``paths``, in this order. Reading them is charged to ``budget``."""

    def __init__(self, root: Path) -> None:
        self._root, self._digests = root, list[int]()
        self.paths: list[Path] = []
        self.budget = ReadBudget()

    def add_file(self, path: Path, digest: int) -> None:
        """Add a file that was opened, with a digest of its metadata."""
        self.paths.append(path)
        self._digests.append(digest)

    def read_tree(self, path: Path) -> Any:
        """Return the tree in a file. Raises ``CorruptCheckpointError`` if it is missing."""
        shard = read_shard(path, self._root, self.budget)
        self.add_file(path, shard.digest)
        return shard.tree

    def read_index(self, path: Path) -> ShardIndex:
        """Return the contents of an index."""
        index = read_index(path, self._root)
        self.add_file(path, crc64(store_of(path).read_small(path)))
        return index

    def read_model(self, file: ModelFile) -> Any:
        """Return the state dict of a model in a single file, or in the files of an index."""
        if not file.is_index:
            return self.read_tree(file.path)
        weight_map = self.read_index(file.path).weight_map
        shards = {name: self.read_tree(file.path.parent / name) for name in dict.fromkeys(weight_map.values())}
        return _join_state_dict(file.path, weight_map, shards)

    @property
    def fingerprint(self) -> str:
        """A digest of the metadata of all files."""
        return f"{crc64(repr(self._digests).encode()):016x}"


def _join_state_dict(index: Path, weight_map: Mapping[str, str], shards: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict with exactly the names in the index."""
    state_dict = {}
    for name, file in weight_map.items():
        shard = shards[file]
        if not isinstance(shard, Mapping) or name not in shard:
            raise CorruptCheckpointError(f"{index} says that {file} holds {name!r}, but it does not")
        state_dict[name] = shard[name]
    return state_dict
