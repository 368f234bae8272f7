"""Files of ``torch.save``: ``.pt``, ``.pth``, ``.bin``, ``.ckpt``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from holdfast.formats.torchfile import archive, legacy
from holdfast.formats.torchfile.zip_reader import FileWindow, is_zip
from holdfast.formats.tree.contents import classify_tree
from holdfast.formats.tree.tree_reader import TreeReader
from holdfast.ondisk.read_budget import ReadBudget
from holdfast.storage import posix
from holdfast.storage.reader_pool import ReaderPool

#: What every file of Lightning's Trainer has.
_LIGHTNING = "pytorch-lightning_version"


def is_torch_file(path: Path) -> bool:
    """Whether a file begins as those of ``torch.save`` do."""
    if not posix.is_file(path):
        return False
    window = _window(path)
    return is_zip(window) or window.read(0, min(window.size, len(legacy.MAGIC))) == legacy.MAGIC


def _window(path: Path) -> FileWindow:
    return FileWindow(path, 0, posix.size_of(path), ReaderPool())


def read_tree(path: Path, budget: ReadBudget | None = None) -> archive.ArchiveTree:
    """The tree in a file, of either kind, whose bytes ``budget`` earns."""
    window = _window(path)
    paid = ReadBudget() if budget is None else budget
    return archive.read_archive(window, paid) if is_zip(window) else legacy.read_legacy_archive(window, paid)


class TorchFileReader(TreeReader):
    """A file of ``torch.save``. ``keys`` names parts of it that are not found by themselves."""

    def __init__(self, path: Path, keys: Mapping[str, str]) -> None:
        budget = ReadBudget()
        size, tree = posix.size_of(path), read_tree(path, budget)
        contents = classify_tree(tree.root, keys, budget, str(path))
        of_lightning = isinstance(tree.root, dict) and _LIGHTNING in tree.root
        super().__init__(
            path, "lightning" if of_lightning else "torch", [path], f"{size:x}-{tree.digest:016x}", contents
        )
