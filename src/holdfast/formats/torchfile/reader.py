"""Files of ``torch.save``: ``.pt``, ``.pth``, ``.bin``, ``.ckpt``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from holdfast.formats.arrange.contents import arrange
from holdfast.formats.arrange.reader import TreeReader
from holdfast.formats.torchfile import archive, legacy
from holdfast.formats.torchfile.zips import Window, is_zip
from holdfast.layout.budget import Budget
from holdfast.storage import local
from holdfast.storage.readers import Readers

#: What every file of Lightning's Trainer has.
_LIGHTNING = "pytorch-lightning_version"


def is_torch_file(path: Path) -> bool:
    """Whether a file begins as those of ``torch.save`` do."""
    if not local.is_file(path):
        return False
    window = _window(path)
    return is_zip(window) or window.read(0, min(window.size, len(legacy.MAGIC))) == legacy.MAGIC


def _window(path: Path) -> Window:
    return Window(path, 0, local.size_of(path), Readers())


def read_tree(path: Path, budget: Budget | None = None) -> archive.Tree:
    """The tree in a file, of either kind, whose bytes ``budget`` earns."""
    window = _window(path)
    paid = Budget() if budget is None else budget
    return archive.read(window, paid) if is_zip(window) else legacy.read(window, paid)


class TorchFileReader(TreeReader):
    """A file of ``torch.save``. ``keys`` names parts of it that are not found by themselves."""

    def __init__(self, path: Path, keys: Mapping[str, str]) -> None:
        budget = Budget()
        size, tree = local.size_of(path), read_tree(path, budget)
        contents = arrange(tree.root, keys, budget, str(path))
        of_lightning = isinstance(tree.root, dict) and _LIGHTNING in tree.root
        super().__init__(
            path, "lightning" if of_lightning else "torch", [path], f"{size:x}-{tree.digest:016x}", contents
        )
