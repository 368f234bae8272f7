"""Checkpoints of ``torch.distributed.checkpoint``, with whatever top-level keys somebody gave them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from holdfast.formats.dcp import folder
from holdfast.formats.tree.contents import classify_tree
from holdfast.formats.tree.tree_reader import TreeReader


class DcpReader(TreeReader):
    """A folder with ``.metadata``. ``keys`` names parts of what was saved that are not found by themselves."""

    def __init__(self, path: Path, keys: Mapping[str, str]) -> None:
        saved = folder.read_tree(path)
        contents = classify_tree(saved.root, keys, saved.budget, str(path))
        super().__init__(path, "dcp", saved.files, saved.fingerprint, contents)
