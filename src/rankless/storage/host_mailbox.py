"""Messages between processes of one host: small files in a directory in shared memory.

Files need no server, no connection and no thread. No call blocks, and a message outlives its sender. A file may be
missing at any time, because the memory was full or a login manager removed the files of a user who logged out, so
nothing may depend on a message alone. Killed processes leave their directories; later ones remove these.

:class:`~rankless.engine.comm.host_vote_channel.HostVoteChannel` has one for each vote of several hosts, on every rank,
in the thread that votes.

A key-value store on each host was not taken: it needs a server and threads, blocks while its process is stopped, and
ends with it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path

from rankless.storage.posix import host_id

#: A file system in memory, which all processes of a host share unless they run in different containers.
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the directories in it are private, and their names are drawn at random

#: Seconds after which a turn passes to another process.
TURN_SECONDS = 0.5

#: Seconds after which a directory without changes belongs to processes that were killed.
_STALE_SECONDS = 24 * 3600.0


def reachable_id() -> str:
    """Return an id that is equal in processes that can read each other's boards, and unique if there is none."""
    try:
        folder = _SHARED_MEMORY.stat()
    except OSError:
        return secrets.token_hex(8)
    if not os.access(_SHARED_MEMORY, os.W_OK):
        return secrets.token_hex(8)
    return f"{host_id()} {folder.st_dev} {folder.st_ino} {os.geteuid()}"


def remove_stale_boards() -> None:
    """Remove the boards of this user's processes that were killed long ago."""
    for path in _SHARED_MEMORY.glob(_file_name("*")):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def _file_name(name: str) -> str:
    return f"rankless-{os.geteuid()}-{name}"


class HostMailbox:
    """Named messages. Processes that pass one name, which no other process can guess, share them."""

    def __init__(self, name: str) -> None:
        self._path = _SHARED_MEMORY / _file_name(name)

    def post(self, name: str, message: bytes = b"") -> bool:
        """Post a message, or replace it. Return whether it could be posted."""
        draft = self._path / f".{name}.{secrets.token_hex(4)}"
        try:
            self._path.mkdir(mode=0o700, exist_ok=True)
            draft.write_bytes(message)
            draft.rename(self._path / name)
        except OSError:
            return False
        return True

    def claim(self, name: str) -> bool:
        """Post an empty message if there is none. Return whether there was none, or none can be posted."""
        try:
            self._path.mkdir(mode=0o700, exist_ok=True)
            (self._path / name).touch(exist_ok=False)
        except OSError:
            return not self.has(name)
        return True

    def take_turn(self, name: str, who: str) -> bool:
        """Return whether it is the turn of ``who`` to do something.

        It stays with the one that took it first, until that one has not called this for ``TURN_SECONDS``.
        """
        if not self.claim(name):
            with suppress(OSError):
                modified = (self._path / name).stat().st_mtime
                age = time.time() - modified  # looked at later, so that it is negative only if the clock was changed
                if 0 <= age < TURN_SECONDS and self.read(name) != who.encode():
                    return False
        self.post(name, who.encode())
        return True

    def has(self, name: str) -> bool:
        """Return whether a message is there."""
        return (self._path / name).exists()

    def read(self, name: str) -> bytes | None:
        """Return a message, or ``None`` if it is missing."""
        try:
            return (self._path / name).read_bytes()
        except OSError:
            return None

    def names(self) -> AbstractSet[str]:
        """Return the names of all messages."""
        try:
            return {path.name for path in self._path.iterdir() if not path.name.startswith(".")}
        except OSError:
            return frozenset()

    def withdraw(self, name: str) -> None:
        """Remove a message."""
        with suppress(OSError):
            (self._path / name).unlink()

    def remove(self) -> None:
        """Remove all messages."""
        shutil.rmtree(self._path, ignore_errors=True)
