"""The data of the report on the differences between two checkpoints.

``rankless report A B`` calls it. The scripts of the page read the keys. A change here needs the same change there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rankless.inspection.compare import CheckpointComparison
from rankless.inspection.inspected_checkpoint import InspectedCheckpoint
from rankless.inspection.tensor_pairs import TensorPair
from rankless.report.compaction import round_number
from rankless.report.tensor_columns import NamedTensor, list_tensors, tensor_columns
from rankless.run.run_store import tag_of

if TYPE_CHECKING:
    from rankless.inspection.tensor_differences import TensorDifference

#: How a tensor differs, as one letter each.
EQUAL, DIFFERS, OTHER, ONLY_LEFT, ONLY_RIGHT = "=", "d", "x", "-", "+"


def describe_difference(comparison: CheckpointComparison, values: list[tuple[str, str, str]]) -> dict[str, Any]:
    """Return the data of a report. ``values`` are the values that differ: the path, and both sides as text."""
    left, right = comparison.left, comparison.right
    tensors = _list_all(left, right)
    rows = {f"{tensor.group}/{tensor.name}": row for row, tensor in enumerate(tensors)}
    states = [EQUAL] * len(tensors)
    for pair in comparison.apart:
        for row in _rows_of(pair, rows):
            states[row] = ONLY_RIGHT if pair.left is None else ONLY_LEFT if pair.right is None else OTHER
    differing = {}
    for pair, difference in comparison.differing:
        for row in _rows_of(pair, rows):
            states[row] = DIFFERS
            differing[row] = difference
    return {
        "kind": "difference",
        "path": f"{left.path} → {right.path}",
        "made": round(time.time(), 3),
        "sides": [_describe_side(side) for side in (left, right)],
        "tensors": tensor_columns(tensors),
        "states": "".join(states),
        "differences": [[row, *_difference_row(difference)] for row, difference in sorted(differing.items())],
        "values": values,
        "notes": list(comparison.notes),
        "findings": [],
    }


def _list_all(left: InspectedCheckpoint, right: InspectedCheckpoint) -> list[NamedTensor]:
    """Return the tensors of the right side, and those that only the left one has."""
    tensors = list_tensors(right)
    names = {(tensor.group, tensor.name) for tensor in tensors}
    return [*tensors, *(tensor for tensor in list_tensors(left) if (tensor.group, tensor.name) not in names)]


def _rows_of(pair: TensorPair, rows: Mapping[str, int]) -> list[int]:
    """Return the row of a pair of tensors; none if its tensors are inside values and have no file."""
    keys = ("/".join(key) for key in (pair.right, pair.left) if isinstance(key, tuple))
    return [rows[key] for key in keys if key in rows][:1]


def _difference_row(difference: TensorDifference) -> list[float | None]:
    """Return the share of the elements that differ, and the largest absolute and relative difference.

    ``None`` is a difference that is not finite.
    """
    share = difference.differing / max(1, difference.elements)
    largest = (difference.absolute, difference.relative)
    return [round_number(share), *(round_number(each) if math.isfinite(each) else None for each in largest)]


def _describe_side(side: InspectedCheckpoint) -> dict[str, Any]:
    manifest = side.manifest
    return {
        "path": str(side.path),
        "tag": tag_of(side.path),
        "step": manifest.step if manifest else None,
        "saved": manifest.time if manifest else None,
        "nbytes": sum(side.file_sizes().values()),
        "world_size": manifest.provenance.world_size if manifest else 0,
    }
