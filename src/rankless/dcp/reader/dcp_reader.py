"""A reader of checkpoints of ``torch.distributed.checkpoint``, whatever their top-level keys are.

``formats/registry.py`` names it for folders of DCP: each rank of a load or conversion opens one. Conversions read their
output back with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rankless.dcp.reader import dcp_directory
from rankless.formats.tree.tree_contents import classify_tree
from rankless.formats.tree.tree_reader import TreeReader


class DcpReader(TreeReader):
    """A reader of folders with ``.metadata``.

    ``keys`` names components that are not detected: ``{"model": "app.net"}``.
    """

    def __init__(self, path: Path, keys: Mapping[str, str]) -> None:
        saved = dcp_directory.read_tree(path)
        contents = classify_tree(saved.root, keys, saved.budget, str(path))
        super().__init__(path, "dcp", saved.files, saved.fingerprint, contents)
