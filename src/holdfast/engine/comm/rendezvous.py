"""How the ranks of a process group come to a name for their conversations that no other group has used.

The key-value store may outlive a process group: an elastic job makes its next group over the same store, under the same
name and often of other ranks. What the group before has left there must be taken for nothing. So:

1. Every rank but rank 0 draws an id, and adds it to the arrivals in the store.
2. Rank 0 draws the name. Whenever it looks for anything in the store, it also answers new arrivals: it puts the name
   under each id.
3. A rank takes the name that it finds under its own id. Only the rank 0 of the same group can have put it there.

Ids of former groups are answered too, and nobody reads that. *No deadlock*: rank 0 waits for no arrival, only for the
votes of all ranks, and answers while it does; it is missed in a vote who has not come. The others wait for the answer
when they have something to tell, as they would wait for rank 0's decision.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from holdfast.engine.comm.daemon_executor import DaemonExecutor
from holdfast.engine.comm.polling import poll_until
from holdfast.engine.comm.store import DeadlineStore
from holdfast.engine.comm.vote import COORDINATOR_RANK, GRACE_SECONDS
from holdfast.errors import RankTimeoutError

#: The key that tells how many ids were ever added.
_ARRIVALS = "arrivals"

_PHASE = "meeting for the first time"


class Rendezvous:
    """What this rank knows of the name, and the numbers of its conversations under it."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size, self._id = rank, size, secrets.token_hex(8)
        self._name = self._id if rank == COORDINATOR_RANK else None
        self._has_arrived = False
        #: Whether nothing is left to do.
        self.is_over = False
        self._seen, self._unset, self._answered = 0, set[int](), 0
        self._numbers, self._lock = itertools.count(1), threading.Lock()

    def next_number(self) -> int:
        """The number of one more conversation: the n-th of each rank is the same one."""
        return next(self._numbers)

    def look(self, store: DeadlineStore) -> str | None:
        """Do what can be done without waiting for anybody. Returns the name, if it is known."""
        if not self.is_over and self._lock.acquire(blocking=False):  # else another thread is at it
            try:
                (self._answer if self._rank == COORDINATOR_RANK else self._ask)(store)
            finally:
                self._lock.release()
        return self._name

    def close(self) -> None:
        """Answer nobody any more: the group was made again."""
        self.is_over = True

    def _ask(self, store: DeadlineStore) -> None:
        if not self._has_arrived:
            store.set(_arrival(store.add(_ARRIVALS, 1)), self._id.encode())
            self._has_arrived = True
        if store.check([_answer(self._id)]):
            (name,) = store.get(_answer(self._id))
            store.set(_known(name.decode(), self._rank))
            store.forget(_answer(self._id))
            self._name, self.is_over = name.decode(), True

    def _answer(self, store: DeadlineStore) -> None:
        count = store.add(_ARRIVALS, 0)
        self._unset.update(range(self._seen + 1, count + 1))
        self._seen = count
        for number in sorted(self._unset):
            if store.check([_arrival(number)]):  # else it is about to be set, or never was
                (arrived,) = store.get(_arrival(number))
                store.set(_answer(arrived.decode()), self._id.encode())
                self._unset.remove(number)
                self._answered += 1
        if self._answered >= self._size - 1:
            self.is_over = store.check([_known(self._id, rank) for rank in range(1, self._size)])


def _arrival(number: int) -> str:
    return f"arrival/{number}"


def _answer(arrived: str) -> str:
    return f"answer/{arrived}"


def _known(name: str, rank: int) -> str:
    return f"known/{name}/{rank}"


class ConversationStore(DeadlineStore):
    """The keys of one conversation. Nothing is there before this rank knows its name."""

    def __init__(self, store: Store, aside: DaemonExecutor, seconds: float, meeting: Rendezvous, number: int) -> None:
        super().__init__(store, aside, seconds)
        self._shared, self._meeting, self._number = DeadlineStore(store, aside, seconds), meeting, number
        self._prefix = ""

    def is_open(self) -> bool:
        """Whether keys can be set without waiting for rank 0."""
        return self._meeting.look(self._shared) is not None

    def has_met_all(self) -> bool:
        """Whether this rank knows the name, and rank 0 also that all others do."""
        return self.is_open() and self._meeting.is_over

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return self.is_open() and super().check(keys)

    def _place(self, key: str) -> str:
        """Where a key is in the store. Raises ``RankTimeoutError`` if rank 0 does not come to tell."""
        self._prefix = self._prefix or self._learn_prefix()
        return self._prefix + key

    def _learn_prefix(self) -> str:
        if not poll_until(
            self.is_open, self._seconds + GRACE_SECONDS, lambda: f"rank {COORDINATOR_RANK} while {_PHASE}"
        ):
            raise RankTimeoutError(
                f"rank {COORDINATOR_RANK} did not come within the timeout while {_PHASE}; "
                "it is stuck or dead, or does not make the same calls in the same order"
            )
        return f"{self._meeting.look(self._shared)}/{self._number}/"


#: The meetings of this process by group, and the latest of each place in the store.
_meetings: WeakKeyDictionary[dist.ProcessGroup, Rendezvous] = WeakKeyDictionary()
_latest: dict[str, Rendezvous] = {}
_making = threading.Lock()


def rendezvous_of(group: dist.ProcessGroup, place: str) -> Rendezvous:
    """The meeting of a process group, at a place in the store: the same for all that is said over that group."""
    with _making:
        if group not in _meetings:
            if place in _latest:
                _latest[place].close()
            _meetings[group] = _latest[place] = Rendezvous(dist.get_rank(group), dist.get_world_size(group))
        return _meetings[group]
