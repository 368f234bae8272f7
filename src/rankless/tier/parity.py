"""Parity over groups of hosts: a lost part is computed from the parts of the other hosts.

Copies double the memory. Parity over ``k`` hosts takes ``1 / (k - 1)`` more, and survives the loss of one.

A group has one rank of each of its hosts: its *members*, numbered from 0. Each part is cut into ``k - 1`` chunks of
equal size, and zeros fill the last one. Chunk ``c`` of member ``i`` counts for member ``(i + 1 + c) mod k``, which
keeps the exclusive or of one chunk of each other member: its *parity*. So each member sends as much as for a copy.

A lost chunk is the exclusive or of two: of the parity that it counts for, and of the other chunks in that parity.
This is the scheme of SCR's ``XOR`` (https://scr.readthedocs.io).

:mod:`rankless.save.tier_stage` makes parity on every rank when a generation is complete, in the background thread of an
asynchronous save; :mod:`rankless.tier.rebuild` computes lost parts by the same rules,
and each rank of a load checks a share of them (:mod:`rankless.load.part_assembler`). The rule for chunks and members
must stay: parities on disks depend on it. For example, with ``k = 3`` chunk 0 of member 0 counts for member 1, and its
chunk 1 for member 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rankless.engine.comm.session import RankGroup, Session
from rankless.engine.comm.spec_directory import deduplicate
from rankless.engine.io.p2p import P2PExchange
from rankless.errors import CorruptCheckpointError
from rankless.ondisk.block_crcs import crc64
from rankless.storage.aligned_memory import Bytes
from rankless.tier.copies_on_hosts import exchange_tables
from rankless.tier.job import TierJob
from rankless.tier.part import ParityTable, PartTable
from rankless.tier.part_transfers import MESSAGE_BYTES, Transfer, TransferEnds, run_transfers
from rankless.tier.slots import Slot

_PHASE = "computing parity"

#: The fewest hosts of a group.
_FEWEST = 2


@dataclass(frozen=True)
class ChunkLayout:
    """The chunks of the parts of a group of ``size`` members, with ``chunk`` bytes each."""

    size: int
    chunk: int

    @classmethod
    def of(cls, sizes: Sequence[int]) -> ChunkLayout:
        """Return the layout for parts of these sizes in bytes.

        For example, parts of 10, 20 and 15 bytes have two chunks of 10 bytes each.
        """
        return cls(len(sizes), -(-max(sizes) // (len(sizes) - 1)))

    def keeper(self, member: int, number: int) -> int:
        """Return the member that keeps the parity of a chunk of another member.

        For example, in a group of 3, chunk 0 of member 2 counts for member 0.
        """
        return (member + 1 + number) % self.size

    def chunk_for(self, member: int, keeper: int) -> int:
        """Return the number of the chunk of a member that counts for the parity of another."""
        return (keeper - member - 1) % self.size

    def span(self, number: int, nbytes: int) -> tuple[int, int]:
        """Return the bytes of a chunk in a part of ``nbytes`` bytes, without the zeros that follow."""
        return min(nbytes, number * self.chunk), min(nbytes, (number + 1) * self.chunk)


def form_groups(hosts: Sequence[str], parity: int) -> list[list[int]]:
    """Return groups of ranks of ``parity`` hosts each, one of each host; the last hosts join the group before them.

    Ranks of a host that has more of them than another host of its group are in no group. For example, with
    ``parity=2``, ranks 0 and 1 on one host and 2 and 3 on another are the groups ``[0, 2]`` and ``[1, 3]``.
    """
    host_of, first_ranks = deduplicate([host.encode() for host in hosts])
    ranks_of: list[list[int]] = [[] for _ in first_ranks]
    for rank, host in enumerate(host_of):
        ranks_of[host].append(rank)
    count = max(1, len(ranks_of) // parity)
    starts = [number * parity for number in range(count)]
    bounds = zip(starts, [*starts[1:], len(ranks_of)], strict=True)
    groups = [ranks_of[start:stop] for start, stop in bounds]
    return [list(members) for group in groups if len(group) >= _FEWEST for members in zip(*group, strict=False)]


class PartParity:
    """The parity of one generation that this rank keeps."""

    def __init__(
        self, ranks: RankGroup, session: Session, tier: TierJob, groups: Sequence[Sequence[int]], rate: float | None
    ) -> None:
        """Describe it. ``groups``: see :func:`form_groups`; ``rate``: the most bytes a second that a rank sends."""
        self._rate = rate
        self._ranks, self._session, self._tier, self._groups = ranks, session, tier, groups
        self._own: Sequence[int] = next((group for group in groups if session.rank in group), ())
        self._tables: Sequence[PartTable] = ()

    def make(self, slot: Slot, table: PartTable) -> list[Slot]:
        """Compute the parity, with the part that is in a slot. Return the pinned slot that holds it, if there is one.

        Raises the same error on all ranks if a host lacks memory, or if a connection breaks.
        """
        if not self._groups:
            return []
        parity: list[Slot] = []
        try:
            self._tables = exchange_tables(self._session, table)
            self._session.run_on_all(_PHASE, lambda: self._reserve_memory(parity))
            with P2PExchange(self._ranks.gloo_group(self._session.timeout), self._session) as p2p:
                self._session.run_on_all(_PHASE, lambda: self._compute(p2p, slot.memory, parity))
        except BaseException:
            for one in parity:
                self._tier.slots.unpin(one)
            raise
        return parity

    def _layout(self, group: Sequence[int]) -> ChunkLayout:
        return ChunkLayout.of([self._tables[rank].nbytes for rank in group])

    def _reserve_memory(self, parity: list[Slot]) -> None:
        if self._own:
            chunk = self._layout(self._own).chunk
            parity.append(self._tier.take_slot(chunk))
            parity[0].memory[:chunk] = 0

    def _compute(self, p2p: P2PExchange, memory: Bytes, parity: Sequence[Slot]) -> None:
        def add(transfer: Transfer, data: Bytes) -> None:
            start = transfer.start % self._layout(self._own).chunk
            add_to(parity[0].memory, start, data)

        transfers = [transfer for group in self._groups for transfer in self._plan(group)]
        transfers.sort(key=lambda transfer: transfer.start % self._layout(self._group_of(transfer.part)).chunk)
        run_transfers(transfers, p2p, TransferEnds(lambda _: memory, on_received=add, rate=self._rate))
        if self._own:
            self._write_table(parity[0])

    def _group_of(self, rank: int) -> Sequence[int]:
        return next(group for group in self._groups if rank in group)

    def _plan(self, group: Sequence[int]) -> Iterator[Transfer]:
        layout = self._layout(group)
        for member, rank in enumerate(group):
            for number in range(layout.size - 1):
                start, stop = layout.span(number, self._tables[rank].nbytes)
                receiver = group[layout.keeper(member, number)]
                yield from cut_messages(rank, start, stop, rank, receiver)

    def _write_table(self, parity: Slot) -> None:
        chunk = self._layout(self._own).chunk
        table = ParityTable(
            self._own.index(self._session.rank),
            [self._tables[rank].encode() for rank in self._own],
            chunk,
            parity.path.name,
            crc64(parity.memory[:chunk]),
        )
        name = self._tables[self._session.rank].name
        self._tier.folder.write_parity(name, table)
        parity.table = name.parity_name


def cut_messages(part: int, start: int, stop: int, sender: int, receiver: int) -> Iterator[Transfer]:
    """Yield the transfers of bytes ``[start, stop)`` of a part, in messages."""
    for first in range(start, stop, MESSAGE_BYTES):
        yield Transfer(part, first, min(stop, first + MESSAGE_BYTES), sender, receiver)


def add_to(memory: Bytes, start: int, data: Bytes) -> None:
    """Replace bytes by their exclusive or with others."""
    target = memory[start : start + len(data)]
    np.bitwise_xor(target, data, out=target)


def check_parity(table: ParityTable, memory: Bytes, file: str) -> None:
    """Raise ``CorruptCheckpointError`` if the bytes of a parity differ from the computed ones."""
    if crc64(memory[: table.chunk]) != table.crc:
        raise CorruptCheckpointError(f"{file}, a parity, is corrupt")
