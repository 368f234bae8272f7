"""The page of the differences of two checkpoints in a notebook: the tables of ``rankless diff``.

:class:`rankless.inspection.diff.CheckpointDiff` calls it when a notebook shows one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankless.inspection.brief_text import format_brief
from rankless.observe.html import HtmlTable, build_html
from rankless.observe.units import format_count
from rankless.ondisk.data_files import TensorInfo

if TYPE_CHECKING:
    from rankless.inspection.diff import CheckpointDiff, TensorDiff, ValueDiff


def describe_diff(diff: CheckpointDiff) -> str:
    """Return HTML with both paths, the tensors that cannot be compared, those that differ, and the values."""
    compared = format_count(diff.compared, "tensor")
    counts = f"{len(diff.tensors):,} of {compared} and {format_count(len(diff.values), 'value')} differ"
    apart = [tensor for tensor in diff.tensors if not tensor.elements]
    differing = sorted(
        (tensor for tensor in diff.tensors if tensor.elements), key=lambda tensor: (-tensor.max_rel, -tensor.max_abs)
    )
    return build_html(
        counts if diff else f"no difference in {compared}",
        [
            HtmlTable((), [("a", str(diff.left)), ("b", str(diff.right))]),
            HtmlTable(("tensor", "a", "b"), [_apart_row(tensor) for tensor in apart], noun="tensor"),
            HtmlTable(
                ("tensor", "differ", "of", "max abs", "max rel", "dtypes"),
                [_difference_row(tensor) for tensor in differing],
                frozenset({1, 2, 3, 4}),
                "tensor",
            ),
            HtmlTable(("value", "a", "b"), [_value_row(value) for value in diff.values], noun="value"),
        ],
        diff.notes,
    )


def _apart_row(tensor: TensorDiff) -> tuple[str, ...]:
    return tensor.name, *(_format_info(side) for side in (tensor.left, tensor.right))


def _format_info(info: TensorInfo | None) -> str:
    return "absent" if info is None else f"{info.dtype} {list(info.value_shape)}"


def _difference_row(tensor: TensorDiff) -> tuple[str, ...]:
    dtypes = dict.fromkeys(side.dtype for side in (tensor.left, tensor.right) if side is not None)
    return (
        tensor.name,
        f"{tensor.differing:,}",
        f"{tensor.elements:,}",
        f"{tensor.max_abs:.3g}",
        f"{tensor.max_rel:.3g}",
        " ".join(dtypes),
    )


def _value_row(value: ValueDiff) -> tuple[str, ...]:
    sides = {"left": value.left, "right": value.right}
    return value.path, *(
        "absent" if value.only_in and value.only_in != side else format_brief(item) for side, item in sides.items()
    )
