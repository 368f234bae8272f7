"""The journal of a run in an object store: ``RUN/.journal/TIME.RANDOM.json``, a small object for each entry.

Objects cannot be appended to, and jobs that replace one object would lose each other's entries. The names begin with
the time, so they sort like the entries. Each write removes the oldest ones, so their number is bounded.

:mod:`rankless.run.journal` calls it for runs in object stores, on rank 0 and in commands.

An entry costs two or three requests.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress

from rankless.errors import StorageError
from rankless.storage.object_path import ObjectPath
from rankless.storage.store import map_requests

#: The name of the folder.
FOLDER = ".journal"

#: The name of an entry. Other objects in the folder are somebody else's.
_ENTRY = re.compile(r"\d{20,}\.[0-9a-f]{8}\.json")

_log = logging.getLogger("rankless")


def append_object(run: ObjectPath, data: bytes, time: float, *, limit: int, create: bool) -> None:
    """Write an entry as an object, and keep the newest ``limit`` entries.

    Without ``create``, nothing is written into a run that has no journal.
    """
    folder, store = run / FOLDER, run.store
    names = _list_entries(folder)
    if names or create:
        store.replace_small(folder / f"{int(time * 1e9):020}.{secrets.token_hex(4)}.json", data)
        _remove_objects([folder / name for name in names[: 1 - limit]])


def _list_entries(folder: ObjectPath) -> list[str]:
    """Return the names of the entries, oldest first. For example, ``01795000000000000000.0123abcd.json``."""
    return sorted(filter(_ENTRY.fullmatch, folder.store.list_names(folder)))


def _remove_objects(paths: Sequence[ObjectPath]) -> None:
    """Remove old entries. A failure has no consequence but their number."""
    try:
        map_requests(lambda path: path.store.remove_file(path), paths)
    except StorageError:
        _log.debug("old entries of a journal are not removed", exc_info=True)


def read_objects(run: ObjectPath, count: int, max_bytes: int) -> list[bytes]:
    """Return the newest ``count`` entries, oldest first. One that is too large, or vanishes, is left out."""
    folder = run / FOLDER
    names = _list_entries(folder)[-count:]
    found = map_requests(lambda name: _read_object(folder / name, max_bytes), names)
    return [data for data in found if data is not None]


def _read_object(path: ObjectPath, max_bytes: int) -> bytes | None:
    with suppress(StorageError):
        return path.store.read_small(path, max_bytes)
    return None
