"""Checkpoints of ``torch.distributed.checkpoint``, with whatever top-level keys somebody gave them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from holdfast.formats.arrange.contents import arrange
from holdfast.formats.arrange.reader import TreeReader
from holdfast.formats.dcp import folder


class DcpReader(TreeReader):
    """A folder with ``.metadata``. ``keys`` names parts of what was saved that are not found by themselves."""

    def __init__(self, path: Path, keys: Mapping[str, str]) -> None:
        saved = folder.read(path)
        contents = arrange(saved.root, keys, saved.budget, str(path))
        super().__init__(path, "dcp", saved.files, saved.fingerprint, contents)
