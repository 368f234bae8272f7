"""The rows of the graph that ``rankless ls --tree`` prints, from the oldest to the latest checkpoint.

This module is pure. The current line of a run is in the first column. All other lines are in further columns, each
after the checkpoint that it was continued from, and before the line goes on.

:mod:`rankless.cli.ls_tree` prints them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.history_tree import Incarnation, RunTree


class TreeRow(msgspec.Struct, frozen=True):
    """A row of the graph, in the column ``depth``.

    ``kind`` is ``"incarnation"``, ``"checkpoint"``, ``"fork"``, after which a further column begins, or ``"quiet"``:
    ``incarnations`` that have no checkpoint and that nothing continued.
    """

    kind: Literal["incarnation", "checkpoint", "fork", "quiet"]
    depth: int
    incarnations: tuple[Incarnation, ...] = ()
    checkpoint: CheckpointInfo | None = None


class _Segment(msgspec.Struct, frozen=True):
    """A segment of an incarnation in a column: its places from the one with the index ``first`` on."""

    incarnation: Incarnation
    first: int = 0


class _Stop(msgspec.Struct):
    """A sequence number of an incarnation: the checkpoints there, and the incarnations that continue it."""

    checkpoints: list[CheckpointInfo] = msgspec.field(default_factory=list)
    children: list[Incarnation] = msgspec.field(default_factory=list)


def plan_rows(tree: RunTree) -> Iterator[TreeRow]:
    """Yield the rows of a run."""
    planner = _RowPlanner(tree)
    roots = [one for one in tree.incarnations if one.base is None]
    for root in sorted(roots, key=lambda one: (one.number in planner.line, one.number)):
        yield from planner.plan(root)


class _RowPlanner:
    """The stops of all incarnations of a run, and the numbers of those in its current ``line``."""

    def __init__(self, tree: RunTree) -> None:
        by_number = tree.by_number
        self.line: set[int] = set()
        number: int | None = tree.newest
        while number is not None:
            self.line.add(number)
            base = by_number[number].base
            number = None if base is None else base.incarnation
        stops: dict[int, dict[int, _Stop]] = defaultdict(lambda: defaultdict(_Stop))
        for one in tree.incarnations:
            for info in one.checkpoints:
                stops[one.number][info.sequence].checkpoints.append(info)
            if one.base is not None:
                stops[one.base.incarnation][one.base.sequence].children.append(one)
        self._stops = {number: [at[sequence] for sequence in sorted(at)] for number, at in stops.items()}

    def plan(self, root: Incarnation) -> Iterator[TreeRow]:
        """Yield the rows of an incarnation and of all that continued it. Columns are a stack: they may be many."""
        columns = [self._plan_column(_Segment(root), 0)]
        while columns:
            row = next(columns[-1], None)
            if row is None:
                columns.pop()
            elif isinstance(row, TreeRow):
                yield row
            else:
                columns.append(self._plan_column(row, len(columns)))

    def _plan_column(self, first: _Segment, depth: int) -> Iterator[TreeRow | _Segment]:
        """Yield the rows of a column, and the segments that are in the next one."""
        following: _Segment | None = first
        while following is not None:
            segment, following = following, None
            stops = self._stops.get(segment.incarnation.number, [])
            if segment.first == 0:
                yield TreeRow("incarnation", depth, (segment.incarnation,))
            for after, stop in enumerate(stops[segment.first :], segment.first + 1):
                for info in stop.checkpoints:
                    yield TreeRow("checkpoint", depth, checkpoint=info)
                has_more = after < len(stops)
                goes_on = self._find_continuation(stop.children, has_more=has_more)
                others = [child for child in stop.children if child is not goes_on]
                sides = [_Segment(segment.incarnation, after)] if goes_on is not None and has_more else []
                for side in [*sides, *(_Segment(child) for child in others if not self._is_quiet(child))]:
                    yield TreeRow("fork", depth)
                    yield side
                if quiet := tuple(filter(self._is_quiet, others)):
                    yield TreeRow("quiet", depth, quiet)
                if goes_on is not None:
                    following = _Segment(goes_on)
                    break

    def _find_continuation(self, children: Sequence[Incarnation], *, has_more: bool) -> Incarnation | None:
        """Return the incarnation with which a column goes on: the current line, or the newest one at its end."""
        current = [child for child in children if child.number in self.line]
        shown = [] if has_more else [child for child in children if not self._is_quiet(child)]
        return next(iter([*current, *reversed(shown)]), None)

    def _is_quiet(self, incarnation: Incarnation) -> bool:
        """Return whether an incarnation left nothing: many of a crash loop share a row."""
        is_leaf = incarnation.number not in self._stops
        return is_leaf and incarnation.number not in self.line and not incarnation.abandoned
