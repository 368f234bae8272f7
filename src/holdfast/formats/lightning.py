"""Checkpoints of Lightning: folders of ``torch.distributed.checkpoint`` with ``meta.pt`` beside it.

The Trainer's FSDP has the model under ``model``, its model-parallel strategy and its single files (which are files of
``torch.save``) under ``state_dict``; optimizers are ``optimizer_0`` … in folders, and a list in files. With Fabric all
names are the user's own. What is neither model, optimizer nor scheduler is user content: loops, callbacks, parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from holdfast.errors import CorruptCheckpointError
from holdfast.formats.dcp import folder
from holdfast.formats.torch_file import read_tree
from holdfast.formats.tree.contents import classify_tree
from holdfast.formats.tree.tree_reader import TreeReader
from holdfast.storage import posix

META = "meta.pt"


def is_lightning(path: Path) -> bool:
    """Whether a folder has both parts."""
    return posix.is_taken(path / META) and folder.is_dcp(path)


class LightningReader(TreeReader):
    """A folder of Lightning's. ``keys`` names parts of it that are not found by themselves."""

    def __init__(self, path: Path, keys: Mapping[str, str]) -> None:
        posix.check_regular(path / META, within=(path,))
        saved = folder.read_tree(path)
        meta = read_tree(path / META, saved.budget)
        if not isinstance(meta.root, dict):
            raise CorruptCheckpointError(f"{path / META} holds no dict: it is none of Lightning's")
        contents = classify_tree({**meta.root, **saved.root}, keys, saved.budget, str(path))
        fingerprint = f"{saved.fingerprint}-{meta.digest:016x}"
        super().__init__(path, "lightning", [*saved.files, path / META], fingerprint, contents)
