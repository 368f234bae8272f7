"""The comparison of two checkpoints by metadata and checksums and, if these do not decide, by bytes.

``rankless diff``, :func:`rankless.diff` and reports call it, in one process. Equal checksums decide only if their
blocks are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rankless.formats.reader import CheckpointValues, detect_replacement
from rankless.inspection.inspected_checkpoint import InspectedCheckpoint, describe_unread
from rankless.inspection.name_patterns import match_names
from rankless.inspection.placeholders import TensorPlaceholder
from rankless.inspection.tensor_pairs import Key, TensorPair, info_of, pair_inside_values, pair_tensors, sort_pairs
from rankless.inspection.value_differences import ValueDifference, compare_values
from rankless.observe.units import format_count
from rankless.ondisk import values

if TYPE_CHECKING:
    from rankless.inspection.tensor_differences import TensorDifference


@dataclass(frozen=True)
class CheckpointComparison:
    """The result of comparing two checkpoints.

    ``apart`` are tensors that only one side has, or that have different shapes. ``suspect`` must be compared by their
    bytes; ``differing`` are suspects that were compared, and have different dtypes or elements. Of ``compared``
    tensors, ``unread`` are equal by their checksums. ``notes`` name the parts that were not compared.
    """

    left: InspectedCheckpoint
    right: InspectedCheckpoint
    apart: Sequence[TensorPair]
    suspect: Sequence[TensorPair]
    values: Sequence[ValueDifference]
    compared: int
    unread: int
    notes: Sequence[str]
    differing: Sequence[tuple[TensorPair, TensorDifference]] = ()

    @property
    def is_equal(self) -> bool:
        """``True`` if nothing differs."""
        return not (self.apart or self.suspect or self.differing or self.values)

    @property
    def suspect_nbytes(self) -> int:
        """The bytes of both sides that must be compared."""
        infos = (info_of(side, key) for pair in self.suspect for side, key in self._sides_of(pair))
        return sum(info.nbytes for info in infos if info is not None)

    def _sides_of(self, pair: TensorPair) -> Iterator[tuple[InspectedCheckpoint, Key | None]]:
        yield self.left, pair.left
        yield self.right, pair.right


def compare_metadata(
    left: InspectedCheckpoint, right: InspectedCheckpoint, pattern: str | None
) -> CheckpointComparison:
    """Compare two checkpoints by metadata and checksums or, with a pattern, only the tensors with matching names.

    Raises ``CorruptCheckpointError``, or ``CheckpointReplacedError`` if one of them was replaced meanwhile.
    """
    if pattern is None:
        plain, stored, notes = _compare_all_values(left, right)
    else:
        plain, stored, notes = [], [], []
    named = [pair for pair in pair_tensors(left, right) if match_names(pair.name, pattern)]
    sorted_pairs = sort_pairs([*named, *stored], left, right)
    return CheckpointComparison(
        left=left,
        right=right,
        apart=sorted_pairs.apart,
        suspect=sorted_pairs.suspect,
        values=plain,
        compared=len(named) + len(stored),
        unread=len(sorted_pairs.equal),
        notes=notes,
    )


def compare_suspects(comparison: CheckpointComparison, done: Callable[[int], None]) -> CheckpointComparison:
    """Compare by their bytes the tensors that metadata and checksums did not decide.

    ``done`` is called with the number of bytes that were read. Raises the errors of :func:`compare_metadata`.
    """
    from rankless.inspection.tensor_differences import compare_tensors  # noqa: PLC0415 - NumPy is slow to import

    left, right, suspect = comparison.left, comparison.right, comparison.suspect
    with detect_replacement(left.reader), detect_replacement(right.reader):
        differences = compare_tensors(suspect, left, right, done)
    differing = [
        (pair, difference)
        for pair, difference in zip(suspect, differences, strict=True)
        if difference.differing or info_of(left, pair.left) != info_of(right, pair.right)
    ]
    return replace(comparison, suspect=(), differing=differing)


def _compare_all_values(
    left: InspectedCheckpoint, right: InspectedCheckpoint
) -> tuple[list[ValueDifference], list[TensorPair], list[str]]:
    """Return the values that differ, the tensors inside values, and notes on parts that are not compared."""
    left_values, right_values = left.read_values(), right.read_values()
    leaves = [(leaf, "state") for leaf in compare_values(_present_values(left_values), _present_values(right_values))]
    notes = [f"not compared: {note}" for target in (left, right) for note in describe_unread(target.reader)]
    if left_values.world_size == right_values.world_size:
        leaves += [
            (leaf, "ranks")
            for leaf in compare_values(_decode_rank_values(left, left_values), _decode_rank_values(right, right_values))
        ]
    elif left_values.world_size and right_values.world_size:
        notes.append(
            f"saved by {left_values.world_size} and by {format_count(right_values.world_size, 'rank')}: "
            "values of single ranks are not compared"
        )
    plain = [leaf for leaf, _ in leaves if not _are_tensors(leaf)]
    return plain, [pair_inside_values(leaf, group) for leaf, group in leaves if _are_tensors(leaf)], notes


def _present_values(values_read: CheckpointValues) -> dict[str, Any]:
    """Return the shared values without empty ones."""
    return {name: value for name, value in values_read.shared.items() if value not in ({}, None)}


def _are_tensors(leaf: ValueDifference) -> bool:
    return isinstance(leaf.left, TensorPlaceholder) and isinstance(leaf.right, TensorPlaceholder)


def _decode_rank_values(target: InspectedCheckpoint, values_read: CheckpointValues) -> dict[str, Any]:
    codec, source = target.placeholder_codec("ranks"), str(target.path)
    return {"ranks": [values.decode_value(rank_values, codec, source) for rank_values in values_read.ranks]}
