"""The comparison of two checkpoints: what metadata and checksums tell, and where they do not, the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.cli.diff import pairs
from holdfast.cli.diff.pairs import TensorPair
from holdfast.cli.diff.values import ValueDifference, compare_values
from holdfast.cli.name_patterns import match_names
from holdfast.cli.output import format_count
from holdfast.cli.placeholders import TensorPlaceholder
from holdfast.cli.process import leave_on_interrupt
from holdfast.cli.target import InspectedCheckpoint, raise_not_read
from holdfast.formats.reader import CheckpointValues, detect_replacement
from holdfast.observe.terminal import show_progress
from holdfast.ondisk import values

if TYPE_CHECKING:
    from holdfast.cli.diff.tensors import TensorDifference


@dataclass(frozen=True)
class CheckpointComparison:
    """What two checkpoints have in common, and what not.

    ``apart`` are tensors that only one has, or with different shapes; ``differing`` those with different dtypes or
    elements. Of ``compared`` tensors ``unread`` are equal by their checksums. ``notes``: what was not compared.
    """

    left: InspectedCheckpoint
    right: InspectedCheckpoint
    apart: Sequence[TensorPair]
    differing: Sequence[tuple[TensorPair, TensorDifference]]
    values: Sequence[ValueDifference]
    compared: int
    unread: int
    notes: Sequence[str]

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not (self.apart or self.differing or self.values)


def compare_checkpoints(
    left: InspectedCheckpoint, right: InspectedCheckpoint, pattern: str | None
) -> CheckpointComparison:
    """Compare two checkpoints; with a pattern, only tensors of such names. Raises ``CorruptCheckpointError`` or ``CheckpointReplacedError``."""
    if pattern is None:
        plain, stored, notes = _values(left, right)
    else:
        plain, stored, notes = [], [], []
    named = [pair for pair in pairs.pair_tensors(left, right) if match_names(pair.name, pattern)]
    found = pairs.sort_pairs([*named, *stored], left, right)
    return CheckpointComparison(
        left=left,
        right=right,
        apart=found.apart,
        differing=_differing(found.suspect, left, right),
        values=plain,
        compared=len(named) + len(stored),
        unread=len(found.equal),
        notes=notes,
    )


def _differing(
    suspect: Sequence[TensorPair], left: InspectedCheckpoint, right: InspectedCheckpoint
) -> list[tuple[TensorPair, TensorDifference]]:
    if not suspect:
        return []
    total = sum(_nbytes(left, pair.left) + _nbytes(right, pair.right) for pair in suspect)
    with leave_on_interrupt():
        from holdfast.cli.diff.tensors import compare_tensors  # noqa: PLC0415 - torch takes its time, and all may be equal

    with show_progress("comparing", total) as done, detect_replacement(left.reader), detect_replacement(right.reader):
        seen = compare_tensors(suspect, left, right, done)
    both = zip(suspect, seen, strict=True)
    return [
        (pair, one)
        for pair, one in both
        if one.differing or pairs.info_of(left, pair.left) != pairs.info_of(right, pair.right)
    ]


def _nbytes(target: InspectedCheckpoint, key: pairs.Key | None) -> int:
    known = pairs.info_of(target, key)
    return 0 if known is None else known.nbytes


def _values(
    left: InspectedCheckpoint, right: InspectedCheckpoint
) -> tuple[list[ValueDifference], list[TensorPair], list[str]]:
    """Leaves that differ, the tensors among values, and what is not compared."""
    one, other = left.values(), right.values()
    found = [(leaf, "state") for leaf in compare_values(_shared(one), _shared(other))]
    notes = [f"not compared: {note}" for target in (left, right) for note in raise_not_read(target.reader)]
    if one.world_size == other.world_size:
        found += [(leaf, "ranks") for leaf in compare_values(_own(left, one), _own(right, other))]
    elif one.world_size and other.world_size:
        notes.append(
            f"saved by {one.world_size} and by {format_count(other.world_size, 'rank')}: "
            "what each rank has of its own is not compared"
        )
    plain = [leaf for leaf, _ in found if not _are_tensors(leaf)]
    return plain, [pairs.is_inside(leaf, group) for leaf, group in found if _are_tensors(leaf)], notes


def _shared(found: CheckpointValues) -> dict[str, Any]:
    """Without what says that there is nothing."""
    return {name: value for name, value in found.shared.items() if value not in ({}, None)}


def _are_tensors(leaf: ValueDifference) -> bool:
    return isinstance(leaf.left, TensorPlaceholder) and isinstance(leaf.right, TensorPlaceholder)


def _own(target: InspectedCheckpoint, found: CheckpointValues) -> dict[str, Any]:
    codec, source = target.describing("ranks"), str(target.path)
    return {"ranks": [values.decode_value(own, codec, source) for own in found.ranks]}
