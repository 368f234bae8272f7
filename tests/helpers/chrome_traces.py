"""A reader of the Chrome trace-event format, written from its description, which imports nothing of rankless.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU describes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

#: Microseconds by which the ends of two spans may differ because they are rounded.
ROUNDING = 0.01


@dataclass(frozen=True)
class Slice:
    """A complete event. Times are microseconds since the base of its file, ``base`` nanoseconds since 1970."""

    name: str
    category: str
    start: float
    stop: float
    pid: int
    tid: int
    base: int
    detail: str
    error: str

    @property
    def length(self) -> float:
        return self.stop - self.start

    def contains(self, other: Slice) -> bool:
        is_same_track = (self.pid, self.tid) == (other.pid, other.tid)
        is_around = self.start <= other.start + ROUNDING and other.stop <= self.stop + ROUNDING
        return is_same_track and is_around and self.length > other.length


class ChromeTrace:
    """A trace, checked to be one that a viewer draws as it is meant."""

    def __init__(self, path: Path) -> None:
        self.raw = json.loads(path.read_text())
        events = self.raw["traceEvents"]
        assert {event["ph"] for event in events} <= {"X", "M"}
        for event in events:
            assert isinstance(event["name"], str)
            assert isinstance(event["pid"], int)
            assert isinstance(event["tid"], int)
        self.processes = dict(_named(events, "process_name", lambda event: event["pid"]))
        self.threads = dict(_named(events, "thread_name", lambda event: (event["pid"], event["tid"])))
        self.slices = sorted(
            map(self._read_slice, (event for event in events if event["ph"] == "X")), key=_drawing_order
        )
        self._check_nesting()

    def _read_slice(self, event: dict[str, Any]) -> Slice:
        assert event["dur"] >= 0
        assert event["pid"] in self.processes
        assert (event["pid"], event["tid"]) in self.threads
        args = event.get("args", {})
        return Slice(
            event["name"],
            event["cat"],
            event["ts"],
            event["ts"] + event["dur"],
            event["pid"],
            event["tid"],
            self.raw["baseTimeNanoseconds"],
            args.get("detail", ""),
            args.get("error", ""),
        )

    def _check_nesting(self) -> None:
        """Complete events of one thread lie inside each other or apart: a viewer drops others, or draws them wrong."""
        for track in self.threads:
            enclosing: list[Slice] = []
            for each in (each for each in self.slices if (each.pid, each.tid) == track):
                while enclosing and enclosing[-1].stop <= each.start + ROUNDING:
                    enclosing.pop()
                assert not enclosing or each.stop <= enclosing[-1].stop + ROUNDING, (enclosing[-1], each)
                enclosing.append(each)

    def named(self, name: str, pid: int = 0) -> list[Slice]:
        """The slices of a name in a process, in the order of their starts."""
        return [each for each in self.slices if (each.name, each.pid) == (name, pid)]

    def only(self, name: str, pid: int = 0) -> Slice:
        (each,) = self.named(name, pid)
        return each

    def children(self, parent: Slice) -> list[Slice]:
        """The slices directly below another one."""
        inside = [each for each in self.slices if parent.contains(each)]
        return [each for each in inside if not any(other.contains(each) for other in inside)]

    def covered(self, parent: Slice) -> float:
        """The part of a slice that its children take together. They do not overlap."""
        children = self.children(parent)
        assert all(first.stop <= second.start + ROUNDING for first, second in pairwise(children))
        return sum(child.length for child in children) / parent.length


def _drawing_order(each: Slice) -> tuple[float, float]:
    return each.start, -each.length


def _named(events: list[dict[str, Any]], kind: str, key: Any) -> Iterator[tuple[Any, str]]:
    return ((key(event), event["args"]["name"]) for event in events if event["ph"] == "M" and event["name"] == kind)
