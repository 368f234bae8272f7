"""The ranks that :func:`rankless.watch` has found dead in this process. Votes do not wait for them until their timeout.

A save may be complete although a rank has died: it may have done its part. So votes go on for a few seconds.

:mod:`rankless.liveness.rank_loss_reaction` adds failures, in the thread of the watch. Each session asks for them
whenever this rank would wait for others (:class:`~rankless.engine.comm.rendezvous.SessionStore`), in any thread.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec

from rankless.errors import RankFailedError

if TYPE_CHECKING:
    import torch.distributed as dist

#: Seconds that votes go on after a failure is known.
_GRACE_SECONDS = 5.0


class _KnownFailure(msgspec.Struct, frozen=True):
    ranks: frozenset[int]
    message: str
    since: float
    world: weakref.ref[dist.ProcessGroup]


class KnownFailures:
    """The failures of one process.

    Ranks are numbered as in the default group. A new default group begins without failures.

    They outlast the watch: the error about them ends it, and saves in the background must still learn of them.
    """

    def __init__(self) -> None:
        self._failures: tuple[_KnownFailure, ...] = ()
        self._lock = threading.Lock()

    def add(self, ranks: Collection[int], message: str) -> bool:
        """Add ranks that have died. Return whether the death of any of them is news."""
        import torch.distributed as dist  # noqa: PLC0415 - only ranks of a process group fail

        world = dist.group.WORLD
        if world is None:
            return True
        with self._lock:
            known = set[int]().union(*(item.ranks for item in self._failures if item.world() is world))
            failure = _KnownFailure(frozenset(ranks), message, time.monotonic(), weakref.ref(world))
            self._failures = (*self._failures, failure)
            return not known.issuperset(ranks)

    def clear(self) -> None:
        """Forget all failures."""
        self._failures = ()

    def raise_if_member_failed(self, process_group: dist.ProcessGroup) -> None:
        """Raise ``RankFailedError`` if a member of a group has died, and votes went on for long enough."""
        if not self._failures:
            return
        import torch.distributed as dist  # noqa: PLC0415

        try:
            members = dist.get_process_group_ranks(process_group)
        except (KeyError, ValueError):  # the group has been destroyed
            return
        for failure in self._failures:
            is_over = time.monotonic() - failure.since > _GRACE_SECONDS
            if is_over and failure.world() is dist.group.WORLD and not failure.ranks.isdisjoint(members):
                raise RankFailedError(failure.message)


known_failures = KnownFailures()
