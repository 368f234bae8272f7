"""Tensor-parallel shards, put together as a layout says."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from holdfast.errors import DamagedError, InvalidArgumentError
from holdfast.formats.arrange.stored import Stored
from holdfast.formats.nxd.evidence import Evidence
from holdfast.formats.nxd.layout import EXPERT, Piece, Rule, Spec, held, pieces
from holdfast.formats.nxd.parts import Joined, Parts, along, at, cut, moved, turned
from holdfast.formats.nxd.rankfile import Shard
from holdfast.layout.files import TensorInfo

#: The most experts of a layer: what a shape says of them is looked at one by one.
_EXPERTS = 2**16

#: What ranks of a tensor-parallel group have of one tensor, by their expert-parallel rank.
Shards = Sequence[Sequence[Stored]]


@dataclass
class Assembly:
    """Makes whole tensors; the same of the same shards."""

    spec: Spec
    evidence: Evidence
    _made: dict[Hashable, dict[str, Stored]] = field(default_factory=dict)

    def whole(self, name: str, shards: Shards, what: str) -> dict[str, Stored]:
        """The tensors that a parameter of NxD, or a state of its shape, is part of, by the names of parameters.

        ``what`` it is goes into messages. Raises ``DamagedError`` where shards do not fit together,
        ``InvalidArgumentError`` where the layout does not fit them.
        """
        rule = self.spec.rule(name)
        key = (rule, tuple(shard.identity for row in shards for shard in row))
        if key not in self._made:
            row = self._experts(rule, shards, what)
            self._check_alike(row, what)
            self._made[key] = self._joined(rule, name, row, what)
        return self._made[key]

    def _experts(self, rule: Rule, shards: Shards, what: str) -> Sequence[Stored]:
        """For each tensor-parallel rank, what its expert-parallel ranks have beside each other."""
        first = shards[0]
        is_expert = rule.experts or (isinstance(first[0], Shard) and first[0].expert)
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

    def _check_alike(self, row: Sequence[Stored], what: str) -> None:
        for other in row[1:]:
            if other.info != row[0].info:
                one, two = ([stored.info.dtype, list(stored.info.shape)] for stored in (row[0], other))
                file = other.file if isinstance(other, Shard) else "a file of another rank"
                raise DamagedError(f"{what} is {two} in {file}, and {one} on the first rank: they are of two saves")

    def _joined(self, rule: Rule, name: str, row: Sequence[Stored], what: str) -> dict[str, Stored]:
        if rule.dim is None or not row[0].info.shape:
            if len(row) > 1:
                self.evidence.replicas.append((what, row))
            return self._shaped(rule, {piece.name: row[0] for piece in pieces(rule, name)})
        return self._shaped(rule, self._divided(rule, name, row, what))

    def _divided(self, rule: Rule, name: str, row: Sequence[Stored], what: str) -> dict[str, Stored]:
        dim, info, every = rule.dim or 0, row[0].info, pieces(rule, name)
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
            found[piece.name] = before + count * size, parts + moved(more, at(info.shape, dim, before))
            start += size
        return {
            key: Joined(TensorInfo(info.dtype, along(info.shape, dim, 0, size).shape), parts)
            for key, (size, parts) in found.items()
        }

    def _piece(self, piece: Piece, row: Sequence[Stored], place: tuple[int, int, int], what: str) -> tuple[int, Parts]:
        """How many blocks of a piece there are, and these beside each other. Further copies are evidence."""
        dim, start, size = place
        shape = row[0].info.shape
        known: dict[int, Parts] = {}
        parts: Parts = ()
        count = 1
        for rank, stored in enumerate(row):
            count, block = held(piece, len(row), rank)
            own = cut(parts_of(stored), along(shape, dim, start, start + size))
            if block in known:
                info = TensorInfo(stored.info.dtype, along(shape, dim, 0, size).shape)
                self.evidence.replicas.append((what, (Joined(info, known[block]), Joined(info, own))))
                continue
            known[block] = own
            parts += moved(own, at(shape, dim, block * size))
        return count, parts

    def _shaped(self, rule: Rule, found: dict[str, Stored]) -> dict[str, Stored]:
        """Experts by themselves, and rows for columns."""
        if not rule.transposed and not any(EXPERT in name for name in found):
            return found
        return {name: stored for key, whole in found.items() for name, stored in _single(rule, key, whole)}


def _single(rule: Rule, name: str, whole: Stored) -> list[tuple[str, Stored]]:
    shape = whole.info.shape
    order = list(range(len(shape)))
    if rule.transposed and len(shape) > 1:
        order[-2:] = order[:-3:-1]
    if EXPERT not in name:
        return [(name, _turned(whole, parts_of(whole), shape, order))]
    if shape[0] > _EXPERTS:
        raise DamagedError(f"{name!r} is of {shape[0]} experts, more than any model has")
    rows = [along(shape, 0, number, number + 1) for number in range(shape[0])]
    return [
        (name.replace(EXPERT, str(number)), _turned(whole, cut(parts_of(whole), box), shape, order[1:]))
        for number, box in enumerate(rows)
    ]


def _turned(whole: Stored, parts: Parts, shape: Sequence[int], order: Sequence[int]) -> Stored:
    return Joined(TensorInfo(whole.info.dtype, tuple(shape[index] for index in order)), turned(parts, order))


def parts_of(stored: Stored) -> Parts:
    """The boxes that a tensor lies in."""
    if isinstance(stored, Shard):
        return stored.parts()
    if isinstance(stored, Joined):
        return stored.parts
    raise DamagedError("a tensor is neither in one file nor in several")


def _beside(column: Sequence[Stored]) -> Stored:
    """Experts of one rank after those of another."""
    info = column[0].info
    number = info.shape[0]
    parts: Parts = ()
    for rank, stored in enumerate(column):
        parts += moved(parts_of(stored), at(info.shape, 0, rank * number))
    return Joined(TensorInfo(info.dtype, (number * len(column), *info.shape[1:])), parts)
