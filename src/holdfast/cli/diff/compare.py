"""The comparison of two checkpoints by metadata and checksums and, if these do not decide, by bytes."""

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
from holdfast.cli.target import InspectedCheckpoint, describe_unread
from holdfast.formats.reader import CheckpointValues, detect_replacement
from holdfast.observe.terminal import show_progress
from holdfast.ondisk import values

if TYPE_CHECKING:
    from holdfast.cli.diff.tensors import TensorDifference


@dataclass(frozen=True)
class CheckpointComparison:
    """The result of comparing two checkpoints.

    ``apart`` are tensors that only one side has, or that have different shapes. ``differing`` have different dtypes or
    elements. Of ``compared`` tensors, ``unread`` are equal by their checksums. ``notes`` say what was not compared.
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
        """``True`` if nothing differs."""
        return not (self.apart or self.differing or self.values)


def compare_checkpoints(
    left: InspectedCheckpoint, right: InspectedCheckpoint, pattern: str | None
) -> CheckpointComparison:
    """Compare two checkpoints or, with a pattern, only the tensors whose names match.

    Raises ``CorruptCheckpointError``, or ``CheckpointReplacedError`` if one of them was replaced meanwhile.
    """
    if pattern is None:
        plain, stored, notes = _compare_all_values(left, right)
    else:
        plain, stored, notes = [], [], []
    named = [pair for pair in pairs.pair_tensors(left, right) if match_names(pair.name, pattern)]
    sorted_pairs = pairs.sort_pairs([*named, *stored], left, right)
    return CheckpointComparison(
        left=left,
        right=right,
        apart=sorted_pairs.apart,
        differing=_compare_suspects(sorted_pairs.suspect, left, right),
        values=plain,
        compared=len(named) + len(stored),
        unread=len(sorted_pairs.equal),
        notes=notes,
    )


def _compare_suspects(
    suspect: Sequence[TensorPair], left: InspectedCheckpoint, right: InspectedCheckpoint
) -> list[tuple[TensorPair, TensorDifference]]:
    if not suspect:
        return []
    total = sum(_tensor_nbytes(left, pair.left) + _tensor_nbytes(right, pair.right) for pair in suspect)
    with leave_on_interrupt():
        from holdfast.cli.diff.tensors import compare_tensors  # noqa: PLC0415 - torch is slow

    with show_progress("comparing", total) as done, detect_replacement(left.reader), detect_replacement(right.reader):
        differences = compare_tensors(suspect, left, right, done)
    return [
        (pair, difference)
        for pair, difference in zip(suspect, differences, strict=True)
        if difference.differing or pairs.info_of(left, pair.left) != pairs.info_of(right, pair.right)
    ]


def _tensor_nbytes(target: InspectedCheckpoint, key: pairs.Key | None) -> int:
    info = pairs.info_of(target, key)
    return 0 if info is None else info.nbytes


def _compare_all_values(
    left: InspectedCheckpoint, right: InspectedCheckpoint
) -> tuple[list[ValueDifference], list[TensorPair], list[str]]:
    """Return the values that differ, the tensors inside values, and notes on what is not compared."""
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
    return plain, [pairs.pair_inside_values(leaf, group) for leaf, group in leaves if _are_tensors(leaf)], notes


def _present_values(values_read: CheckpointValues) -> dict[str, Any]:
    """Return the shared values without empty ones."""
    return {name: value for name, value in values_read.shared.items() if value not in ({}, None)}


def _are_tensors(leaf: ValueDifference) -> bool:
    return isinstance(leaf.left, TensorPlaceholder) and isinstance(leaf.right, TensorPlaceholder)


def _decode_rank_values(target: InspectedCheckpoint, values_read: CheckpointValues) -> dict[str, Any]:
    codec, source = target.placeholder_codec("ranks"), str(target.path)
    return {"ranks": [values.decode_value(rank_values, codec, source) for rank_values in values_read.ranks]}
