"""The history of a run directory on its storage: the entries, which are small files or objects ``.history/N.json``.

They are in the run directory or next to it (see :mod:`rankless.run.records_folder`). No two jobs can create the same
one. An entry is never changed, and never removed before its run. The exclusive creation of the file decides between
jobs: a look before it proves nothing. The JSON of entries is on disks, and jobs of other versions read it.

:mod:`rankless.run.claims` adds entries, on rank 0. Lists, loads, commands and reports read them.

Each entry has bytes of its own (a random token), so a job whose reply was lost recognises its entry.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from rankless.errors import StateError, StorageError
from rankless.observe.warning import warn_caller
from rankless.run.history import Entry
from rankless.run.records_folder import FOLDER, records_of
from rankless.storage import posix
from rankless.storage.store import map_requests, store_of

_SUFFIX = ".json"

#: The names of entries without their suffix: eight digits, or more without zeros before them.
_STEM = re.compile("[0-9]{8}|[1-9][0-9]{8,11}")

#: The names of files that become entries.
_DRAFT = re.compile(r"\.[0-9]{8,12}\.json\.[0-9a-f]{16}")

#: The most entries that are remembered, and the most bytes of one.
_MAX_REMEMBERED, _MAX_BYTES = 2**12, 2**24

#: The most entries that are read to show a history, and the most bytes of all of them.
_MAX_SHOWN, _MAX_SHOWN_BYTES = 1000, 2**26

#: The entries that are read at a time to show a history.
_BATCH = 16

#: The most attempts to claim while other jobs do.
_ATTEMPTS = 1000

#: The errors of bytes that are no entry.
_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

#: The errors of a path that is no file of an entry's size, but a directory, a pipe, a socket or a loop of links.
_NO_ENTRY = {errno.EISDIR, errno.EINVAL, errno.ENXIO, errno.EFBIG, errno.ELOOP}

#: The attempts to read an entry that is listed, and the seconds between.
_READ_ATTEMPTS, _READ_SECONDS = 20, 0.05


E = TypeVar("E", Entry, Entry | None)


def read_history(run: Path) -> Entry:
    """Return the newest entry of the history of a run directory; an empty one if there is none.

    An entry that is corrupt is passed over, with a warning. Raises ``StorageError`` if it cannot be read now.

    Called on rank 0 in votes, and by commands. An entry that cannot be read now must be an error: without the entry an
    abandoned checkpoint would be the latest.
    """
    return read_newest(run)[0]


def read_history_in(run: Path, names: Collection[str]) -> tuple[Entry, int]:
    """Return the newest entry and the highest number as :func:`read_newest`. ``names`` are those in the directory."""
    return _read_newest(records_of(run, names) / FOLDER)


def read_newest(run: Path) -> tuple[Entry, int]:
    """Return the newest entry that is not corrupt, and the highest number."""
    return _read_newest(_folder_of(run))


def _folder_of(run: Path) -> Path:
    """Return the folder that has, or will have, the entries of a run."""
    return records_of(run) / FOLDER


def _read_newest(folder: Path) -> tuple[Entry, int]:
    """Return the newest entry in a folder that is not corrupt, and the highest number.

    An entry that is listed, but not found, is looked for again: replicas lag, and entries are never removed.
    """
    for _ in range(_READ_ATTEMPTS):
        etags = _list_entries(folder)
        with suppress(FileNotFoundError):
            for number, etag in sorted(etags.items(), reverse=True):
                if (entry := _read_listed(folder, number, etag)) is not None:
                    return entry, max(etags)
            return Entry(), max(etags, default=0)
        time.sleep(_READ_SECONDS)
    path = _path_of(folder, number)
    raise StorageError(
        errno.EIO, f"{path} is listed, but cannot be found: try again, or remove it if it is a broken link"
    )


def _list_entries(folder: Path) -> dict[int, str]:
    """Return the numbers of all entries, in an object store with their versions.

    For example, ``00000003.json`` has the number 3.
    """
    etags = store_of(folder).list_entries(folder)
    stems = {name.removesuffix(_SUFFIX): etag for name, etag in etags.items() if name.endswith(_SUFFIX)}
    return {int(stem): etag for stem, etag in stems.items() if _STEM.fullmatch(stem)}


#: The entries that were read from object stores, by path and version.
_entries: dict[tuple[Path, str], Entry] = {}

#: The corrupt entries that this process has warned of.
_passed_over: set[Path] = set()


def _read_listed(folder: Path, number: int, etag: str) -> Entry | None:
    """Return an entry; ``None``, with a warning, if it is corrupt. Raises ``FileNotFoundError`` if it is not found."""
    path = _path_of(folder, number)
    if etag and (path, etag) in _entries:
        return _entries[path, etag]
    entry = _decode_entry(path) or _decode_entry(path)  # bytes may change on their way
    if entry is None or entry.number != number:  # with another number, a stranger has written or copied it
        if path not in _passed_over:
            warn_caller(
                f"{path} is corrupt, so it is not known which checkpoints its job continued: it is passed over. "
                "If no job has written it, move it elsewhere"
            )
        _passed_over.add(path)
        return None
    if etag:
        if len(_entries) >= _MAX_REMEMBERED:
            _entries.clear()
        _entries[path, etag] = entry
    return entry


def _decode_entry(path: Path) -> Entry | None:
    try:
        return msgspec.json.decode(store_of(path).read_small(path, _MAX_BYTES), type=Entry)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            raise FileNotFoundError(str(path)) from error
        if error.errno in _NO_ENTRY:
            return None
        raise
    except _UNDECODABLE:
        return None


def find_entry(run: Path, number: int) -> Entry | None:
    """Return one entry; ``None`` if there is none, because the directory has lost it, or if it is corrupt."""
    folder = _folder_of(run)
    etags = _list_entries(folder)
    with suppress(FileNotFoundError):
        return _read_listed(folder, number, etags[number]) if number in etags else None
    return None


def has_entry(run: Path, number: int) -> bool:
    """Return whether there is a file for an entry, also if no list shows it yet. Rank 0 calls it in a save."""
    return store_of(run).is_file(_path_of(_folder_of(run), number))


class ShownHistory(msgspec.Struct, frozen=True):
    """The entries of a history, from the newest to the oldest.

    ``unreadable`` of those that were looked at are corrupt or cannot be read now. ``left_out`` were not looked at.
    """

    entries: Sequence[Entry] = ()
    unreadable: int = 0
    left_out: int = 0


def read_entries(run: Path, wanted: Collection[int] = ()) -> ShownHistory:
    """Return the entries of the history of a run directory, to show them.

    Their number is bounded: the newest entry comes first, then the entries with the numbers ``wanted``, then all others
    from the newest to the oldest. Entries that cannot be read are counted, and raise nothing. A branch that a newer
    entry has is left out of the older ones.
    """
    folder = _folder_of(run)
    listed = _list_entries(folder)
    newest = max(listed, default=0)
    by_use = sorted(listed, key=lambda number: (number != newest, number not in wanted, -number))
    chosen = sorted(by_use[:_MAX_SHOWN], reverse=True)
    entries: list[Entry] = []
    looked_at = nbytes = 0
    seen: set[tuple[str, int]] = set()
    while looked_at < len(chosen) and nbytes < _MAX_SHOWN_BYTES:
        batch = chosen[looked_at : looked_at + _BATCH]
        looked_at += len(batch)
        looks = map_requests(lambda one: _look_at_entry(_path_of(folder, one)), batch)
        for number, (entry, size) in zip(batch, looks, strict=True):
            nbytes += size
            if entry is not None and entry.number == number:
                new = {name: branch for name, branch in entry.runs.items() if (name, branch.incarnation) not in seen}
                seen |= {(name, branch.incarnation) for name, branch in new.items()}
                entries.append(msgspec.structs.replace(entry, runs=new))
    return ShownHistory(entries, looked_at - len(entries), len(listed) - looked_at)


def _look_at_entry(path: Path) -> tuple[Entry | None, int]:
    """Return an entry and its size in bytes; no entry if it is corrupt or cannot be read."""
    try:
        data = store_of(path).read_small(path, _MAX_BYTES)
        return msgspec.json.decode(data, type=Entry), len(data)
    except (StorageError, *_UNDECODABLE):
        return None, 0


def _path_of(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}{_SUFFIX}"


def _create(run: Path, entry: Entry) -> bool:
    """Create an entry. Return whether no other job has. A store may ignore that it exists, or its reply may be lost.

    Raises ``StateError`` if no reader would find an entry of this number: a file of a stranger has the highest one.
    """
    folder = _folder_of(run)
    path, data = _path_of(folder, entry.number), msgspec.json.encode(entry)
    if not _STEM.fullmatch(path.stem):
        highest = _path_of(folder, entry.number - 1)
        raise StateError(f"no number above that of {highest} is left for a job: move that file elsewhere")
    store = store_of(run)
    store.make_folder(folder)
    return store.create_small(path, data)


def add_entry(run: Path, make: Callable[[Entry, int], E], seen: tuple[Entry, int] | None = None) -> E:
    """Add the entry that ``make`` returns for the newest one and the highest number; nothing if it returns ``None``.

    It is called again if another job was faster. ``seen`` are these two at a look a moment ago: if there are newer
    ones, the entry has a number that is taken.
    """
    for _ in range(_ATTEMPTS):
        entry = make(*(seen or read_newest(run)))
        if entry is None or _create(run, entry):
            return entry
        seen = None
    raise StorageError(f"could not write into {_folder_of(run)}: other jobs do all the time")


def remove_drafts(run: Path, seconds: float) -> None:
    """Remove files older than ``seconds`` in a folder that were left by jobs which were killed while they claimed.

    A job that is only stopped there gets an error when it goes on.
    """
    folder = _folder_of(run)
    for name in posix.list_names(folder):
        draft = folder / name
        with suppress(StorageError):  # it has become an entry meanwhile, or another clean-up has removed it
            if _DRAFT.fullmatch(name) and time.time() - posix.last_change_time(draft) > seconds:
                posix.remove_file(draft)


def read_token(run: Path) -> str:
    """Return the token of the first entry, which identifies a run directory also after a move; "" without a history.

    A copy of the directory has the same one.
    """
    entry = find_entry(run, min(_list_entries(_folder_of(run)), default=0))
    return "" if entry is None else entry.job.token
