"""The page of the checkpoints of a run in a notebook: the columns of ``rankless ls`` that need no disk.

:class:`rankless.run.catalog.CheckpointList` calls it when a notebook shows a list.
"""

from __future__ import annotations

from collections.abc import Sequence

from rankless.observe.html import HtmlTable, build_html
from rankless.observe.units import format_count, format_metrics, format_size, format_time
from rankless.run.checkpoint_info import CheckpointInfo


def describe_checkpoints(infos: Sequence[CheckpointInfo]) -> str:
    """Return HTML with a row for each checkpoint, and the problems of those that cannot be read."""
    complete = [info for info in infos if info.status == "complete"]
    titles = ("tag", "step", "saved", "ranks", "size", "status", "metrics")
    latest = complete[-1].id if complete else ""
    rows = [_describe_info(info, is_latest=info.id == latest) for info in infos]
    problems = [f"{info.tag}: {info.problem}" for info in infos if info.problem]
    table = HtmlTable(titles, rows, frozenset({1, 3, 4}), "checkpoint")
    return build_html(format_count(len(infos), "checkpoint"), [table], problems)


def _describe_info(info: CheckpointInfo, *, is_latest: bool) -> tuple[str, ...]:
    if info.status != "complete":
        return info.tag, "", "", "", "", info.status, ""
    return (
        info.tag,
        "" if info.step is None else str(info.step),
        format_time(info.time),
        str(info.world_size or ""),
        format_size(info.nbytes),
        "complete (latest)" if is_latest else "complete",
        format_metrics(info.metrics),
    )
