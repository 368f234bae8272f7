"""``watch``: every rank learns within seconds which rank has died, also between saves.

A training calls it on every rank, in the main thread; :class:`~rankless.liveness.watcher.Watcher` runs in a thread of
its own. It holds no votes: a rank may be dead.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from types import TracebackType

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from rankless.engine.comm.rendezvous import SessionStore
from rankless.engine.comm.session import RankGroup
from rankless.engine.plan.tensor_specs import digest_bytes
from rankless.errors import InvalidArgumentError
from rankless.liveness.rank_loss_reaction import Reaction
from rankless.liveness.watch_store import WatchStore
from rankless.liveness.watcher import Member, Watcher, WatchTimes
from rankless.process.exit_order import ExitStage, call_at_exit
from rankless.process.local_processes import pid_namespace
from rankless.process.main_thread_errors import MainThread
from rankless.process.uncaught_error import find_uncaught_error, is_success
from rankless.storage.closing import ClosingMixin
from rankless.storage.host_mailbox import reachable_id
from rankless.torch_versions import clone_store


class SeparateConnection(Store):
    """A connection next to the training's own: there a blocking call of the training would hold up all others.

    It is opened at the first call, because that may take seconds.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._shared = store
        self._own: Store | None = None

    @property
    def _connection(self) -> Store:
        if self._own is None:
            self._own = clone_store(self._shared)
        return self._own

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Set the value of a key."""
        self._connection.set(key, value)  # type: ignore[arg-type]

    def add(self, key: str, amount: int) -> int:
        """Add to the number under a key, and return the sum."""
        return self._connection.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are present."""
        return self._connection.check(keys)

    def multi_get(self, keys: list[str]) -> Sequence[bytes]:  # type: ignore[override]
        """Return the values of keys."""
        return self._connection.multi_get(keys)

    def delete_key(self, key: str) -> bool:
        """Delete a key."""
        return self._connection.delete_key(key)


#: The least number of heartbeats that must be missing.
_LEAST_MISSING = 5


def watch(
    process_group: dist.ProcessGroup | None = None,
    *,
    interval: float = 1.0,
    timeout: float = 30.0,
    exit_after: float | None = 10.0,
) -> Watch:
    """Watch, together with all ranks, for ranks that die. Every rank must call it once, after ``init_process_group``.

    ::

        with rankless.watch():
            for step in ...:
                ...

    If a rank dies, the main thread of every other rank gets ``RankFailedError``, which names that rank, within
    milliseconds on its host, within ``interval`` on others. If a whole host is lost, or a rank is stopped, it takes
    ``timeout``. A rank that leaves the block or ends normally is no failure.

    Args:
        process_group: the ranks that watch each other; the default group. Without one there is nothing to watch.
        interval: seconds between two heartbeats. Use 5 with more than about 5,000 ranks.
        timeout: seconds without a heartbeat after which a rank counts as dead although its process may exist. A rank
            that does not execute Python code for as long is taken for dead.
        exit_after: seconds after which the process ends, with status 1, if its main thread has not left the call that
            blocks it. ``None``: it stays blocked.

    Raises:
        InvalidArgumentError: this is not the main thread, the group is watched already, or a number is out of range.
    """
    if threading.current_thread() is not threading.main_thread():
        raise InvalidArgumentError("watch() installs a signal handler: call it in the main thread")
    for name, seconds in (("interval", interval), ("timeout", timeout), ("exit_after", exit_after)):
        _check_seconds(name, seconds)
    if not interval > 0 or not timeout >= _LEAST_MISSING * interval:
        raise InvalidArgumentError(
            f"interval={interval} and timeout={timeout}: the timeout must be at least {_LEAST_MISSING} intervals, "
            "else a slow rank would be taken for a dead one"
        )
    return Watch(RankGroup(process_group), WatchTimes(interval, timeout), exit_after)


def _check_seconds(name: str, seconds: object) -> None:
    if isinstance(seconds, int | float) and type(seconds) is not bool and 0 <= seconds <= threading.TIMEOUT_MAX:
        return
    if seconds is not None or name != "exit_after":
        optional = ", or None" if name == "exit_after" else ""
        raise InvalidArgumentError(f"{name} must be a number of seconds{optional}; got {seconds!r:.80}")


class Watch(ClosingMixin):
    """The watch over the ranks of a group: see :func:`watch`. Usable as a context manager."""

    def __init__(self, ranks: RankGroup, times: WatchTimes, exit_after: float | None) -> None:
        self._pid, self._times, self._has_waited = os.getpid(), times, False
        self._main_thread = MainThread()
        try:
            _watches.require_unwatched(ranks.process_group)
        except InvalidArgumentError:
            self._main_thread.close()
            raise
        self._reaction = Reaction(self._main_thread, exit_after)
        store = ranks.open_background_store(times.call_seconds, SeparateConnection)
        self._watcher = None if store is None else self._start_watcher(ranks, store)
        if self._watcher is not None:
            self._at_exit = call_at_exit(ExitStage.WATCHERS, self._end_with_process)

    def _start_watcher(self, ranks: RankGroup, store: SessionStore) -> Watcher:
        group, member = weakref.ref(ranks.process_group), Member(ranks.rank, ranks.global_ranks())
        host = digest_bytes(f"{reachable_id()} {pid_namespace()}".encode(), 8).hex()

        def has_group() -> bool:
            watched = group()
            return watched is not None and is_registered(watched)

        watcher = Watcher(WatchStore(store, ranks.rank, host), member, self._times, self._reaction, has_group)
        _watches.add(ranks.process_group, watcher)
        watcher.start()
        return watcher

    def close(self) -> None:
        """Leave the watch normally: from now on this rank may end without a failure of the others."""
        self._stop(None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the watch.

        After an exception, wait a moment: it may be the effect of another rank's death, which is then raised instead.
        The exception alone is no failure of this rank unless it ends the process.
        """
        if is_success(error) or self._watcher is None or self._watcher.has_loss.is_set() or os.getpid() != self._pid:
            self.close()
            return
        try:
            self._await_verdict(self._watcher)
        finally:
            self._reaction.mute()

    def _await_verdict(self, watcher: Watcher) -> None:
        """Wait until the death of another rank would be known. The error about it is raised during the wait."""
        if not self._has_waited:
            self._has_waited = True
            watcher.has_loss.wait(self._times.interval + 0.5)

    def _end_with_process(self) -> None:
        """Leave at the end of the process: with its exception, if no other rank is the reason of that."""
        self._reaction.mute()
        error = find_uncaught_error()
        if error is not None and self._watcher is not None:
            self._await_verdict(self._watcher)
        self._stop(error)

    def _stop(self, error: BaseException | None) -> None:
        if os.getpid() != self._pid:  # a forked process: it has no thread, and is no rank
            return
        self._reaction.mute()
        if self._watcher is not None:
            self._at_exit.cancel()
            self._watcher.stop(error)
        self._main_thread.close()


def is_registered(process_group: dist.ProcessGroup) -> bool:
    """Return whether a process group has not been destroyed."""
    try:
        dist.get_group_rank(process_group, dist.get_rank())
    except (ValueError, RuntimeError):
        return False
    return True


class _Watches:
    """The watches of this process by group."""

    def __init__(self) -> None:
        self._running: weakref.WeakKeyDictionary[dist.ProcessGroup, Watcher] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def add(self, process_group: dist.ProcessGroup | None, watcher: Watcher) -> None:
        if process_group is not None:
            with self._lock:
                self._running[process_group] = watcher

    def require_unwatched(self, process_group: dist.ProcessGroup | None) -> None:
        if process_group is not None and process_group in self._running and self._running[process_group].is_running:
            raise InvalidArgumentError("this process group is watched already: close the other watch first")


_watches = _Watches()
