"""The folder of the local tier on one host: a run's generations in memory or on a local disk.

The folder belongs to one user and one run directory. It has, by their suffix:

- ``.data``: the bytes of a part, in a *slot* that its process maps and uses again (:mod:`rankless.tier.slots`);
- ``.part``: the table of a part, which is there exactly while the bytes are (:mod:`rankless.tier.part`);
- ``.common``: the values of a generation besides its parts (:mod:`rankless.tier.generation`);
- ``.lock``: a file that a process locks as long as it lives; its slots begin with the same name.
- ``owner``: the text of the job that uses the folder (:mod:`rankless.tier.job_text`). An older job that is still alive
  overwrites and removes nothing any more.

Tables and commons appear by a rename. Nothing is synced: a process may die at any moment, and its bytes stay; a host
that dies takes its memory with it.

All ranks of a host use one folder, in saves, loads and drains (:mod:`rankless.tier.job`), and commands look into it.
Names and formats of files are those that other processes of the host read. The order must stay: bytes before their
table; a table is removed before its bytes are overwritten; the owner is checked before anything is removed.
"""

from __future__ import annotations

import errno
import itertools
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from rankless.errors import (
    CorruptCheckpointError,
    InvalidArgumentError,
    NoCheckpointError,
    RanklessError,
    StorageError,
    SupersededError,
)
from rankless.process.prepared_types import prepared
from rankless.run.stored_history import read_token
from rankless.storage.atomic_rename import create_small
from rankless.storage.file_lock import FileLock
from rankless.storage.filesystem_kind import is_local
from rankless.storage.location import parse_location
from rankless.storage.posix import (
    directory_identity,
    file_size,
    host_id,
    is_directory,
    list_names,
    list_regular_files,
    make_and_remove_file,
    make_private_directory,
    overwrite_small,
    read_small,
)
from rankless.storage.second_read import read_twice_if_wrong
from rankless.storage.store import store_of
from rankless.tier.generation import Common, check_common
from rankless.tier.job_text import parse_job_number, parse_run_token
from rankless.tier.part import VERSION, ParityTable, PartTable, decode_checked, encode_checked
from rankless.tier.part_names import COMMON_SUFFIX, GenerationKey, PartName, parse_generation_name, parse_part_name

T = TypeVar("T")

_MARKER, _OWNER, DATA_SUFFIX, LOCK_SUFFIX, _PROBE_SUFFIX = "tier.json", "owner", ".data", ".lock", ".probe"

#: The most bytes of a table or a common: tables have 44 bytes for each 16 MiB.
_TABLE_BYTES = 2**32


@prepared
class _Marker(msgspec.Struct, frozen=True):
    format: str
    version: int
    run: str
    token: str


class TierFolder(msgspec.Struct, frozen=True):
    """The folder of the local tier of one run on this host. ``identity`` is equal in processes that share it."""

    path: Path
    identity: str

    @classmethod
    def open(cls, path: Path, run: Path) -> Self:
        """Open the folder for a run directory, and create it if it is missing.

        Raises ``InvalidArgumentError`` if it belongs to another run or has files of the user's, or is on a network file
        system; ``StorageError`` if it belongs to another user, cannot be written, or is corrupt.
        """
        make_private_directory(path)
        make_and_remove_file(path / f"{secrets.token_hex(8)}{_PROBE_SUFFIX}")  # the memory may be full of generations
        if not is_local(path):
            raise InvalidArgumentError(
                f"{path} is on a network file system: the local tier needs a folder in the memory or on a disk of "
                "this host, such as /dev/shm/NAME"
            )
        return cls._of(path, run, _read_marker(path) or _create_marker(path, run))

    @classmethod
    def find(cls, path: Path, run: Path) -> Self:
        """Open the folder that a job has made for a run directory, and change nothing.

        Raises ``NoCheckpointError`` if there is none, or the errors of :meth:`open`.
        """
        if not is_directory(path):
            raise NoCheckpointError(f"there is no folder {path}: no job has used it as its local tier on this host")
        make_private_directory(path)
        if (marker := _read_marker(path)) is None:
            raise NoCheckpointError(f"{path} is not the folder of a local tier")
        return cls._of(path, run, marker)

    @classmethod
    def _of(cls, path: Path, run: Path, marker: _Marker) -> Self:
        folder = cls(path, "")
        if not _is_same_run(marker.run, run) and folder._is_used() and not folder._was_moved(marker.run, run):
            raise InvalidArgumentError(
                f"{path} is the local tier of {marker.run}, not of {run}: pass another folder for the tier. Do not "
                f"remove {path}: only it may have the newest checkpoints of that run"
            )
        return cls(path, f"{host_id()} {directory_identity(path)} {marker.token}")

    def _is_used(self) -> bool:
        """Return whether a job has taken over the folder. One that was killed before that has left nothing in it."""
        return _OWNER in self._list_names() or bool(self.list_parts())

    def _was_moved(self, recorded: str, run: Path) -> bool:
        """Return whether the run directory that this folder knows was moved from a recorded path.

        A copy was not: the directory is still at the old path.
        """
        token = parse_run_token(self._read_owner())
        if not token or read_token(run) != token:
            return False
        try:
            return read_token(_parse_run(recorded, run)) != token
        except RanklessError:  # its contents are unknown
            return False

    def take_over(self, job: str, run: Path) -> None:
        """Make a job the owner of the folder, and ``run`` its run directory, which may have been moved.

        All processes of the job on this host may call it.

        Memory that dead processes have reserved and not filled is removed first: this job needs the memory already to
        load. Raises ``SupersededError`` if a later job is.

        All ranks call it in the vote "taking over the local tier", before any of them looks; a save calls it if no job
        has the folder.
        """
        owner = self._read_owner()
        if parse_job_number(owner) > parse_job_number(job):
            raise SupersededError(f"another job has continued the run, and uses {self.path} now")
        if owner != job:
            with suppress(StorageError):  # it only makes room
                self.remove_abandoned_slots()
            self._write_owner(job)
        if (marker := _read_marker(self.path)) is not None and not _is_same_run(marker.run, run):
            self._write(_MARKER, msgspec.json.encode(msgspec.structs.replace(marker, run=str(run))))

    def _write_owner(self, job: str) -> None:
        try:
            self._write(_OWNER, job.encode())
        except StorageError as error:
            if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                raise
            overwrite_small(self.path / _OWNER, job.encode())  # a job must begin also if others have filled the memory

    def is_lost(self) -> bool:
        """Return whether the folder was removed, or replaced: a cleaner of ``/dev/shm`` does that, for one."""
        try:
            marker = _read_marker(self.path) if is_directory(self.path) else None
        except StorageError as error:
            return error.errno is None  # the marker is corrupt; other errors may pass
        return marker is None or not self.identity.endswith(f" {marker.token}")

    def is_owned_by_other(self, job: str) -> bool:
        """Return whether a later job has taken over the folder. A text that is lost or cut proves nothing."""
        owner = self._read_owner()
        return owner != job and parse_job_number(owner) >= parse_job_number(job)

    def _read_owner(self) -> str:
        """Return the text of the job that uses the folder; an empty one if none does."""
        return self._read(_OWNER).decode(errors="replace") if _OWNER in self._list_names() else ""

    def find_newest_job(self) -> int:
        """Return the highest number of a job that this folder knows; 0 if there is none."""
        keys = (key.incarnation for key in self.list_parts())
        return max([parse_job_number(self._read_owner()), *keys])

    def newest_key(self) -> GenerationKey | tuple[()]:
        """Return the newest generation with a part here; an empty tuple, which is less than each, if there is none."""
        return max(self.list_parts(), default=())

    def list_parts(self, kind: str = "part") -> Mapping[GenerationKey, list[PartName]]:
        """Return the names of the parts of each generation, oldest first; with the kind ``"parity"``, of parities."""
        parsed = (parse_part_name(name, kind) for name in self._list_names())
        names = sorted(name for name in parsed if name is not None)
        parts: dict[GenerationKey, list[PartName]] = {}
        for name in names:
            parts.setdefault(name.key, []).append(name)
        return parts

    def read_part(self, name: PartName) -> PartTable:
        """Read a table. Raises ``CorruptCheckpointError``, or ``StorageError`` if it was removed meanwhile."""
        table = self._read_checked(name.name, PartTable.decode)
        if table.name != name:
            raise CorruptCheckpointError(f"{self.path / name.name} is corrupt: it is of another part")
        return table

    def has_part(self, name: PartName) -> bool:
        """Return whether a part is still there: a process removes its table before it overwrites the bytes."""
        return name.name in self._list_names()

    def write_part(self, table: PartTable) -> None:
        """Write a table. Its bytes must be complete.

        Each rank calls it in the vote "completing the local checkpoint".
        """
        self._write(table.name.name, table.encode())

    def read_parity(self, name: PartName) -> ParityTable:
        """Read the table of a parity. Raises ``CorruptCheckpointError``, or ``StorageError`` if it was removed."""
        path = self.path / name.parity_name
        table: ParityTable = self._read_checked(path.name, partial(decode_checked, kind=ParityTable))
        if not table.data.endswith(DATA_SUFFIX) or {"/", "\0"} & set(table.data):
            raise CorruptCheckpointError(f"{path} is corrupt: it names a file outside of the folder")
        return table

    def write_parity(self, name: PartName, table: ParityTable) -> None:
        """Write the table of a parity. Its bytes must be complete."""
        self._write(name.parity_name, encode_checked(table))

    def read_common(self, key: GenerationKey) -> Common | None:
        """Read the common of a generation: the values besides its parts. Return ``None`` if this host has none."""
        path = self.path / f"{key.name}{COMMON_SUFFIX}"
        try:
            common: Common = self._read_checked(path.name, partial(decode_checked, kind=Common))
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            return None
        return check_common(common, key, str(path))

    def list_commons(self) -> list[GenerationKey]:
        """Return the generations that have a label here, oldest first. All ranks have completed their parts of them."""
        names = (name for name in self._list_names() if name.endswith(COMMON_SUFFIX))
        return sorted(key for key in map(parse_generation_name, names) if key is not None)

    def write_common(self, common: Common) -> None:
        """Write the common of a generation, the values besides its parts, unless another process of this host has.

        Each rank calls it in a vote that follows the tables of all ranks: who reads it knows that all tables were
        written.
        """
        name = f"{common.label.key.name}{COMMON_SUFFIX}"
        if name not in self._list_names():
            self._write(name, encode_checked(common))

    def remove_table(self, name: str) -> None:
        """Remove a table, before its bytes are overwritten."""
        self._remove(name)

    def remove_generations(self, is_wanted: Callable[[GenerationKey], bool]) -> None:
        """Remove the generations that are not wanted, and the slots of dead processes that no other one uses."""
        for name in self._list_names():
            key = parse_generation_name(name)
            if key is not None and not is_wanted(key):
                self._remove(name)
        self.remove_abandoned_slots()

    def find_abandoned_slots(self, is_wanted: Callable[[GenerationKey], bool]) -> Mapping[str, int]:
        """Return the slots of dead processes that no table of a wanted generation names, with their sizes in bytes."""
        slots_of, living = self._slots_by_writer(), self.living_writers()
        used = self._list_used(is_wanted)  # last: a process may complete a part, and die
        slots = (slot for writer, names in slots_of.items() if writer not in living for slot in names)
        return {slot: file_size(self.path / slot) for slot in slots if slot not in used}

    def _list_used(self, is_wanted: Callable[[GenerationKey], bool]) -> set[str]:
        """Return the names of the files with bytes of wanted generations.

        Raises ``StorageError`` if a table cannot be read now.
        """
        used = set()
        for read, kind in ((self.read_part, "part"), (self.read_parity, "parity")):
            wanted = (names for key, names in self.list_parts(kind).items() if is_wanted(key))
            for name in itertools.chain.from_iterable(wanted):
                with suppress(CorruptCheckpointError), _ignoring_missing():
                    used.add(read(name).data)
        return used

    def remove_abandoned_slots(self) -> None:
        """Remove the slots of dead processes that no table names; none if a table cannot be read now.

        The tables are read after it is known who is dead: a process may complete a part, and be killed, meanwhile.
        """
        with ExitStack() as locks:
            dead = {}
            for writer in self._slots_by_writer():
                lock = _lock_if_dead(self.path / f"{writer}{LOCK_SUFFIX}")
                if lock is not None:
                    dead[writer] = locks.enter_context(closing(lock))
            slots_of = self._slots_by_writer() if dead else {}
            try:
                used = self._list_used(lambda _: True) if dead else set()
            except StorageError:  # too many open files, for example: it may name a slot that is wanted
                return
            for writer, lock in dead.items():
                slots = slots_of.get(writer, [])
                for slot in slots:
                    if slot not in used:
                        self._remove(slot)
                if not used.intersection(slots):
                    lock.remove()

    def living_writers(self) -> set[str]:
        """Return the beginnings of the names of slots of the processes that use the folder now."""
        return {writer for writer in self._slots_by_writer() if self._is_alive(writer)}

    def _is_alive(self, writer: str) -> bool:
        lock = _lock_if_dead(self.path / f"{writer}{LOCK_SUFFIX}")
        if lock is not None:
            lock.close()
        return lock is None

    def _slots_by_writer(self) -> Mapping[str, list[str]]:
        """Return the data files of each process that has its lock file there: that is removed last."""
        names = self._list_names()
        slots: dict[str, list[str]] = {
            name.removesuffix(LOCK_SUFFIX): [] for name in names if name.endswith(LOCK_SUFFIX)
        }
        for name in names:
            if name.endswith(DATA_SUFFIX) and (writer := name.partition("-")[0]) in slots:
                slots[writer].append(name)
        return slots

    def _list_names(self) -> set[str]:
        return store_of(self.path).list_names(self.path)

    def _read(self, name: str) -> bytes:
        store = store_of(self.path)
        store.check_regular(self.path / name, within=(self.path,))  # a FIFO would block
        return store.read_small(self.path / name, _TABLE_BYTES)

    def _read_checked(self, name: str, decode: Callable[..., T]) -> T:
        """Read and decode a table, a second time if it is corrupt. ``decode`` gets the bytes and ``file``, the path."""
        path = self.path / name
        return read_twice_if_wrong(path, lambda: decode(self._read(name), file=str(path)))

    def _write(self, name: str, data: bytes) -> None:
        store_of(self.path).replace_small(self.path / name, data)

    def _remove(self, name: str) -> None:
        """Remove a file, unless another process has. A folder of this name is not the tier's, and stays."""
        try:
            store_of(self.path).remove_file(self.path / name)
        except StorageError as error:
            if error.errno not in {errno.ENOENT, errno.EISDIR, errno.EPERM}:
                raise


def _parse_run(recorded: str, run: Path) -> Path:
    """Return the recorded path of a run, in an object store with the access of the present one."""
    return store_of(run).path(recorded) if store_of(run).is_remote else parse_location(recorded)


def _is_same_run(recorded: str, run: Path) -> bool:
    """Return whether a run directory is the recorded one, which may have been reached by another path or a link."""
    if recorded == str(run):
        return True
    if store_of(run).is_remote:
        return False
    try:
        return directory_identity(Path(recorded)) == directory_identity(run)
    except StorageError:  # one of them is missing
        return False


@contextmanager
def _ignoring_missing() -> Iterator[None]:
    """Ignore that a file was removed, or is none: not errors that may pass."""
    try:
        yield
    except StorageError as error:
        if error.errno not in {None, errno.ENOENT}:
            raise


def _lock_if_dead(path: Path) -> FileLock | None:
    """Return the lock of a process that has ended, or ``None`` if it lives."""
    try:
        return FileLock(path, create=False)
    except OSError:
        return None


def _is_tier_name(name: str) -> bool:
    """Return whether a file has the name of one of a tier: of an owner also the draft, or a writer's slot or lock.

    For example, a name that ends with ``.data`` is one.
    """
    is_writers = name.endswith((DATA_SUFFIX, LOCK_SUFFIX))
    return is_writers or name.startswith(_OWNER) or parse_generation_name(name) is not None


def _read_marker(path: Path) -> _Marker | None:
    if _MARKER not in list_names(path):
        return None
    if _MARKER not in list_regular_files(path):
        raise StorageError(f"{path} is not the folder of a local tier: remove {path / _MARKER}")
    try:
        marker = msgspec.json.decode(read_small(path / _MARKER), type=_Marker)
    except msgspec.DecodeError as error:
        raise StorageError(f"{path} is not the folder of a local tier: remove {path / _MARKER}") from error
    if marker.version != VERSION:
        raise StorageError(f"another version of rankless has used {path}: drain it with that one, or remove it")
    return marker


def _create_marker(path: Path, run: Path) -> _Marker:
    """Create the marker, unless another process does.

    Raises ``InvalidArgumentError`` if the folder has files of somebody else's, and ``StorageError`` if it has lost its
    marker: a cleaner removes the oldest files first. Then the run of its files is unknown.
    """
    others = [name for name in list_names(path) if _MARKER not in name and not name.endswith(_PROBE_SUFFIX)]
    if others and _read_marker(path) is None:
        if not all(map(_is_tier_name, others)):
            raise InvalidArgumentError(f"{path} is not empty, and is no local tier: pass a folder of its own")
        raise StorageError(f"{path} is a local tier without its file {_MARKER}, so its run is unknown: move it away")
    marker = _Marker("rankless local tier", VERSION, str(run), secrets.token_hex(8))
    try:
        encoded = msgspec.json.encode(marker)
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"a local tier notes the path of its run, but {run!r} is not UTF-8") from error
    create_small(path / _MARKER, encoded)
    return _read_marker(path) or marker
