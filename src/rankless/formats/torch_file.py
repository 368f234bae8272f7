"""Files of ``torch.save``: ``.pt``, ``.pth``, ``.bin``, ``.ckpt``.

:mod:`rankless.formats.detect_foreign` opens it through the registry, on each rank; readers of folders of such files
call :func:`read_tree`. No pickle is run: see :mod:`rankless.formats.pickles.unpickle`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from rankless.formats.torchfile import archive, legacy_file
from rankless.formats.torchfile.allowed_globals import NAMES
from rankless.formats.torchfile.zip_reader import FileRangeReader, FileWindow, is_zip, read_first_name
from rankless.formats.tree.detect_components import Schema
from rankless.formats.tree.tree_contents import classify_tree
from rankless.formats.tree.tree_reader import TreeReader
from rankless.ondisk.read_budget import ReadBudget
from rankless.storage.reader_pool import ReaderPool
from rankless.storage.store import store_of

#: A key that every file of Lightning's Trainer has, and where the Trainer stores the components.
LIGHTNING_VERSION = "pytorch-lightning_version"
LIGHTNING_FILE = Schema(model=("state_dict",), optimizer=("optimizer_states",), scheduler=("lr_schedulers",))


def is_torch_file(path: Path) -> bool:
    """Return whether a file begins as files of ``torch.save`` do."""
    if not store_of(path).is_file(path):
        return False
    window = _open_window(path)
    return is_zip(window) or window.read(0, min(window.size, len(legacy_file.MAGIC))) == legacy_file.MAGIC


def is_saved_by_torch(path: Path) -> bool:
    """Return whether a file is one of ``torch.save``, and no other zip file: its first entry is the pickle."""
    if not is_torch_file(path):
        return False
    window = _open_window(path)
    return not is_zip(window) or PurePosixPath(read_first_name(window)).name == archive.PICKLE


def _open_window(path: Path, readers: FileRangeReader | None = None) -> FileWindow:
    return FileWindow(path, 0, store_of(path).file_size(path), ReaderPool() if readers is None else readers)


def read_tree(
    path: Path,
    budget: ReadBudget | None = None,
    names: Mapping[str, object] = NAMES,
    readers: FileRangeReader | None = None,
) -> archive.ArchiveTree:
    """Return the tree in a file of ``torch.save``, of its zip format or the older one.

    The bytes of its pickle are added to ``budget``. ``names`` are the globals that the pickle may name. Pass
    ``readers`` that many files share: otherwise each file stays open as long as its tree exists.

    Callers pass the allow-list of their format: nothing else in a pickle is looked up.
    """
    window = _open_window(path, readers)
    if budget is None:
        budget = ReadBudget()
    read = archive.read_archive if is_zip(window) else legacy_file.read_legacy_archive
    return read(window, budget, names)


class TorchFileReader(TreeReader):
    """A reader of files of ``torch.save``.

    ``keys`` names components that are not detected: ``{"model": "app.net"}``.
    """

    def __init__(self, path: Path, keys: Mapping[str, str]) -> None:
        budget = ReadBudget()
        size, tree = store_of(path).file_size(path), read_tree(path, budget)
        is_lightning = isinstance(tree.root, dict) and LIGHTNING_VERSION in tree.root
        contents = classify_tree(tree.root, keys, budget, str(path), LIGHTNING_FILE if is_lightning else None)
        super().__init__(
            path, "lightning" if is_lightning else "torch", [path], f"{size:x}-{tree.digest:016x}", contents
        )
