"""Comparison of tensors of the source that are one tensor of a rank that receives: weights that are tied only there.

:class:`~rankless.live_copy.copy_operation.CopyOperation` calls it on every rank, before anything is changed. A wrong
answer would drop one of two tensors that differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rankless.engine.comm.session import Session
from rankless.engine.integrity.replica_comparison import crc_of_shard
from rankless.engine.io.device_streams import begin_copies
from rankless.live_copy.copy_negotiation import SourceState
from rankless.state.restore_context import Merged

#: The CRC of each shard of a tensor that a rank has: group, name, coordinate of the shard, CRC.
_ShardCrcs = list[tuple[str, str, tuple[int, ...], int]]

_encode = msgspec.msgpack.Encoder().encode


def select_incomparable(pairs: Sequence[Merged], source: SourceState) -> list[Merged]:
    """Return the pairs with tensors that the source has in shards that are not alike."""
    return [
        (kept, dropped) for kept, dropped in pairs if source.tensors[kept].division != source.tensors[dropped].division
    ]


def select_unequal(pairs: Sequence[Merged], source: SourceState, session: Session) -> list[Merged]:
    """Return the pairs with different tensors. Every rank calls it: the sources compute CRCs, and rank 0 compares them.

    Called by :class:`rankless.live_copy.copy_operation.CopyOperation` before anything is changed.
    """

    def decide(posted: list[bytes]) -> bytes:
        crcs: dict[tuple[str, str], dict[tuple[int, ...], set[int]]] = {}
        for raw in posted:
            for group, name, coordinate, crc in msgspec.msgpack.decode(raw, type=_ShardCrcs):
                crcs.setdefault((group, name), {}).setdefault(coordinate, set()).add(crc)
        return _encode([pair for pair in pairs if not _are_equal(pair, source, crcs)])

    _, raw = session.vote(
        "comparing tensors that are tied only where they are copied to",
        lambda: _hash_shards(pairs, source, session.rank),
        _encode,
        decide,
    )
    return msgspec.msgpack.decode(raw, type=list[Merged])


def _hash_shards(pairs: Sequence[Merged], source: SourceState, rank: int) -> _ShardCrcs:
    shards = source.captured.tensors
    begin_copies(shards.values())
    keys = sorted({key for pair in pairs for key in pair} & shards.keys())
    coordinates = {key: source.tensors[key].coordinate_of(rank) for key in keys}
    return [
        (*key, coordinate, crc_of_shard(shards[key], 0, shards[key].nbytes))
        for key, coordinate in coordinates.items()
        if coordinate is not None
    ]


def _are_equal(pair: Merged, source: SourceState, crcs: dict[tuple[str, str], dict[tuple[int, ...], set[int]]]) -> bool:
    """Return whether both tensors have the same form and, in each shard on all ranks that have it, the same CRC."""
    infos = [source.tensors[key].info for key in pair]
    first, second = (crcs.get(key, {}) for key in pair)
    return (
        infos[0] == infos[1]
        and first.keys() == second.keys()
        and all(len(first[coordinate] | second[coordinate]) == 1 for coordinate in first)
    )
