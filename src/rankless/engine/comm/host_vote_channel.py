"""The messages of one vote if hosts have several ranks: the store and rank 0 handle one message for each host.

1. Each rank posts its outcome to the other ranks of its host. The last one sends all of them to the store, in one
   message. No rank waits for that, and none has a special role.
2. One waiting rank of each host polls the store, and posts its findings for the others. If it stops, because it is dead
   or stuck, another one takes its turn.
3. If outcomes are missing after half of the time until they would be reported, the ranks that wait ask for *direct*
   outcomes: each rank of a host that is not complete gets a key of its own in the store, as in
   :class:`VoteChannel`. So a missing rank is distinguished from others of its host, and a vote succeeds even if
   messages within a host are lost.

:class:`~rankless.engine.comm.session.Session` opens one for each vote, on every rank, once the ranks of the process
group know their hosts. The result must be the one of :class:`VoteChannel`, whatever is lost within a host: only the
store decides. Rank 0 alone calls the methods that say so; all ranks call the others.

Hosts are known after the first vote of a process group. Ranks are on one host if they have the same boot id, user and
file system at ``/dev/shm``: containers that do not share memory are several hosts. If the messages within a host
disappear, its ranks post again. A rank that has left cannot do so: that is why departures are counted in the store.
Names of the messages have a random number of rank 0, and only the user can read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from rankless.engine.comm import polling
from rankless.engine.comm.host_map import HostMap, combine_outcomes, separate_outcomes
from rankless.engine.comm.job_store import DeadlineStore
from rankless.engine.comm.polling import Deadline
from rankless.engine.comm.vote_channel import COLLECTED, DECISION, FAILED, VoteChannel
from rankless.storage.host_mailbox import TURN_SECONDS, HostMailbox

#: The name of the message that direct outcomes are wanted.
_DIRECT = "direct"

#: The names of the tasks that one rank of a host does for all: send their outcomes, poll for the decision, poll for an
#: error.
_SEND, _POLL, _POLL_FAILED = "send", "poll", "poll failed"


class HostVoteChannel(VoteChannel):
    """The keys of one vote in the store, one for each host, and the messages within the host of this rank."""

    names_each_departure = False

    def __init__(self, store: DeadlineStore, vote: int | str, hosts: HostMap, rank: int, board: HostMailbox) -> None:
        super().__init__(store, vote, len(hosts.host_of))
        self._hosts, self._rank, self._board = hosts, rank, board
        self._own_ranks = hosts.ranks_of[hosts.host_of[rank]]
        self._own_key = self._host_key(hosts.host_of[rank])
        self._outcome: bytes | None = None
        self._deadline = self._patience = Deadline(0)
        self._is_direct, self._is_settled = False, False

    @cached_property
    def _host_keys(self) -> list[str]:
        """The keys of all hosts: most ranks need only the key of their own host."""
        return [self._host_key(host) for host in range(len(self._hosts.ranks_of))]

    @cached_property
    def _missing(self) -> list[int]:
        """The hosts with outcomes that rank 0 has not found yet."""
        return list(range(len(self._hosts.ranks_of)))

    def _host_key(self, host: int) -> str:
        return self._key(f"host/{host}")

    @property
    def outcome_keys(self) -> list[str]:
        """The keys that are set once all ranks have posted."""
        return self._host_keys

    def post_outcome(self, rank: int, outcome: bytes) -> None:
        """Post the outcome of this rank to its host. The last rank of the host sends all outcomes to the store."""
        self._store.check_process()
        is_posted = self._board.post(str(rank), outcome)
        self._outcome = outcome if is_posted else None
        if not is_posted:
            self._want_direct_outcomes()
            super().post_outcome(rank, outcome)
        elif self._is_host_complete():
            self._send_once()
        elif self._board.has(_DIRECT):
            super().post_outcome(rank, outcome)

    def depart(self, rank: int) -> None:
        """Count this rank in the store. Rank 0 waits for a key that the last rank of the host sets.

        A message within the host is not enough: if it is lost, no rank is left to send it again.
        """
        host = self._hosts.host_of[rank]
        key = self._host_key(host)
        if self._store.add(_count_key(key), 1) == len(self._hosts.ranks_of[host]):
            self._store.set(key)

    @property
    def departure_keys(self) -> list[str]:
        """All keys that :meth:`depart` sets."""
        return [*self._host_keys, *map(_count_key, self._host_keys)]

    def read_failure(self) -> str:
        """Return the name of the type of a rank's error; empty if no rank is known to have failed."""
        posted = self._board.read(FAILED)
        if posted is None and self._board.take_turn(_POLL_FAILED, str(self._rank)):
            posted = super().read_failure().encode()
            if posted:
                self._board.post(FAILED, posted)
        return (posted or b"").decode()

    def begin_wait(self, timeout: float) -> None:
        """Prepare to be polled for at most ``timeout`` seconds. Towards their end, every rank polls the store."""
        self._deadline = Deadline(timeout - TURN_SECONDS)
        self._patience = Deadline(min(timeout, polling.QUIET_SECONDS) / 2)

    def is_complete(self) -> bool:
        """Return whether all ranks have posted. Called on rank 0."""
        if self._store.check([self._host_keys[host] for host in self._missing]):
            return True
        self._help_missing_ranks()
        if self._are_direct_outcomes_wanted():
            self._missing = [host for host in self._missing if not self._has_host_posted(host)]
        return not self._missing

    def read_outcomes(self) -> list[bytes]:
        """Return the outcomes of all ranks in their order, which are complete. Called on rank 0."""
        by_host = self._read_by_host()
        next_of = [iter(outcomes) for outcomes in by_host]
        return [next(next_of[host]) for host in self._hosts.host_of]

    def is_collected(self) -> bool:
        """Return whether rank 0 has found the outcomes of all ranks, or has decided."""
        if self._board.has(COLLECTED) or self._board.has(DECISION):
            return True
        if self._outcome is not None and not self._board.has(str(self._rank)):
            self.post_outcome(self._rank, self._outcome)  # the board is not what it was: all ranks post again
        if self._has_turn():
            self._help_missing_ranks()
        elif not self._deadline.is_over:
            return False
        if self._store.check([self._key(COLLECTED)]):
            self._board.post(COLLECTED)
            return True
        return self._fetch_decision()

    def is_decided(self) -> bool:
        """Return whether rank 0 has decided."""
        if self._board.has(DECISION):
            return True
        return (self._has_turn() or self._deadline.is_over) and self._fetch_decision()

    def read_decision(self) -> bytes:
        """Return the decision, which is there."""
        posted = self._board.read(DECISION)
        return super().read_decision() if posted is None else posted

    def has_posted(self, rank: int) -> bool:
        """Return whether a rank, or its whole host, has posted to the store."""
        return self._store.check([self._host_key(self._hosts.host_of[rank])]) or super().has_posted(rank)

    def find_unposted(self) -> list[int]:
        """Return the ranks that have not posted to the store."""
        missing = self.find_absent_keys(self._host_keys)
        ranks = [rank for host in missing for rank in self._hosts.ranks_of[host]]
        return [rank for rank in sorted(ranks) if not super(HostVoteChannel, self).has_posted(rank)]

    def delete_outcomes(self) -> None:
        """Delete the outcomes of this vote, and rank 0's messages of the one before, in the background."""
        super().delete_outcomes()
        if self._are_direct_outcomes_wanted():
            self._store.delete_keys(*self._rank_keys, self._key(_DIRECT))

    def close(self) -> None:
        """End the vote on this rank. The last rank of the host removes the messages within it."""
        self._board.withdraw(str(self._rank))
        if not any(name.isdecimal() for name in self._board.names()):
            self._board.remove()

    def _is_host_complete(self) -> bool:
        names = self._board.names()
        return all(str(rank) in names for rank in self._own_ranks)

    def _send_once(self) -> None:
        """Send the outcomes of the host's ranks, unless another rank does."""
        if self._board.claim(_SEND):
            self._send()

    def _send(self) -> None:
        """Send the outcomes of the host's ranks, if none is lost."""
        outcomes = [self._board.read(str(rank)) for rank in self._own_ranks]
        present = [outcome for outcome in outcomes if outcome is not None]
        if len(present) == len(outcomes):
            self._store.set(self._own_key, combine_outcomes(present))

    def _has_turn(self) -> bool:
        """Return whether this rank polls the store for its host."""
        return self._board.take_turn(_POLL, str(self._rank))

    def _fetch_decision(self) -> bool:
        """Post the decision to this host if it is in the store. Return whether it is."""
        if not super().is_decided():
            return False
        self._board.post(DECISION, super().read_decision())
        return True

    def _help_missing_ranks(self) -> None:
        """Ask for direct outcomes if it is time to. If others ask, send this host's outcomes if it is not complete."""
        if self._patience.is_over:
            self._want_direct_outcomes()
        if self._is_settled:
            return
        if not self._is_host_complete():
            if self._are_direct_outcomes_wanted():
                self._send_directly()
        elif self._is_direct:
            if not self._store.check([self._own_key]):  # the rank that was to send them has died
                self._send()
            self._is_settled = True

    def _want_direct_outcomes(self) -> None:
        if not self._is_direct:
            self._store.set(self._key(_DIRECT))
            self._is_direct = True

    def _are_direct_outcomes_wanted(self) -> bool:
        self._is_direct = self._is_direct or self._store.check([self._key(_DIRECT)])
        return self._is_direct

    def _send_directly(self) -> None:
        """Send the outcomes of the host's ranks that have come; those that come later find the message on the board."""
        self._board.post(_DIRECT)
        for rank in self._own_ranks:
            outcome = self._outcome if rank == self._rank else self._board.read(str(rank))
            if outcome is not None:
                super().post_outcome(rank, outcome)
        self._is_settled = True

    def _has_host_posted(self, host: int) -> bool:
        return self._store.check([self._host_key(host)]) or self._store.check(self._rank_keys_of(host))

    def _read_by_host(self) -> Sequence[list[bytes]]:
        """Return the outcomes of the ranks of each host."""
        if not self._is_direct:
            return [separate_outcomes(message) for message in self._store.get(*self._host_keys)]
        return [
            separate_outcomes(self._store.get(key)[0])
            if self._store.check([key])
            else self._store.get(*self._rank_keys_of(host))
            for host, key in enumerate(self._host_keys)
        ]

    def _rank_keys_of(self, host: int) -> list[str]:
        return [self._key(rank) for rank in self._hosts.ranks_of[host]]


def _count_key(host_key: str) -> str:
    """Return the key of the number of ranks of a host that have departed."""
    return f"{host_key}/departed"
