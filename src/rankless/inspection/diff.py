"""``rankless.diff``: the comparison of two checkpoints for programs.

Programs call it, in one process. Fields of the results are public: they keep their names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from rankless.inspection.compare import CheckpointComparison, compare_metadata, compare_suspects
from rankless.inspection.inspected_checkpoint import inspect_path
from rankless.inspection.tensor_pairs import info_of
from rankless.inspection.value_differences import ABSENT
from rankless.ondisk.data_files import TensorInfo
from rankless.storage.location import parse_location


@dataclass(frozen=True)
class TensorDiff:
    """A tensor that differs.

    Attributes:
        name: Its name, with its group: ``"model/layers.0.weight"``.
        left: Its dtype and shape in the first checkpoint; ``None`` if it is not there.
        right: Its dtype and shape in the second checkpoint; ``None`` if it is not there.
        elements: The number of its elements; 0 if the shapes differ, or if it is on one side only.
        differing: The number of elements that differ: bit by bit or, if the dtypes differ, by value.
        max_abs: The largest ``|a - b|``; infinite if one of both is not finite.
        max_rel: The largest ``|a - b| / max(|a|, |b|)``.
    """

    name: str
    left: TensorInfo | None
    right: TensorInfo | None
    elements: int = 0
    differing: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0


@dataclass(frozen=True)
class ValueDiff:
    """A plain value that differs, at a path such as ``"optimizer.groups[0].settings.lr"``.

    A side that does not have it is ``None``, and :attr:`only_in` says which one has it.
    """

    path: str
    left: Any
    right: Any
    only_in: str = ""


@dataclass(frozen=True)
class CheckpointDiff:
    """The differences of two checkpoints. It is false if there are none.

    Attributes:
        left: The path of the first checkpoint.
        right: The path of the second checkpoint.
        tensors: The tensors that differ, the one with the largest relative change first.
        values: The values that differ.
        compared: The number of tensors that were compared.
        notes: The parts that were not compared, and why.
    """

    left: Path
    right: Path
    tensors: list[TensorDiff] = field(default_factory=list)
    values: list[ValueDiff] = field(default_factory=list)
    compared: int = 0
    notes: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.tensors or self.values)

    def _repr_html_(self) -> str:
        from rankless.inspection.diff_html import describe_diff  # noqa: PLC0415 - for notebooks

        return describe_diff(self)


def diff(left: str | PathLike[str], right: str | PathLike[str], pattern: str | None = None) -> CheckpointDiff:
    """Compare the tensors and values of two checkpoints of any formats. Tensors with equal checksums are not read.

    Args:
        left: A checkpoint, or a run directory for its latest one.
        right: The other checkpoint.
        pattern: Compare only these tensors, and no values: a glob, or a part of the name.

    Returns:
        The differences.

    Raises:
        NoCheckpointError: There is no checkpoint at a path.
        FormatError: A format is not supported.
        CorruptCheckpointError: Stored bytes differ from the saved ones.
        CheckpointReplacedError: Another process replaced or removed a checkpoint meanwhile.
    """
    comparison = compare_metadata(inspect_path(parse_location(left)), inspect_path(parse_location(right)), pattern)
    if comparison.suspect:
        comparison = compare_suspects(comparison, lambda _: None)
    return _describe(comparison)


def _describe(comparison: CheckpointComparison) -> CheckpointDiff:
    apart = [(pair, None) for pair in comparison.apart]
    tensors = [
        TensorDiff(
            pair.name,
            info_of(comparison.left, pair.left),
            info_of(comparison.right, pair.right),
            *(() if change is None else (change.elements, change.differing, change.absolute, change.relative)),
        )
        for pair, change in (*apart, *comparison.differing)
    ]
    tensors.sort(key=lambda tensor: -tensor.max_rel)
    values = [_describe_value(leaf.path, leaf.left, leaf.right) for leaf in comparison.values]
    paths = comparison.left.path, comparison.right.path
    return CheckpointDiff(*paths, tensors, values, comparison.compared, list(comparison.notes))


def _describe_value(path: str, left: Any, right: Any) -> ValueDiff:
    only_in = "right" if left is ABSENT else "left" if right is ABSENT else ""
    return ValueDiff(path, None if left is ABSENT else left, None if right is ABSENT else right, only_in)
