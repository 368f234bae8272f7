"""Copies of parts on other hosts: which host gets which part, and how a save makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from holdfast.engine.comm.session import RankGroup, Session
from holdfast.engine.comm.spec_exchange import deduplicate
from holdfast.engine.io.p2p import P2PExchange
from holdfast.errors import CorruptCheckpointError, StorageError
from holdfast.tier.part import PartTable, find_corrupt_range
from holdfast.tier.slots import Slot
from holdfast.tier.state import TierState
from holdfast.tier.transfers import MESSAGE_BYTES, Transfer, run_transfers

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


def copy_to_partners(
    ranks: RankGroup, session: Session, tier: TierState, slot: Slot, hosts: Sequence[str], domains: Sequence[str]
) -> list[Slot]:
    """Copy the part of each rank to its partners. Return the pinned slots with copies that this rank got.

    Memory for the copies is reserved first. Raises the same error on all ranks if a host lacks it, or if a connection
    breaks.
    """
    partners = choose_partners(hosts, domains, tier.options.copies)
    if not any(partners):
        return []
    part = slot.part
    table = tier.folder.read_part(part) if part is not None else None

    def encode_table() -> bytes:
        if table is None:
            raise StorageError(None, "the part was removed from the local tier meanwhile")
        return table.encode()

    _, raw = session.vote(_PHASE, encode_table, bytes, lambda posted: msgspec.msgpack.encode(posted))
    tables = [
        PartTable.decode(one, "a table of the local tier") for one in msgspec.msgpack.decode(raw, type=list[bytes])
    ]
    sources = [sender for sender, receivers in enumerate(partners) if session.rank in receivers]
    copies: dict[int, Slot] = {}
    try:
        session.run_on_all(
            _PHASE, lambda: _take_slots(tier, {source: tables[source].nbytes for source in sources}, copies)
        )
        transfers = list(_plan_copies(partners, [one.nbytes for one in tables]))
        with P2PExchange(ranks.gloo_group(session.timeout), session) as p2p:
            session.run_on_all(
                _PHASE,
                lambda: _receive_copies(tier, transfers, p2p, slot, copies, tables),
            )
    except BaseException:
        for copy in copies.values():
            tier.slots.unpin(copy)
        raise
    return list(copies.values())


def _take_slots(tier: TierState, sizes: Mapping[int, int], copies: dict[int, Slot]) -> None:
    """Reserve memory for the copies of parts, by the rank that staged them."""
    for source, nbytes in sizes.items():
        copies[source] = tier.slots.take(nbytes)


def _plan_copies(partners: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[Transfer]:
    """Return the transfers of all copies, so that all ranks send at the same time."""
    transfers = [
        (number, Transfer(sender, start, min(size, start + MESSAGE_BYTES), sender, receiver))
        for sender, (receivers, size) in enumerate(zip(partners, sizes, strict=True))
        for receiver in receivers
        for number, start in enumerate(range(0, size, MESSAGE_BYTES))
    ]
    return [transfer for _, transfer in sorted(transfers, key=lambda turn: turn[0])]


def _receive_copies(
    tier: TierState,
    transfers: Sequence[Transfer],
    p2p: P2PExchange,
    slot: Slot,
    copies: dict[int, Slot],
    tables: Sequence[PartTable],
) -> None:
    run_transfers(
        transfers,
        p2p,
        lambda _: slot.memory,
        lambda part: copies[part].memory,
        tier.options.copy_rate,
    )
    for source, copy in copies.items():
        table = tables[source]._replace(data=copy.path.name)
        if corrupt := find_corrupt_range(table, copy.memory):
            raise CorruptCheckpointError(
                f"the copy of the part of rank {source} differs from it, in tensor number {corrupt.tensor}"
            )
        tier.folder.write_part(table)
        copy.part = table.name
