"""The folder of the local tier on one host: a run's generations in memory or on a local disk.

The folder belongs to one user and one run directory. It has, by their suffix:

- ``.data``: the bytes of a part, in a *slot* that its process maps and uses again (:mod:`holdfast.tier.slots`);
- ``.part``: the table of a part, which is there exactly while the bytes are (:mod:`holdfast.tier.part`);
- ``.common``: what a generation has in addition to its parts (:mod:`holdfast.tier.generation`);
- ``.lock``: a file that a process locks as long as it lives; its slots begin with the same name.
- ``owner``: a random text of the job that uses the folder. An older job that is still alive overwrites and removes
  nothing any more.

Tables and commons appear by a rename. Nothing is synced: a process may die at any moment, and what it wrote stays; a
host that dies takes its memory with it.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from holdfast.errors import CorruptCheckpointError, InvalidArgumentError, StorageError
from holdfast.storage.atomic_rename import create_small, replace_small
from holdfast.storage.file_lock import FileLock
from holdfast.storage.filesystems import is_local
from holdfast.storage.posix import (
    directory_identity,
    host_id,
    list_names,
    list_regular_files,
    make_private_directory,
    read_small,
    remove_file,
)
from holdfast.tier.generation import Common, check_common
from holdfast.tier.part import (
    COMMON_SUFFIX,
    VERSION,
    GenerationKey,
    PartName,
    PartTable,
    decode_checked,
    encode_checked,
    parse_generation_name,
    parse_part_name,
)

_MARKER, _OWNER, DATA_SUFFIX, LOCK_SUFFIX = "tier.json", "owner", ".data", ".lock"


class _Marker(msgspec.Struct, frozen=True):
    format: str
    version: int
    run: str
    token: str


@dataclass(frozen=True)
class TierFolder:
    """The folder of the local tier of one run on this host. ``identity`` is equal in processes that share it."""

    path: Path
    identity: str

    @classmethod
    def open(cls, path: Path, run: Path) -> Self:
        """Open the folder for a run directory, and create it if it is missing.

        Raises ``InvalidArgumentError`` if it is that of another run, or on a network file system; ``StorageError`` if
        it is that of another user.
        """
        make_private_directory(path)
        if not is_local(path):
            raise InvalidArgumentError(
                f"{path} is on a network file system: the local tier needs a folder in the memory or on a disk of "
                "this host, such as /dev/shm/NAME"
            )
        marker = _read_marker(path) or _create_marker(path, run)
        if marker.run != str(run):
            raise InvalidArgumentError(
                f"{path} is the local tier of {marker.run}, not of {run}: pass another folder, or remove it"
            )
        return cls(path, f"{host_id()} {directory_identity(path)} {marker.token}")

    def take_over(self, job: str) -> None:
        """Make a job the owner of the folder. All its processes on this host may call it."""
        if not self.is_owned_by(job):
            self._write(_OWNER, job.encode())

    def is_owned_by(self, job: str) -> bool:
        """Return whether no other job has taken over the folder since this one has."""
        return _OWNER in self._list_names() and self._read(_OWNER) == job.encode()

    def list_parts(self) -> Mapping[GenerationKey, list[PartName]]:
        """Return the names of the parts of each generation, oldest first."""
        names = sorted(name for name in map(parse_part_name, self._list_names()) if name is not None)
        parts: dict[GenerationKey, list[PartName]] = {}
        for name in names:
            parts.setdefault(name.key, []).append(name)
        return parts

    def read_part(self, name: PartName) -> PartTable:
        """Read a table. Raises ``CorruptCheckpointError``, or ``StorageError`` if it was removed meanwhile."""
        table = PartTable.decode(self._read(name.name), str(self.path / name.name))
        if table.name != name:
            raise CorruptCheckpointError(f"{self.path / name.name} is corrupt: it is of another part")
        return table

    def write_part(self, table: PartTable) -> None:
        """Write a table, whose bytes are complete."""
        self._write(table.name.name, table.encode())

    def read_common(self, key: GenerationKey) -> Common | None:
        """Read what a generation has in addition to its parts. Return ``None`` if this host has none."""
        path = self.path / f"{key.name}{COMMON_SUFFIX}"
        try:
            raw = self._read(path.name)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            return None
        return check_common(decode_checked(raw, Common, str(path)), key, str(path))

    def write_common(self, common: Common) -> None:
        """Write what a generation has in addition to its parts, unless another process of this host has."""
        name = f"{common.label.key.name}{COMMON_SUFFIX}"
        if name not in self._list_names():
            self._write(name, encode_checked(common))

    def remove_part(self, name: PartName) -> None:
        """Remove a table, before its bytes are overwritten."""
        self._remove(name.name)

    def remove_generations(self, is_wanted: Callable[[GenerationKey], bool]) -> None:
        """Remove the generations that are not wanted, and the slots of dead processes that no other one uses."""
        for name in self._list_names():
            key = parse_generation_name(name)
            if key is not None and not is_wanted(key):
                self._remove(name)
        self.remove_abandoned_slots()

    def remove_abandoned_slots(self) -> None:
        """Remove the slots of dead processes that no table names."""
        used = set()
        for names in self.list_parts().values():
            for name in names:
                with suppress(StorageError, CorruptCheckpointError):
                    used.add(self.read_part(name).data)
        for writer, slots in self._slots_by_writer().items():
            lock = _lock_if_dead(self.path / f"{writer}{LOCK_SUFFIX}")
            if lock is None:
                continue
            for slot in slots:
                if slot not in used:
                    self._remove(slot)
            if not used.intersection(slots):
                lock.remove()
            lock.close()

    def _slots_by_writer(self) -> Mapping[str, list[str]]:
        """Return the data files of each process whose lock file is there, which is removed last."""
        names = self._list_names()
        slots: dict[str, list[str]] = {
            name.removesuffix(LOCK_SUFFIX): [] for name in names if name.endswith(LOCK_SUFFIX)
        }
        for name in names:
            if name.endswith(DATA_SUFFIX) and (writer := name.partition("-")[0]) in slots:
                slots[writer].append(name)
        return slots

    def _list_names(self) -> set[str]:
        return list_regular_files(self.path)

    def _read(self, name: str) -> bytes:
        if name not in self._list_names():  # the read of a FIFO would wait
            raise StorageError(errno.ENOENT, f"{self.path / name} is missing, or no regular file")
        return read_small(self.path / name)

    def _write(self, name: str, data: bytes) -> None:
        replace_small(self.path / name, data)

    def _remove(self, name: str) -> None:
        """Remove a file, unless another process has."""
        try:
            remove_file(self.path / name)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise


def _lock_if_dead(path: Path) -> FileLock | None:
    """Return the lock of a process that has ended, or ``None`` if it lives."""
    try:
        return FileLock(path, create=False)
    except OSError:
        return None


def _read_marker(path: Path) -> _Marker | None:
    if _MARKER not in list_names(path):
        return None
    if _MARKER not in list_regular_files(path):
        raise InvalidArgumentError(f"{path} is not the folder of a local tier: remove {path / _MARKER}")
    try:
        marker = msgspec.json.decode(read_small(path / _MARKER), type=_Marker)
    except msgspec.DecodeError as error:
        raise InvalidArgumentError(f"{path} is not the folder of a local tier: remove {path / _MARKER}") from error
    if marker.version != VERSION:
        raise InvalidArgumentError(f"another version of holdfast has used {path}: remove it")
    return marker


def _create_marker(path: Path, run: Path) -> _Marker:
    """Create the marker, unless another process does. Raises ``InvalidArgumentError`` if the folder has other files."""
    foreign = [name for name in list_names(path) if _MARKER not in name]
    if foreign and _read_marker(path) is None:
        raise InvalidArgumentError(f"{path} is not empty, and is no local tier: pass a folder of its own")
    marker = _Marker("holdfast local tier", VERSION, str(run), secrets.token_hex(8))
    create_small(path / _MARKER, msgspec.json.encode(marker))
    return _read_marker(path) or marker
