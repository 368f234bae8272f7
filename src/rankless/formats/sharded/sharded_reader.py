"""A reader of folders of files with an index, or of one of their files: a model, an optimizer, or both.

ColossalAI's Booster writes these, and transformers writes weights in files of ``torch.save``. ColossalAI's optimizers
identify parameters by number, counted over all groups; LowLevelZero counts only parameters that are trained.

:mod:`rankless.formats.detect_foreign` opens it on each rank or process that reads such a folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rankless.errors import CorruptCheckpointError, FormatError
from rankless.formats.safetensors import SafetensorsFile, is_safetensors, read_raw_header
from rankless.formats.sharded.model_files import (
    CONTENT,
    MODEL,
    OPTIMIZER,
    SCHEDULER,
    ModelFile,
    folders_of,
    list_components,
    parse_file_name,
)
from rankless.formats.sharded.reader_files import OpenedFiles
from rankless.formats.sharded.shard_files import PICKLED, merge_states
from rankless.formats.tree.detect_components import Schema
from rankless.formats.tree.tree_contents import classify_tree
from rankless.formats.tree.tree_reader import TreeReader
from rankless.ondisk.value_files import BY_NUMBER, MAY_SKIP_FROZEN
from rankless.storage.store import store_of

_GROUPS = "param_groups"

_SCHEMA = Schema(model=(MODEL,), optimizer=(OPTIMIZER,), scheduler=("scheduler",))


def is_sharded_checkpoint(path: Path) -> bool:
    """Return whether a folder has a model or optimizer with an index, or a file is an index or a flat optimizer."""
    if store_of(path).is_directory(path):
        return bool(list_components(path))
    file = parse_file_name(path)
    return store_of(path).is_file(path) and ((file is not None and file.is_index) or is_flat_optimizer(path))


def is_flat_optimizer(path: Path) -> bool:
    """Return whether a file is a whole optimizer as ColossalAI's asynchronous saves write it."""
    if path.suffix != ".safetensors" or not is_safetensors(path):
        return False
    if PICKLED.encode() not in read_raw_header(path)[0]:  # the headers of large models are slow to parse
        return False
    file = SafetensorsFile.open(path)
    return PICKLED in file.header.metadata and _GROUPS in file.tensors


class ShardedReader(TreeReader):
    """A reader of a folder, of an index in it, of one file, or of a folder with such subfolders.

    Only the components in ``kinds`` are read.
    """

    def __init__(self, path: Path, keys: Mapping[str, str], kinds: Iterable[str] = (MODEL, OPTIMIZER)) -> None:
        is_folder = store_of(path).is_directory(path)
        self._opened = OpenedFiles(path if is_folder else path.resolve().parent)
        files = [file for file in list_components(path) if file.kind in kinds] if is_folder else [_single_file(path)]
        tree = {file.kind: self._read_component(file) for file in files} | self._read_other_values(path)
        opened = self._opened
        format_name = "colossalai" if _is_colossalai(opened.paths) else "huggingface"
        contents = classify_tree(tree, keys, opened.budget, str(path), _SCHEMA)
        for values in contents.tree.values() if format_name == "colossalai" else ():
            if isinstance(values, dict) and values.get(BY_NUMBER):
                values[MAY_SKIP_FROZEN] = True
        super().__init__(path, format_name, opened.paths, opened.fingerprint, contents)

    def _read_component(self, file: ModelFile) -> Any:
        if file.kind == MODEL:
            return self._opened.read_model(file)
        if not file.is_index:
            tree = self._opened.read_tree(file.path)
            return {"state": merge_states({file.path: tree}), _GROUPS: tree[_GROUPS]}
        index, folder = self._opened.read_index(file.path), file.path.parent
        shards = {name: self._opened.read_tree(folder / name) for name in dict.fromkeys(index.weight_map.values())}
        if index.groups_file is None:
            raise FormatError(f"{file.path}: its metadata must name the file of the optimizer's parameter groups")
        states = merge_states({folder / name: shard for name, shard in shards.items()})
        return {"state": states, _GROUPS: self._read_groups(folder / index.groups_file)}

    def _read_other_values(self, path: Path) -> dict[str, Any]:
        """Return the scheduler and the user content next to the subfolders of a model and an optimizer."""
        if not store_of(path).is_directory(path) or folders_of(path) == [path]:
            return {}
        names = {"scheduler": SCHEDULER, "user_content": CONTENT}
        return {
            key: self._opened.read_tree(path / name)
            for key, name in names.items()
            if store_of(path).file_exists(path / name)
        }

    def _read_groups(self, path: Path) -> Any:
        groups = self._opened.read_tree(path)
        if not isinstance(groups, list):
            raise CorruptCheckpointError(f"{path} must hold a list of parameter groups, not a {type(groups).__name__}")
        return groups


def _single_file(path: Path) -> ModelFile:
    return parse_file_name(path) or ModelFile(OPTIMIZER, "", "safetensors", path)


def _is_colossalai(files: Iterable[Path]) -> bool:
    """Return whether ColossalAI wrote the files: it numbers shards without their total."""
    return any(
        file.suffix in {".bin", ".safetensors"} and "-" in file.name and "-of-" not in file.name for file in files
    )
