"""Reading folders of files with an index, or one of their files: a model, an optimizer, or both.

What ColossalAI's Booster writes, and weights of transformers in files of ``torch.save``. ColossalAI's optimizers know
parameters by number: counted over all groups, by LowLevelZero those only that are trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from holdfast.errors import CorruptCheckpointError, FormatError
from holdfast.formats.safetensors import SafetensorsFile, is_safetensors
from holdfast.formats.sharded.index import read_index
from holdfast.formats.sharded.model_files import (
    CONTENT,
    MODEL,
    OPTIMIZER,
    SCHEDULER,
    ModelFile,
    folders_of,
    list_named_files,
    list_parts,
)
from holdfast.formats.sharded.shards import PICKLED, read_shard, state_entries
from holdfast.formats.tree.contents import classify_tree
from holdfast.formats.tree.tree_reader import TreeReader
from holdfast.ondisk.blocks import crc64
from holdfast.ondisk.read_budget import ReadBudget
from holdfast.storage import posix

_GROUPS = "param_groups"

_SLOTS = frozenset({MODEL, OPTIMIZER, "scheduler"})


def is_sharded_checkpoint(path: Path) -> bool:
    """Whether a file is an index or an optimizer of an asynchronous save, or a folder has indexes or such weights."""
    if posix.is_directory(path):
        return bool(list_parts(path))
    found = list_named_files(path)
    return posix.is_file(path) and ((found is not None and found.is_index) or is_flat_optimizer(path))


def is_flat_optimizer(path: Path) -> bool:
    """Whether a file is a whole optimizer as ColossalAI's asynchronous saves have it."""
    if path.suffix != ".safetensors" or not is_safetensors(path):
        return False
    file = SafetensorsFile.open(path)
    return PICKLED in file.header.metadata and _GROUPS in file.tensors


class ShardedReader(TreeReader):
    """A folder, an index in it, or one file; or a folder of such folders. Only what is of ``kinds`` is read."""

    def __init__(self, path: Path, keys: Mapping[str, str], kinds: Iterable[str] = (MODEL, OPTIMIZER)) -> None:
        self._files: list[Path] = []
        self._budget, self._digests = ReadBudget(), list[int]()
        self._root = path if posix.is_directory(path) else posix.real_path(path).parent
        found = [one for one in list_parts(path) if one.kind in kinds] if posix.is_directory(path) else [_only(path)]
        tree = {one.kind: self._read(one) for one in found} | self._beside(path)
        kind = "colossalai" if _is_colossal(self._files) else "huggingface"
        fingerprint = f"{crc64(repr(self._digests).encode()):016x}"
        contents = classify_tree(tree, keys or {name: name for name in tree if name in _SLOTS}, self._budget, str(path))
        super().__init__(path, kind, self._files, fingerprint, contents)

    def _read(self, found: ModelFile) -> Any:
        if not found.is_index:
            tree = self._shard(found.path)
            return tree if found.kind == MODEL else {"state": state_entries([tree]), _GROUPS: tree[_GROUPS]}
        index, folder = read_index(found.path, self._root), found.path.parent
        self._files.append(found.path)
        self._digests.append(crc64(posix.read_small(found.path)))
        shards = {name: self._shard(folder / name) for name in dict.fromkeys(index.weight_map.values())}
        if found.kind == MODEL:
            return _model(found.path, index.weight_map, shards)
        if index.groups_file is None:
            raise FormatError(f"{found.path} names no file of the optimizer's groups")
        return {"state": state_entries(list(shards.values())), _GROUPS: self._groups(folder / index.groups_file)}

    def _beside(self, path: Path) -> dict[str, Any]:
        """What lies beside the folders of a model and an optimizer."""
        if not posix.is_directory(path) or folders_of(path) == [path]:
            return {}
        names = {"scheduler": SCHEDULER, "user_content": CONTENT}
        return {key: self._shard(path / name) for key, name in names.items() if posix.is_taken(path / name)}

    def _groups(self, path: Path) -> Any:
        groups = self._shard(path)
        if not isinstance(groups, list):
            raise CorruptCheckpointError(f"{path} holds no list of parameter groups")
        return groups

    def _shard(self, path: Path) -> Any:
        """The tree in a file."""
        shard = read_shard(path, self._root, self._budget)
        self._files.append(path)
        self._digests.append(shard.digest)
        return shard.tree


def _only(path: Path) -> ModelFile:
    return list_named_files(path) or ModelFile(OPTIMIZER, "", "safetensors", path)


def _model(index: Path, weight_map: Mapping[str, str], shards: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict, of just the names that are in the index."""
    found = {}
    for name, file in weight_map.items():
        shard = shards[file]
        if not isinstance(shard, Mapping) or name not in shard:
            raise CorruptCheckpointError(f"{index} says that {name!r} is in {file}, where it is not")
        found[name] = shard[name]
    return found


def _is_colossal(files: Iterable[Path]) -> bool:
    """Its shards are numbered without a total."""
    return any(
        file.suffix in {".bin", ".safetensors"} and "-" in file.name and "-of-" not in file.name for file in files
    )
