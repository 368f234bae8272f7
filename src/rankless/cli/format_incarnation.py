"""The text and the JSON of an incarnation, for ``rankless ls --tree`` and ``rankless show``.

Programs read the JSON: keys keep their names.
"""

from __future__ import annotations

from typing import Any

from rankless.observe.terminal import escape_control_characters
from rankless.observe.units import format_time
from rankless.run.history_tree import Incarnation


def incarnation_record(one: Incarnation) -> dict[str, Any]:
    """Return an incarnation as JSON."""
    return {
        "incarnation": one.number,
        "host": one.job.host if one.job else None,
        "pid": one.job.pid if one.job else None,
        "time": one.job.time if one.job else None,
        "begins": one.begins,
        "base": None
        if one.base is None
        else {"incarnation": one.base.incarnation, "sequence": one.base.sequence, "tag": one.base_tag or None},
        "goes_back": one.goes_back,
        "checkpoints": [info.tag for info in one.checkpoints],
        "abandoned": [info.tag for info in one.abandoned],
    }


def describe_incarnation(one: Incarnation) -> str:
    """Return the number of an incarnation, and its job: ``incarnation 2 on node-1, process 42, 2026-11-27 11:40``."""
    if one.job is None:
        return f"incarnation {one.number}, whose job is not known" if one.number else "no known incarnation"
    host = f" on {one.job.host}" if one.job.host else ""
    return escape_control_characters(
        f"incarnation {one.number}{host}, process {one.job.pid}, {format_time(one.job.time)}"
    )


def describe_base(one: Incarnation) -> str:
    """Describe the checkpoint that an incarnation continued, such as ``went back to step_10``; empty if not known."""
    if one.base is None:
        return "began the run" if one.begins else ""
    tag = escape_control_characters(one.base_tag) or "a checkpoint that is no longer in the list"
    return f"went back to {tag}" if one.goes_back else f"continued {tag}"
