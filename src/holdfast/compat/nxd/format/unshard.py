"""Tensor-parallel shards, put together as a layout says."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from holdfast.compat.nxd.format.consistency import ReplicaEvidence
from holdfast.compat.nxd.format.rank_file import RankShard
from holdfast.compat.nxd.format.sharding_spec import (
    EXPERT,
    ShardingRule,
    ShardingSpec,
    ShardPiece,
    held_range,
    shard_pieces,
)
from holdfast.compat.nxd.format.slicing import (
    JoinedTensor,
    Parts,
    cut_slice,
    offset_slices,
    permute_slices,
    slice_along,
    slice_at,
)
from holdfast.errors import CorruptCheckpointError, InvalidArgumentError
from holdfast.formats.stored_tensor import StoredTensor
from holdfast.ondisk.files import TensorInfo

#: The most experts of a layer: what a shape says of them is looked at one by one.
_EXPERTS = 2**16

#: What ranks of a tensor-parallel group have of one tensor, by their expert-parallel rank.
Shards = Sequence[Sequence[StoredTensor]]


@dataclass
class Unsharder:
    """Makes whole tensors; the same of the same shards."""

    spec: ShardingSpec
    evidence: ReplicaEvidence
    _made: dict[Hashable, dict[str, StoredTensor]] = field(default_factory=dict)

    def whole(self, name: str, shards: Shards, what: str) -> dict[str, StoredTensor]:
        """The tensors that a parameter of NxD, or a state of its shape, is part of, by the names of parameters.

        ``what`` it is goes into messages. Raises ``CorruptCheckpointError`` where shards do not fit together,
        ``InvalidArgumentError`` where the layout does not fit them.
        """
        rule = self.spec.rule(name)
        key = (rule, tuple(shard.identity for row in shards for shard in row))
        if key not in self._made:
            row = self._experts(rule, shards, what)
            self._check_alike(row, what)
            self._made[key] = self._joined(rule, name, row, what)
        return self._made[key]

    def _experts(self, rule: ShardingRule, shards: Shards, what: str) -> Sequence[StoredTensor]:
        """For each tensor-parallel rank, what its expert-parallel ranks have beside each other."""
        first = shards[0]
        is_expert = rule.experts or (isinstance(first[0], RankShard) and first[0].expert)
        if len(shards) == 1:
            return first
        if not is_expert:
            for row in shards[1:]:
                self.evidence.replicas += [
                    (what, pair) for pair in zip(first, row, strict=True) if pair[0] is not pair[1]
                ]
            return first
        columns = list(zip(*shards, strict=True))
        for column in columns:
            self._check_alike(column, what)
        return [_beside(column) for column in columns]

    def _check_alike(self, row: Sequence[StoredTensor], what: str) -> None:
        for other in row[1:]:
            if other.info != row[0].info:
                one, two = ([stored.info.dtype, list(stored.info.shape)] for stored in (row[0], other))
                file = other.file if isinstance(other, RankShard) else "a file of another rank"
                raise CorruptCheckpointError(
                    f"{what} is {two} in {file}, and {one} on the first rank: they are of two saves"
                )

    def _joined(self, rule: ShardingRule, name: str, row: Sequence[StoredTensor], what: str) -> dict[str, StoredTensor]:
        if rule.dim is None or not row[0].info.shape:
            if len(row) > 1:
                self.evidence.replicas.append((what, row))
            return self._shaped(rule, {piece.name: row[0] for piece in shard_pieces(rule, name)})
        return self._shaped(rule, self._divided(rule, name, row, what))

    def _divided(
        self, rule: ShardingRule, name: str, row: Sequence[StoredTensor], what: str
    ) -> dict[str, StoredTensor]:
        dim, info, every = rule.dim or 0, row[0].info, shard_pieces(rule, name)
        common = math.gcd(*(piece.share for piece in every))
        shares = sum(piece.share for piece in every) // common
        if dim >= len(info.shape) or info.shape[dim] % shares:
            raise InvalidArgumentError(
                f"{what} has shape {list(info.shape)}, of which the layout divides dimension {dim} into {shares} parts"
            )
        found: dict[str, tuple[int, Parts]] = {}
        start = 0
        for piece in every:
            size = piece.share // common * (info.shape[dim] // shares)
            before, parts = found.get(piece.name, (0, ()))
            count, more = self._piece(piece, row, (dim, start, size), what)
            found[piece.name] = before + count * size, parts + offset_slices(more, slice_at(info.shape, dim, before))
            start += size
        return {
            key: JoinedTensor(TensorInfo(info.dtype, slice_along(info.shape, dim, 0, size).shape), parts)
            for key, (size, parts) in found.items()
        }

    def _piece(
        self, piece: ShardPiece, row: Sequence[StoredTensor], place: tuple[int, int, int], what: str
    ) -> tuple[int, Parts]:
        """How many blocks of a piece there are, and these beside each other. Further copies are evidence."""
        dim, start, size = place
        shape = row[0].info.shape
        known: dict[int, Parts] = {}
        parts: Parts = ()
        count = 1
        for rank, stored in enumerate(row):
            count, block = held_range(piece, len(row), rank)
            own = cut_slice(slices_of(stored), slice_along(shape, dim, start, start + size))
            if block in known:
                info = TensorInfo(stored.info.dtype, slice_along(shape, dim, 0, size).shape)
                self.evidence.replicas.append((what, (JoinedTensor(info, known[block]), JoinedTensor(info, own))))
                continue
            known[block] = own
            parts += offset_slices(own, slice_at(shape, dim, block * size))
        return count, parts

    def _shaped(self, rule: ShardingRule, found: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Experts by themselves, and rows for columns."""
        if not rule.transposed and not any(EXPERT in name for name in found):
            return found
        return {name: stored for key, whole in found.items() for name, stored in _single(rule, key, whole)}


def _single(rule: ShardingRule, name: str, whole: StoredTensor) -> list[tuple[str, StoredTensor]]:
    shape = whole.info.shape
    order = list(range(len(shape)))
    if rule.transposed and len(shape) > 1:
        order[-2:] = order[:-3:-1]
    if EXPERT not in name:
        return [(name, _turned(whole, slices_of(whole), shape, order))]
    if shape[0] > _EXPERTS:
        raise CorruptCheckpointError(f"{name!r} is of {shape[0]} experts, more than any model has")
    rows = [slice_along(shape, 0, number, number + 1) for number in range(shape[0])]
    return [
        (name.replace(EXPERT, str(number)), _turned(whole, cut_slice(slices_of(whole), box), shape, order[1:]))
        for number, box in enumerate(rows)
    ]


def _turned(whole: StoredTensor, parts: Parts, shape: Sequence[int], order: Sequence[int]) -> StoredTensor:
    return JoinedTensor(
        TensorInfo(whole.info.dtype, tuple(shape[index] for index in order)), permute_slices(parts, order)
    )


def slices_of(stored: StoredTensor) -> Parts:
    """The boxes that a tensor lies in."""
    if isinstance(stored, RankShard):
        return stored.parts()
    if isinstance(stored, JoinedTensor):
        return stored.parts
    raise CorruptCheckpointError("a tensor is neither in one file nor in several")


def _beside(column: Sequence[StoredTensor]) -> StoredTensor:
    """Experts of one rank after those of another."""
    info = column[0].info
    number = info.shape[0]
    parts: Parts = ()
    for rank, stored in enumerate(column):
        parts += offset_slices(slices_of(stored), slice_at(info.shape, 0, rank * number))
    return JoinedTensor(TensorInfo(info.dtype, (number * len(column), *info.shape[1:])), parts)
