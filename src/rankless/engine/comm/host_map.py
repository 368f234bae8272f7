"""The host of each rank, and the message of a host with the outcomes of its ranks. Nothing is sent here.

:mod:`rankless.engine.comm.host_vote_channel` uses it in every vote of several hosts, and
:mod:`rankless.engine.comm.vote` in the first vote of a process group, where rank 0 publishes the hosts. Keys in the
store contain the numbers of hosts: all ranks must derive the same numbers from the same decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain, groupby

import msgspec

from rankless.engine.comm.spec_directory import deduplicate

#: Hosts of consecutive ranks: the number of a host, and the number of ranks on it.
HostRuns = list[tuple[int, int]]


class HostMap(msgspec.Struct, frozen=True, dict=True):
    """The hosts of a job. ``host_of`` has the number of each rank's host, counted in the order of their first ranks.

    For example, ``host_of`` is ``(0, 0, 1, 1)`` if ranks 0 and 1 are on one host, and ranks 2 and 3 on another one.
    """

    host_of: tuple[int, ...]

    @classmethod
    def from_ids(cls, ids: Sequence[bytes]) -> HostMap:
        """Build the map from the ids of all ranks' hosts."""
        return cls(tuple(deduplicate(ids)[0]))

    @classmethod
    def from_runs(cls, runs: HostRuns) -> HostMap:
        """Build the map from runs."""
        return cls(tuple(chain.from_iterable([host] * count for host, count in runs)))

    @cached_property
    def runs(self) -> HostRuns:
        """The hosts of consecutive ranks: for example, ``[(0, 2), (1, 2)]`` for ``host_of`` ``(0, 0, 1, 1)``."""
        return [(host, len(list(group))) for host, group in groupby(self.host_of)]

    @cached_property
    def ranks_of(self) -> list[list[int]]:
        """The ranks of each host, ascending."""
        ranks: list[list[int]] = [[] for _ in set(self.host_of)]
        for rank, host in enumerate(self.host_of):
            ranks[host].append(rank)
        return ranks

    @property
    def can_combine(self) -> bool:
        """True if there are several hosts, and one of them has several ranks."""
        return 1 < len(self.ranks_of) < len(self.host_of)


class _HostMessage(msgspec.Struct, frozen=True, array_like=True):
    """The distinct outcomes of a host's ranks, and the index of each rank's."""

    distinct: list[bytes]
    index_of: list[int]


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(_HostMessage).decode


def combine_outcomes(outcomes: Sequence[bytes]) -> bytes:
    """Return one message with the outcomes of a host's ranks; equal ones are in it once."""
    index_of, owners = deduplicate(outcomes)
    return _pack(_HostMessage([outcomes[owner] for owner in owners], index_of))


def separate_outcomes(message: bytes) -> list[bytes]:
    """Return the outcomes in a host's message."""
    received = _unpack(message)
    return [received.distinct[index] for index in received.index_of]


class HostAgreement:
    """The hosts of a process group, once the ranks have agreed on them; its ranks learn them with a decision.

    One for each process group, in its :class:`~rankless.engine.comm.rendezvous.Rendezvous`. Rank 0 calls :meth:`answer`
    when it decides a vote, the others :meth:`learn` when they have read the decision.
    """

    def __init__(self) -> None:
        self.hosts: HostMap | None = None

    def learn(self, runs: HostRuns | None) -> None:
        """Take the hosts from a decision, if it has them."""
        if runs is not None and self.hosts is None:
            self.hosts = HostMap.from_runs(runs)

    def answer(self, ids: Iterable[bytes]) -> HostRuns | None:
        """Return the hosts for rank 0's decision, if a rank needs them.

        ``ids`` has the id of each rank's host. An id is empty if its rank knows all hosts.
        """
        posted = list(ids)
        if self.hosts is None and all(posted):
            self.hosts = HostMap.from_ids(posted)
        return self.hosts.runs if self.hosts is not None and any(posted) else None
