"""Checkpoints of Lightning: a folder of ``torch.distributed.checkpoint`` with a file ``meta.pt`` in it.

The Trainer's FSDP strategy stores the model under ``model``; its model-parallel strategy and its single files (which
are files of ``torch.save``) store it under ``state_dict``. Optimizers are ``optimizer_0`` … in folders, and a list in
files. With Fabric the user chooses all names. Everything but models, optimizers and schedulers is user content: loops,
callbacks, hyperparameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rankless.dcp.reader import dcp_directory
from rankless.errors import CorruptCheckpointError
from rankless.formats.torch_file import read_tree
from rankless.formats.tree.tree_contents import classify_tree
from rankless.formats.tree.tree_reader import TreeReader
from rankless.storage.store import store_of

META = "meta.pt"


def is_lightning(path: Path) -> bool:
    """Return whether a folder has ``meta.pt`` and the metadata of a distributed checkpoint."""
    return store_of(path).file_exists(path / META) and dcp_directory.is_dcp(path)


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
        contents = classify_tree({**meta.root, **saved.root}, keys, saved.budget, str(path))
        fingerprint = f"{saved.fingerprint}-{meta.digest:016x}"
        super().__init__(path, "lightning", [*saved.files, path / META], fingerprint, contents)
