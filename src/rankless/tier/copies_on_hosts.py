"""Copies of parts on other hosts: which host gets which part, and how a save makes them.

:mod:`rankless.save.tier_stage` calls it on every rank when a generation is complete, in the background thread of an
asynchronous save. Partners and transfers must follow from the arguments alone: each rank plans both ends for itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rankless.engine.comm.session import RankGroup, Session
from rankless.engine.comm.spec_directory import deduplicate
from rankless.engine.io.p2p import P2PExchange
from rankless.errors import CorruptCheckpointError
from rankless.storage.aligned_memory import Bytes
from rankless.tier.job import TierJob
from rankless.tier.part import PartTable, find_corrupt_range
from rankless.tier.part_transfers import MESSAGE_BYTES, Transfer, TransferEnds, run_transfers
from rankless.tier.slots import Slot

_PHASE = "copying to other hosts"


def choose_partners(hosts: Sequence[str], domains: Sequence[str], copies: int) -> list[list[int]]:
    """Return, for each rank, the ranks that get copies of its part: each on another host, in other domains if possible.

    Each rank gets about as many copies as it makes. The partners of a host are the next hosts in the order of the
    first ranks that are not in its domain; if there are too few of these, the next ones in its domain.
    """
    host_of, first_ranks = deduplicate([host.encode() for host in hosts])
    ranks_of: list[list[int]] = [[] for _ in first_ranks]
    for rank, host in enumerate(host_of):
        ranks_of[host].append(rank)
    partners = []
    for rank, host in enumerate(host_of):
        others = [(host + step) % len(ranks_of) for step in range(1, len(ranks_of))]
        own = domains[rank]
        apart = [other for other in others if not own or domains[ranks_of[other][0]] != own]
        chosen = [*apart, *(other for other in others if other not in apart)][:copies]
        index = ranks_of[host].index(rank)
        partners.append([ranks_of[other][index % len(ranks_of[other])] for other in chosen])
    return partners


class PartCopies:
    """The copies of the parts of one generation: those that this rank makes, and those that it gets."""

    def __init__(
        self, ranks: RankGroup, session: Session, tier: TierJob, partners: Sequence[Sequence[int]], rate: float | None
    ) -> None:
        """``partners``: from :func:`choose_partners`; ``rate``: the most bytes a second that a rank sends."""
        self._ranks, self._session, self._tier, self._partners = ranks, session, tier, partners
        self._rate = rate
        self._tables: Sequence[PartTable] = ()
        #: The slots with copies, by the rank that staged the part.
        self._slots: dict[int, Slot] = {}

    def make(self, slot: Slot, table: PartTable) -> list[Slot]:
        """Copy the part in a slot to the partners. Return the pinned slots with the copies that this rank got.

        Memory for the copies is reserved first. Raises the same error on all ranks if a host lacks it, or if a
        connection breaks.
        """
        if not any(self._partners):
            return []
        try:
            self._tables = exchange_tables(self._session, table)
            self._session.run_on_all(_PHASE, self._reserve_memory)
            with P2PExchange(self._ranks.gloo_group(self._session.timeout), self._session) as p2p:
                self._session.run_on_all(_PHASE, lambda: self._exchange_bytes(p2p, slot.memory))
        except BaseException:
            for copy in self._slots.values():
                self._tier.slots.unpin(copy)
            raise
        return list(self._slots.values())

    def _reserve_memory(self) -> None:
        for source, receivers in enumerate(self._partners):
            if self._session.rank in receivers:
                self._slots[source] = self._tier.take_slot(self._tables[source].nbytes)

    def _exchange_bytes(self, p2p: P2PExchange, memory: Bytes) -> None:
        transfers = plan_copies(self._partners, [table.nbytes for table in self._tables])

        def sink_of(transfer: Transfer) -> Bytes:
            return self._slots[transfer.part].memory[transfer.start : transfer.stop]

        run_transfers(transfers, p2p, TransferEnds(lambda _: memory, sink_of, rate=self._rate))
        for source, copy in self._slots.items():
            table = self._tables[source]._replace(data=copy.path.name)
            if corrupt := find_corrupt_range(table, copy.memory):
                raise CorruptCheckpointError(
                    f"the copy of the part of rank {source} differs from it, in tensor number {corrupt.tensor}"
                )
            self._tier.folder.write_part(table)
            copy.table = table.name.name


def exchange_tables(session: Session, table: PartTable) -> list[PartTable]:
    """Return the tables of the parts of all ranks."""
    _, raw = session.vote(_PHASE, table.encode, bytes, msgspec.msgpack.encode)
    tables = msgspec.msgpack.decode(raw, type=list[bytes])
    return [PartTable.decode(one, "a table of the local tier") for one in tables]


def plan_copies(partners: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[Transfer]:
    """Return the transfers of all copies, so that all ranks send at the same time.

    ``sizes`` are the sizes of the parts in bytes.
    """
    transfers = [
        (number, Transfer(sender, start, min(size, start + MESSAGE_BYTES), sender, receiver))
        for sender, (receivers, size) in enumerate(zip(partners, sizes, strict=True))
        for receiver in receivers
        for number, start in enumerate(range(0, size, MESSAGE_BYTES))
    ]
    return [transfer for _, transfer in sorted(transfers, key=lambda turn: turn[0])]
