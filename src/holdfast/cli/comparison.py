"""The comparison of two checkpoints: what metadata and checksums tell, and where they do not, the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.cli import leaves, pairs
from holdfast.cli.described import Described
from holdfast.cli.leaves import Leaf
from holdfast.cli.naming import matches
from holdfast.cli.output import count
from holdfast.cli.pairs import Pair
from holdfast.cli.process import leave_on_interrupt
from holdfast.cli.target import Target, not_read
from holdfast.formats.reader import Values, as_opened
from holdfast.layout import values
from holdfast.terminal import progress

if TYPE_CHECKING:
    from holdfast.cli.abreast import Difference


@dataclass(frozen=True)
class Comparison:
    """What two checkpoints have in common, and what not.

    ``apart`` are tensors that only one has, or with different shapes; ``differing`` those with different dtypes or
    elements. Of ``compared`` tensors ``unread`` are equal by their checksums. ``notes``: what was not compared.
    """

    left: Target
    right: Target
    apart: Sequence[Pair]
    differing: Sequence[tuple[Pair, Difference]]
    values: Sequence[Leaf]
    compared: int
    unread: int
    notes: Sequence[str]

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not (self.apart or self.differing or self.values)


def compare(left: Target, right: Target, pattern: str | None) -> Comparison:
    """Compare two checkpoints; with a pattern, only tensors of such names. Raises ``DamagedError`` or ``GoneError``."""
    if pattern is None:
        plain, stored, notes = _values(left, right)
    else:
        plain, stored, notes = [], [], []
    named = [pair for pair in pairs.pairs(left, right) if matches(pair.name, pattern)]
    found = pairs.sort([*named, *stored], left, right)
    return Comparison(
        left=left,
        right=right,
        apart=found.apart,
        differing=_differing(found.suspect, left, right),
        values=plain,
        compared=len(named) + len(stored),
        unread=len(found.equal),
        notes=notes,
    )


def _differing(suspect: Sequence[Pair], left: Target, right: Target) -> list[tuple[Pair, Difference]]:
    if not suspect:
        return []
    total = sum(_nbytes(left, pair.left) + _nbytes(right, pair.right) for pair in suspect)
    with leave_on_interrupt():
        from holdfast.cli.abreast import differences  # noqa: PLC0415 - torch takes its time, and all may be equal

    with progress("comparing", total) as done, as_opened(left.reader), as_opened(right.reader):
        seen = differences(suspect, left, right, done)
    both = zip(suspect, seen, strict=True)
    return [
        (pair, one)
        for pair, one in both
        if one.differing or pairs.info(left, pair.left) != pairs.info(right, pair.right)
    ]


def _nbytes(target: Target, key: pairs.Key | None) -> int:
    known = pairs.info(target, key)
    return 0 if known is None else known.nbytes


def _values(left: Target, right: Target) -> tuple[list[Leaf], list[Pair], list[str]]:
    """Leaves that differ, the tensors among values, and what is not compared."""
    one, other = left.values(), right.values()
    found = [(leaf, "state") for leaf in leaves.compare(_shared(one), _shared(other))]
    notes = [f"not compared: {note}" for target in (left, right) for note in not_read(target.reader)]
    if one.world_size == other.world_size:
        found += [(leaf, "ranks") for leaf in leaves.compare(_own(left, one), _own(right, other))]
    elif one.world_size and other.world_size:
        notes.append(
            f"saved by {one.world_size} and by {count(other.world_size, 'rank')}: "
            "what each rank has of its own is not compared"
        )
    plain = [leaf for leaf, _ in found if not _are_tensors(leaf)]
    return plain, [pairs.inside(leaf, group) for leaf, group in found if _are_tensors(leaf)], notes


def _shared(found: Values) -> dict[str, Any]:
    """Without what says that there is nothing."""
    return {name: value for name, value in found.shared.items() if value not in ({}, None)}


def _are_tensors(leaf: Leaf) -> bool:
    return isinstance(leaf.left, Described) and isinstance(leaf.right, Described)


def _own(target: Target, found: Values) -> dict[str, Any]:
    codec, source = target.describing("ranks"), str(target.path)
    return {"ranks": [values.decode(own, codec, source) for own in found.ranks]}
