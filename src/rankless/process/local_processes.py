"""Processes of this host that may end. The kernel reports their end within milliseconds, whatever kills them.

A stopped or busy process has not ended. Without Linux's ``pidfd_open`` nothing is reported.

:class:`~rankless.liveness.watcher.Watcher` waits with it in its thread, on each rank.
"""

from __future__ import annotations

import os
import secrets
import select
import threading
from pathlib import Path

#: Most processes that are observed: each takes a file descriptor.
_MOST_PROCESSES = 128


def pid_namespace() -> str:
    """Return an id that is equal in processes of a host which know each other by the same process ids."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return secrets.token_hex(8)


class LocalProcesses:
    """Other processes by rank. One thread adds them, waits and closes; any thread may wake it up."""

    def __init__(self) -> None:
        self._poll, self._rank_of = select.poll(), dict[int, int]()
        self._pids, self._ended = dict[int, int](), list[int]()
        self._wakeup_read, self._wakeup_write = os.pipe()
        self._poll.register(self._wakeup_read, select.POLLIN)
        self._lock, self._is_closed = threading.Lock(), False

    def add(self, rank: int, pid: int) -> None:
        """Observe a process. The next wait reports one that has ended already."""
        if len(self._rank_of) >= _MOST_PROCESSES or not hasattr(os, "pidfd_open"):
            return
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended.append(rank)
        except OSError:  # forbidden in this container, or there are no more descriptors
            return
        else:
            self._rank_of[fd] = rank
            self._poll.register(fd, select.POLLIN)
        self._pids[rank] = pid

    def pid_of(self, rank: int) -> int | None:
        """Return the process id of a rank that is observed or has ended."""
        return self._pids.get(rank)

    def wait(self, seconds: float) -> list[int]:
        """Wait until processes end or this is woken up. Return the ranks of those that have ended, each once."""
        ready = self._poll.poll(0 if self._ended else max(0.0, seconds) * 1000)
        ended, self._ended = self._ended, []
        for fd, _ in ready:
            if fd != self._wakeup_read:
                self._poll.unregister(fd)
                ended.append(self._rank_of.pop(fd))
                os.close(fd)
        return sorted(ended)

    def wake_up(self) -> None:
        """Let this and every later wait return at once.

        The main thread calls it when the watch stops.
        """
        with self._lock:
            if not self._is_closed:
                os.write(self._wakeup_write, b"x")

    def close(self) -> None:
        """Release all descriptors."""
        with self._lock:
            self._is_closed = True
            for fd in (*self._rank_of, self._wakeup_read, self._wakeup_write):
                os.close(fd)
            self._rank_of.clear()
