"""Checkpoints of Lightning: a folder of ``torch.distributed.checkpoint`` with a file ``meta.pt`` in it.

The Trainer's FSDP strategy stores the model under ``model``; its model-parallel strategy and its single files (which
are files of ``torch.save``) store it under ``state_dict``. Optimizers are ``optimizer_0`` … in folders, and a list in
files. Of the Trainer's checkpoints nothing else is a model, an optimizer or a scheduler, whatever hooks have added: it
is user content, with loops, callbacks and hyperparameters. With Fabric the user chooses all names.

``formats/registry.py`` names it: each rank of a load or conversion opens one; :mod:`rankless.run.ownership` asks
:func:`find_owned_files` on rank 0 before a checkpoint is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankless.dcp.reader import dcp_directory
from rankless.errors import CorruptCheckpointError
from rankless.formats import torch_file
from rankless.formats.torch_file import LIGHTNING_FILE, LIGHTNING_VERSION, is_saved_by_torch, read_tree
from rankless.formats.tree.detect_components import Schema
from rankless.formats.tree.tree_contents import classify_tree
from rankless.formats.tree.tree_reader import TreeReader
from rankless.storage.store import store_of

META = "meta.pt"

#: The key of an optimizer, with its number.
_OPTIMIZER = re.compile(r"optimizer_(0|[1-9]\d{0,3})")


def is_lightning(path: Path) -> bool:
    """Return whether a folder has ``meta.pt`` and the metadata of a distributed checkpoint."""
    return store_of(path).file_exists(path / META) and dcp_directory.is_dcp(path)


def _folder_schema(saved: Mapping[Any, Any]) -> Schema:
    """Return the places of the Trainer's components: in the distributed checkpoint, and schedulers in ``meta.pt``."""
    numbers = sorted(int(match[1]) for key in saved if (match := _OPTIMIZER.fullmatch(str(key))))
    return Schema(
        model=tuple(key for key in ("state_dict", "model") if key in saved),
        optimizer=tuple(f"optimizer_{number}" for number in numbers),
        scheduler=LIGHTNING_FILE.scheduler,
    )


def find_owned_files(path: Path) -> frozenset[str] | None:
    """Return the names of the files of a checkpoint of Lightning's Trainer; "" is the path itself.

    ``None`` if it is none. See :mod:`rankless.run.ownership`.
    """
    if is_saved_by_torch(path):
        root = torch_file.read_tree(path).root
        return frozenset({""}) if isinstance(root, dict) and LIGHTNING_VERSION in root else None
    owned = dcp_directory.find_owned_files(path) if is_lightning(path) else None
    return None if owned is None else owned | {META}


def find_owned_files_of_fabric(path: Path) -> frozenset[str] | None:
    """Return the names of the files of a checkpoint of Fabric, which may be any file of ``torch.save``."""
    return frozenset({""}) if is_saved_by_torch(path) else find_owned_files(path)


class LightningReader(TreeReader):
    """A reader of Lightning's folders. ``keys`` names components that are not detected: ``{"model": "app.net"}``."""

    def __init__(self, path: Path, keys: Mapping[str, str]) -> None:
        store_of(path).check_regular(path / META, within=(path,))
        saved = dcp_directory.read_tree(path)
        meta = read_tree(path / META, saved.budget)
        if not isinstance(meta.root, dict):
            raise CorruptCheckpointError(
                f"{path / META} must hold a dict, as Lightning writes it; got {type(meta.root).__name__}"
            )
        schema = _folder_schema(saved.root) if LIGHTNING_VERSION in meta.root else None
        contents = classify_tree({**meta.root, **saved.root}, keys, saved.budget, str(path), schema)
        contents.add_user_content({key: value for key, value in meta.root.items() if key in saved.root})
        fingerprint = f"{saved.fingerprint}-{meta.digest:016x}"
        super().__init__(path, "lightning", [*saved.files, path / META], fingerprint, contents)
