"""Agreement of the ranks of a process group on a name for their sessions that no other group has used.

The key-value store may outlive a process group: an elastic job makes its next group over the same store, under the same
name and often with different ranks. Keys that the previous group left in the store must be ignored. So:

1. Every rank but rank 0 draws an id, and adds it to the arrivals in the store.
2. Rank 0 draws the name. Whenever it reads from the store, it also answers new arrivals: it stores the name under each
   id.
3. A rank takes the name that it finds under its own id. Only rank 0 of the same group can have stored it there.

Ids of former groups are answered too, but no rank reads these answers. *No deadlock*: rank 0 does not wait for
arrivals, only for the votes of all ranks, and it answers arrivals during that wait. A rank that does not come is
reported as missing in a vote. The other ranks wait for the answer before they set a key, as they would wait for rank
0's decision.

:meth:`RankGroup.open_session <rankless.engine.comm.session.RankGroup.open_session>` gets the rendezvous of its group on
each rank, and its number of the session. Every rank must open its sessions in the same order: the numbers are part of
the keys. Rank 0 must answer arrivals in any read of the store, and never wait for them.

Sessions are counted for a process group and not for an object, so ranks meet that call with other paths or tags, and an
error can say that their calls differ. The name is no generation number, which something would have to count, and is
agreed on without a collective, which needs a backend and cannot name a missing rank.
"""

from __future__ import annotations

import itertools
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

from rankless.engine.comm.daemon_executor import FORKED, DaemonExecutor
from rankless.engine.comm.host_map import HostAgreement
from rankless.engine.comm.job_store import DeadlineStore
from rankless.engine.comm.polling import poll_until
from rankless.engine.comm.process_group_argument import loaded_distributed
from rankless.engine.comm.vote import COORDINATOR_RANK, GRACE_SECONDS
from rankless.errors import RankFailedError, RankTimeoutError

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import Store

#: The key of the number of ids that were ever added.
_ARRIVALS = "arrivals"

#: The most arrivals that are answered with one call.
_BATCH = 256

_PHASE = "meeting for the first time"


class Rendezvous:
    """The state of this rank in the agreement on the name, and the counter of its sessions."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size, self._id = rank, size, secrets.token_hex(8)
        self._name = self._id if rank == COORDINATOR_RANK else None
        self._has_arrived = False
        #: Whether no steps are left.
        self.is_over = False
        self._seen, self._unset, self._answered = 0, set[int](), 0
        self._numbers, self._lock = itertools.count(1), threading.Lock()
        #: The hosts of the ranks, once they are known.
        self.agreement = HostAgreement()

    def next_session_number(self) -> int:
        """Return the number of the next session. The n-th session of each rank is the same one.

        It counts the sessions of all threads together. So all ranks must open their sessions in the same order.
        """
        return next(self._numbers)

    def poll_name(self, store: DeadlineStore) -> str | None:
        """Take the steps that are possible without waiting for other ranks. Return the name if it is known.

        :class:`SessionStore` calls it before each look at a key, in whatever thread votes.
        """
        if not self.is_over and self._lock.acquire(blocking=False):  # otherwise another thread is doing it
            try:
                (self._answer_arrivals if self._rank == COORDINATOR_RANK else self._request_name)(store)
            finally:
                self._lock.release()
        return self._name

    def close(self) -> None:
        """Answer no more arrivals, because a new process group has been made.

        The rendezvous of the next group calls it, on rank 0 and all others: two groups must not answer one arrival.
        """
        self.is_over = True

    def _request_name(self, store: DeadlineStore) -> None:
        """Add the own id to the arrivals, once, and take the name if it has been answered."""
        if not self._has_arrived:
            store.set(_arrival_key(store.add(_ARRIVALS, 1)), self._id.encode())
            self._has_arrived = True
        if store.check([_answer_key(self._id)]):
            (name,) = store.get(_answer_key(self._id))
            store.add(_known_key(name.decode()), 1)
            store.delete_keys(_answer_key(self._id))
            self._name, self.is_over = name.decode(), True

    def _answer_arrivals(self, store: DeadlineStore) -> None:
        """Store the name under the id of each new arrival."""
        count = store.add(_ARRIVALS, 0)
        self._unset.update(range(self._seen + 1, count + 1))
        self._seen = count
        unset = sorted(self._unset)
        for first in range(0, len(unset), _BATCH):
            self._answer_batch(store, unset[first : first + _BATCH])
        if self._answered >= self._size - 1:
            self.is_over = store.add(_known_key(self._id), 0) >= self._size - 1

    def _answer_batch(self, store: DeadlineStore, numbers: Sequence[int]) -> None:
        """Store the name under the ids of arrivals: at once if all are set, else one by one.

        One that is not set is about to be, or never was.
        """
        if not store.check([_arrival_key(number) for number in numbers]):
            for number in numbers if len(numbers) > 1 else ():
                self._answer_batch(store, [number])
            return
        ids = store.get(*map(_arrival_key, numbers))
        store.set_all({_answer_key(arrival_id.decode()): self._id.encode() for arrival_id in ids})
        self._unset.difference_update(numbers)
        self._answered += len(numbers)


def _arrival_key(number: int) -> str:
    return f"arrival/{number}"


def _answer_key(arrival_id: str) -> str:
    return f"answer/{arrival_id}"


def _known_key(name: str) -> str:
    """Return the key of the number of ranks that know the name."""
    return f"known/{name}"


class SessionStore(DeadlineStore):
    """The keys of one session. They are all absent until this rank knows the name.

    ``raise_if_failed`` is called whenever this rank would wait for others.
    """

    def __init__(
        self,
        store: Store,
        executor: DaemonExecutor,
        seconds: float,
        rendezvous: Rendezvous,
        number: int,
        *,
        raise_if_failed: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(store, executor, seconds)
        self._raise_if_failed = raise_if_failed
        self._shared, self._rendezvous, self._number = DeadlineStore(store, executor, seconds), rendezvous, number
        self._prefix = ""

    def is_open(self) -> bool:
        """Return whether keys can be set without waiting for rank 0."""
        return self._rendezvous.poll_name(self._shared) is not None or self._fail_or_wait()

    def has_met_all(self) -> bool:
        """Return whether this rank knows the name and, on rank 0, whether all other ranks do."""
        return self.is_open() and self._rendezvous.is_over

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are present."""
        return self.is_open() and (super().check(keys) or self._fail_or_wait())

    def _fail_or_wait(self) -> bool:
        self._raise_if_failed()
        return False

    def _full_key(self, key: str) -> str:
        """Return a key with its prefix in the store. Raises ``RankTimeoutError`` if rank 0 does not answer."""
        self._prefix = self._prefix or self._await_prefix()
        return self._prefix + key

    def _await_prefix(self) -> str:
        if not poll_until(
            self.is_open, self._seconds + GRACE_SECONDS, lambda: f"rank {COORDINATOR_RANK} while {_PHASE}"
        ):
            raise RankTimeoutError(
                f"rank {COORDINATOR_RANK} did not come within the timeout while {_PHASE}; "
                "it is stuck or dead, or does not make the same calls in the same order"
            )
        return f"{self._rendezvous.poll_name(self._shared)}/{self._number}/"


#: The rendezvous of this process by process group, and the latest for each prefix of keys.
_rendezvous_by_group: WeakKeyDictionary[dist.ProcessGroup, Rendezvous] = WeakKeyDictionary()
_latest: dict[str, Rendezvous] = {}
_rendezvous_lock = threading.Lock()

#: The process groups of the rank that this process was forked from: its connection to the store must not be shared.
_groups_before_fork: WeakSet[dist.ProcessGroup] = WeakSet()


def _note_groups_before_fork() -> None:
    dist = loaded_distributed()
    if dist is not None and dist.is_available() and dist.is_initialized():
        _groups_before_fork.update(dist.distributed_c10d._world.pg_map)  # noqa: SLF001


os.register_at_fork(after_in_child=_note_groups_before_fork)


def rendezvous_of(group: dist.ProcessGroup, prefix: str) -> Rendezvous:
    """Return the rendezvous of a process group, given the prefix of its keys: one for all sessions over that group.

    Raises ``RankFailedError`` if this process was forked from the rank.

    :class:`~rankless.engine.comm.session.RankGroup` calls it on each rank when a session begins. A new group over the
    same keys ends the former group's answers.
    """
    if group in _groups_before_fork:
        raise RankFailedError(FORKED)
    with _rendezvous_lock:
        if group not in _rendezvous_by_group:
            if prefix in _latest:
                _latest[prefix].close()
            _rendezvous_by_group[group] = _latest[prefix] = Rendezvous(group.rank(), group.size())
        return _rendezvous_by_group[group]
