"""The statistics of the tensors of a checkpoint, which is read once, in parallel, in bounded memory, and verified.

``rankless stats``, reports, :func:`rankless.compute_statistics` and :mod:`rankless.inspection.background_statistics`
call it, in one process. The result must not depend on threads or layouts: kept statistics are compared between
checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from rankless.formats.reader import detect_replacement
from rankless.inspection.inspected_checkpoint import VALUE_GROUPS, InspectedCheckpoint, inspect_path
from rankless.inspection.name_patterns import match_names
from rankless.inspection.tensor_statistics import TensorStatistics
from rankless.ondisk.dtypes import PACKED_BITS
from rankless.storage.location import parse_location


@dataclass(frozen=True)
class CheckpointStatistics:
    """The statistics of tensors of a checkpoint.

    Attributes:
        path: The path of the checkpoint.
        tensors: The statistics of each tensor, by its name with its group: ``"model/layers.0.weight"``. A tied tensor
            has one name only.
    """

    path: Path
    tensors: Mapping[str, TensorStatistics]


def compute_statistics(path: str | PathLike[str], pattern: str | None = None) -> CheckpointStatistics:
    """Compute statistics of the tensors of a checkpoint of any format. Every tensor is read once, and verified.

    The order of summation is fixed: the result does not depend on the ranks that saved the checkpoint, nor on its
    format or the number of threads.

    Args:
        path: A checkpoint, or a run directory for its latest one.
        pattern: Read only these tensors: a glob, or a part of the name.

    Returns:
        The statistics of each tensor.

    Raises:
        NoCheckpointError: There is no checkpoint at the path.
        FormatError: The format is not supported.
        CorruptCheckpointError: Stored bytes differ from the saved ones.
        CheckpointReplacedError: Another process replaced or removed the checkpoint meanwhile.
    """
    inspected = inspect_path(parse_location(path))
    return measure_checkpoint(inspected, select_tensors(inspected, pattern), lambda _: None)


def select_tensors(inspected: InspectedCheckpoint, pattern: str | None) -> list[tuple[str, str]]:
    """Return the group and the name of each tensor that matches, but for those inside values and of packed dtypes."""
    return [
        (group, name)
        for group, name, info in inspected.iterate_tensors()
        if group not in VALUE_GROUPS and info.dtype not in PACKED_BITS and match_names(f"{group}/{name}", pattern)
    ]


def measure_checkpoint(
    inspected: InspectedCheckpoint, keys: Sequence[tuple[str, str]], done: Callable[[int], None]
) -> CheckpointStatistics:
    """Compute the statistics of tensors. ``done`` is called with the number of bytes that were read.

    Raises ``CorruptCheckpointError`` or ``CheckpointReplacedError``.
    """
    from rankless.inspection.measured_tensors import measure_tensors  # noqa: PLC0415 - NumPy is slow to import

    with detect_replacement(inspected.reader):
        measured = measure_tensors(inspected, keys, done)
    names = (f"{group}/{name}" for group, name in keys)
    return CheckpointStatistics(inspected.path, dict(zip(names, measured, strict=True)))
