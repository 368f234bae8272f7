"""The computation of lost parts from the parts and parities of their groups. It puts them back into the tier.

:mod:`rankless.load.part_assembler` calls :func:`rebuild_parts` on every rank, with rank 0's plan, before a load reads
or a drain writes. A computed part counts only if its bytes match the CRCs in its table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import msgspec

from rankless.engine.comm.session import RankGroup, Session
from rankless.engine.io.p2p import P2PExchange
from rankless.errors import CorruptCheckpointError
from rankless.storage.aligned_memory import Bytes
from rankless.storage.mapped_file import map_to_read
from rankless.tier.generation_catalog import find_rebuilding
from rankless.tier.job import TierJob
from rankless.tier.parity import ChunkLayout, add_to, cut_messages
from rankless.tier.part import ParityTable, decode_checked, find_corrupt_range
from rankless.tier.part_names import GenerationKey, PartName
from rankless.tier.part_transfers import SourceOf, Transfer, TransferEnds, run_transfers
from rankless.tier.slots import Slot


class Rebuilding(msgspec.Struct, frozen=True, array_like=True):
    """The decision that rank ``receiver`` computes a lost part.

    ``parities`` has the rank that keeps each parity, its table, and the rank that sends it; ``senders`` has the rank
    that sends each part.
    """

    lost: int
    receiver: int
    parities: list[tuple[int, bytes, int]]
    senders: dict[int, int]


def plan_rebuildings(
    lost: Sequence[int], senders: Mapping[int, int], parities: Mapping[int, tuple[bytes, int]]
) -> list[Rebuilding]:
    """Return how the lost parts are computed that can be.

    ``senders`` has a rank that holds each part. ``parities`` has, by the rank that keeps each, its encoded table and a
    rank that holds it.
    """
    groups = {
        keeper: [member.name.rank for member in _decode_parity(raw).members] for keeper, (raw, _) in parities.items()
    }
    rebuildings = []
    for part in lost:
        others = [member for member in find_rebuilding(part, senders, groups) if member != part]
        if others:
            of_group = [(member, *parities[member]) for member in others]
            receiver = parities[others[0]][1]
            rebuildings.append(Rebuilding(part, receiver, of_group, {member: senders[member] for member in others}))
    return rebuildings


def _decode_parity(raw: bytes) -> ParityTable:
    table: ParityTable = decode_checked(raw, ParityTable, "a parity of the local tier")
    return table


def rebuild_parts(
    ranks: RankGroup, session: Session, tier: TierJob, key: GenerationKey, rebuildings: Sequence[Rebuilding]
) -> None:
    """Compute lost parts of a generation, and put them into the tier of the hosts of their receivers.

    Raises the same error on all ranks if a host lacks memory, or if a connection breaks.
    """
    parts = [_LostPart(one) for one in rebuildings]
    own = {part: tier.slots for part in parts if part.receiver == session.rank}
    targets: dict[int, Slot] = {}

    def reserve_memory() -> None:
        for part, slots in own.items():
            targets[part.lost] = slots.take(part.table.nbytes)
            targets[part.lost].memory[:] = 0

    def exchange_bytes(p2p: P2PExchange) -> None:
        source_of = cache(_SourceFiles(tier, key, parts[0].table.name.size).map)
        for part in parts:
            _compute_part(part, p2p, source_of, targets.get(part.lost))
        for part in own:
            table = part.table._replace(data=targets[part.lost].path.name)
            tier.folder.write_part(table)
            targets[part.lost].table = table.name.name

    try:
        session.run_on_all("reserving memory for parts from parity", reserve_memory)
        with P2PExchange(ranks.gloo_group(session.timeout), session) as p2p:
            session.run_on_all("computing parts from parity", lambda: exchange_bytes(p2p))
        tier.slots.keep(list(targets.values()))
    finally:
        for slot in targets.values():
            tier.slots.unpin(slot)


def _compute_part(part: _LostPart, p2p: P2PExchange, source_of: SourceOf, target: Slot | None) -> None:
    moves = dict(part.plan())

    def add(transfer: Transfer, data: Bytes) -> None:
        if target is not None:
            add_to(target.memory, moves[transfer], data)

    run_transfers(list(moves), p2p, TransferEnds(source_of, on_received=add))
    corrupt = None if target is None else find_corrupt_range(part.table, target.memory)
    if corrupt is not None:
        raise CorruptCheckpointError(
            f"the part of rank {part.lost} computed from parity is wrong: tensor number {corrupt.tensor} differs"
        )


class _SourceFiles:
    """The parts and parities of a generation on this host."""

    def __init__(self, tier: TierJob, key: GenerationKey, size: int) -> None:
        self._folder, self._key, self._size = tier.folder, key, size

    def map(self, number: int) -> Bytes:
        """Map a part by its rank, or a parity by its :func:`_parity_number`."""
        if number >= 0:
            table = self._folder.read_part(PartName(self._key, number, self._size))
            return map_to_read(self._folder.path / table.data, table.nbytes)
        parity = self._folder.read_parity(PartName(self._key, _parity_number(number), self._size))
        return map_to_read(self._folder.path / parity.data, parity.chunk)


class _LostPart:
    """A lost part, and the bytes of its group that it is computed from."""

    def __init__(self, rebuilding: Rebuilding) -> None:
        self.lost, self.receiver, self._senders = rebuilding.lost, rebuilding.receiver, rebuilding.senders
        self._parity_senders = {rank: sender for rank, _, sender in rebuilding.parities}
        self._tables = _decode_parity(rebuilding.parities[0][1]).members
        self._ranks = [table.name.rank for table in self._tables]
        self._member = self._ranks.index(self.lost)
        self.table = self._tables[self._member]
        self._layout = ChunkLayout.of([table.nbytes for table in self._tables])

    def plan(self) -> Iterator[tuple[Transfer, int]]:
        """Yield the transfers to the receiver, with the offset in the part that each counts for.

        Of a parity, the part of the transfer is its :func:`_parity_number`.
        """
        for number in range(self._layout.size - 1):
            keeper = self._layout.keeper(self._member, number)
            first, stop = self._layout.span(number, self.table.nbytes)
            rank = self._ranks[keeper]
            sender = self._parity_senders[rank]
            for transfer in cut_messages(_parity_number(rank), 0, stop - first, sender, self.receiver):
                yield transfer, first + transfer.start
            for member, other in enumerate(self._ranks):
                if member in {self._member, keeper}:
                    continue
                start, end = self._layout.span(self._layout.chunk_for(member, keeper), self._tables[member].nbytes)
                end = min(end, start + stop - first)
                for transfer in cut_messages(other, start, end, self._senders[other], self.receiver):
                    yield transfer, first + transfer.start - start


def _parity_number(rank: int) -> int:
    """Return the number that stands for the parity of a rank in transfers; and the rank for that number."""
    return -1 - rank
