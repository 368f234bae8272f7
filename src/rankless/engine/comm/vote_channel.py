"""The messages of one vote in the job's key-value store: the outcome of each rank, and rank 0's messages to all.

:class:`~rankless.engine.comm.vote.VoteRound` calls it, on every rank. This class serves jobs on one host, and jobs with
one rank on each host; :class:`~rankless.engine.comm.host_vote_channel.HostVoteChannel` serves the others, and falls
back to it. A rank must post :meth:`give_up` before it raises, because rank 0 looks for it before it commits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from rankless.engine.comm.job_store import DeadlineStore

#: The names of messages for all ranks: rank 0 has found all outcomes, its decision, and the type of a rank's error.
COLLECTED, DECISION, FAILED = "collected", "decision", "failed"

#: The most keys that are looked at with one call, to find those that are not set.
_BATCH = 64

#: The name of the message of a rank that has timed out.
_GIVEN_UP = "given up"


class VoteChannel:
    """The keys of one vote in the store."""

    #: Whether the store tells which ranks have departed.
    names_each_departure = True

    def __init__(self, store: DeadlineStore, vote: int | str, size: int) -> None:
        self._store, self._vote, self.size = store, vote, size

    @cached_property
    def _rank_keys(self) -> list[str]:
        """The keys of all ranks: most ranks of a large job need only their own."""
        return [self._key(rank) for rank in range(self.size)]

    @property
    def outcome_keys(self) -> list[str]:
        """The keys that are set once all ranks have posted."""
        return self._rank_keys

    @property
    def departure_keys(self) -> list[str]:
        """All keys that :meth:`depart` sets."""
        return self.outcome_keys

    @property
    def published_keys(self) -> list[str]:
        """The keys that stay after a vote until the next one."""
        return [self._key(name) for name in (DECISION, COLLECTED, FAILED, _GIVEN_UP)]

    def post_outcome(self, rank: int, outcome: bytes) -> None:
        """Post the outcome of a rank."""
        self._store.set(self._key(rank), outcome)

    def post_failure(self, kind: str) -> None:
        """Publish that a rank has failed, with the name of its error's type."""
        self._store.set(self._key(FAILED), kind.encode())

    def read_failure(self) -> str:
        """Return the name of the type of a rank's error; empty if no rank is known to have failed."""
        key = self._key(FAILED)
        return self._store.get(key)[0].decode() if self._store.check([key]) else ""

    def begin_wait(self, timeout: float) -> None:
        """Prepare to be polled for at most ``timeout`` seconds."""

    def is_complete(self) -> bool:
        """Return whether all ranks have posted. Called on rank 0."""
        return self._store.check(self.outcome_keys)

    def read_outcomes(self) -> list[bytes]:
        """Return the outcomes of all ranks in their order, which are complete. Called on rank 0."""
        return self._store.get(*self._rank_keys)

    def mark_collected(self) -> None:
        """Publish that rank 0 has found the outcomes of all ranks."""
        self._store.set(self._key(COLLECTED))

    def publish_decision(self, decision: bytes) -> None:
        """Publish the decision."""
        self._store.set(self._key(DECISION), decision)

    def is_collected(self) -> bool:
        """Return whether rank 0 has found the outcomes of all ranks, or has decided."""
        return self._store.check([self._key(COLLECTED)]) or self.is_decided()

    def is_decided(self) -> bool:
        """Return whether rank 0 has decided."""
        return self._store.check([self._key(DECISION)])

    def read_decision(self) -> bytes:
        """Return the decision, which is there."""
        return self._store.get(self._key(DECISION))[0]

    def find_absent(self) -> list[int]:
        """Return the ranks that have not posted; none if rank 0 has found all outcomes."""
        return [] if self._store.check([self._key(COLLECTED)]) else self.find_unposted()

    def find_unposted(self) -> list[int]:
        """Return the ranks that have not posted."""
        return self.find_absent_keys(self._rank_keys)

    def find_absent_keys(self, keys: Sequence[str]) -> list[int]:
        """Return the numbers of the keys that are not set, with few calls if most are."""
        absent: list[int] = []
        for first in range(0, len(keys), _BATCH):
            batch = range(first, min(first + _BATCH, len(keys)))
            if not self._store.check([keys[number] for number in batch]):
                absent += (number for number in batch if not self._store.check([keys[number]]))
        return absent

    def does_rank_0_wait(self) -> bool:
        """Return whether rank 0 has come, and waits for other ranks."""
        return self.has_posted(0) and not self._store.check([self._key(COLLECTED)])

    def has_posted(self, rank: int) -> bool:
        """Return whether a rank has posted."""
        return self._store.check([self._key(rank)])

    def give_up(self) -> None:
        """Publish that a rank has timed out: it has raised already, so nothing may be committed."""
        self._store.set(self._key(_GIVEN_UP))

    def is_given_up(self) -> bool:
        """Return whether a rank has timed out."""
        return self._store.check([self._key(_GIVEN_UP)])

    def delete_outcomes(self) -> None:
        """Delete the outcomes of this vote, and rank 0's messages of the one before, in the background.

        Every rank that posted to this vote has read the decision of the previous one.
        """
        previous = [f"{int(self._vote) - 1}/{name}" for name in (DECISION, COLLECTED, FAILED)]
        self._store.delete_keys(*self.outcome_keys, *previous)

    def depart(self, rank: int) -> None:
        """Post that a rank leaves. No rank but rank 0 waits for others."""
        self._store.set(self._key(rank))

    def close(self) -> None:
        """End the vote on this rank, which knows the decision or has timed out."""

    def _key(self, name: object) -> str:
        return f"{self._vote}/{name}"
