"""Detection of a checkpoint's format by its files.

The modules for other systems are imported if a path is no native checkpoint and has files: a native load needs none.

Each rank of a load opens its reader so in the vote "reading the metadata", unless rank 0 has selected a native
checkpoint by its id. Each rank of a conversion opens the source in a vote of that name, to NxD rank 0 alone, through
:func:`rankless.run.lookup.open_latest`. Of ``open_weights``, rank 0 opens in the vote "finding the weights", and the
others in "reading the headers". The view and commands do so in one process. All ranks must detect the same format: they
compare fingerprints.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rankless.formats.native import NativeReader, is_native
from rankless.formats.reader import Reader
from rankless.storage.store import store_of


def is_checkpoint(path: Path) -> bool:
    """Return whether the path itself is a checkpoint of a known format (and not a run's folder with checkpoints)."""
    if is_native(path):
        return True
    if _is_empty(path):
        return False
    from rankless.formats.detect_foreign import is_foreign  # noqa: PLC0415 - imports the readers of all formats

    return is_foreign(path)


def describe_contents(folder: Path) -> str:
    """Return the part of a message that says what a folder contains instead of a checkpoint."""
    if _is_empty(folder):
        return ""
    from rankless.formats import detect_foreign  # noqa: PLC0415 - imports the readers of all formats

    return detect_foreign.describe_contents(folder)


def open_reader(path: Path, keys: Mapping[str, str] | None = None) -> Reader:
    """Return the reader for a checkpoint. Raises ``NoCheckpointError`` or ``FormatError``.

    ``keys`` names components of other systems' checkpoints that are not detected: ``{"model": "app.net"}``. Of several
    models of a rankless checkpoint it selects one: ``{"model": "gen"}``.
    """
    if is_native(path):
        return NativeReader(path, keys=keys)
    from rankless.formats.detect_foreign import open_foreign  # noqa: PLC0415 - imports the readers of all formats

    return open_foreign(path, keys or {})


def _is_empty(path: Path) -> bool:
    """Return whether a path is missing or an empty directory, as the directory of a new run is."""
    store = store_of(path)
    return not store.path_exists(path) or (store.is_directory(path) and not store.list_names(path))
