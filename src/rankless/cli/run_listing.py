"""The checkpoints of a run as a table of the terminal, for ``rankless ls`` and ``rankless top``.

Both call it in one process.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankless.cli.table import Cell, Column, Table
from rankless.errors import InvalidArgumentError
from rankless.observe.terminal import escape_control_characters
from rankless.observe.units import format_age, format_metrics, format_size, format_time
from rankless.run.aliases import Alias, list_aliases, means
from rankless.run.catalog import list_stale_directories
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.interrupted_copy import list_parts_of_checkpoints
from rankless.run.retention import sort_by_metric
from rankless.run.run_store import StaleDirectory
from rankless.storage.links_and_clones import own_bytes
from rankless.storage.store import store_of

#: The share of a checkpoint's size below which its own disk space shows that it shares files. Files that are compressed
#: or sparse take less space than their size, too.
_SHARING = 0.95

#: Columns with as many different values, and more, are shown.
_SEVERAL = 2

#: How many characters of the id of a run are shown.
RUN_CHARACTERS = 6


@dataclass(frozen=True)
class RunListing:
    """The contents of a run directory: ``own`` has the disk space of each checkpoint by itself, by tag.

    ``parts`` are names of folders with a part of a checkpoint. ``best`` is the tag of the best checkpoint, if one was
    asked for.
    """

    path: Path
    checkpoints: Sequence[CheckpointInfo]
    own: Mapping[str, int]
    aliases: Mapping[str, Alias]
    leftovers: Sequence[StaleDirectory]
    parts: Sequence[str]
    best: str = ""

    @classmethod
    def of(cls, path: Path, checkpoints: Sequence[CheckpointInfo], best: str | None = None) -> RunListing:
        """Complete a list of checkpoints of a run. Raises ``InvalidArgumentError`` if ``best`` is no metric of them."""
        own = {info.tag: _own_bytes(info) for info in checkpoints}
        complete = [info for info in checkpoints if info.status == "complete"]
        ranked = [] if best is None else _rank(complete, *_parse_best(best))
        best_tag = ranked[0].tag if ranked else ""
        parts = list_parts_of_checkpoints(path, own)
        return cls(path, checkpoints, own, list_aliases(path), list_stale_directories(path), parts, best_tag)

    @property
    def state(self) -> list[tuple[str, str, str]]:
        """The tags, ids and states of the checkpoints, which change with the list."""
        return [(info.tag, info.id, info.status) for info in self.checkpoints]

    def aliases_of(self, info: CheckpointInfo) -> list[str]:
        """Return the aliases of a checkpoint."""
        return [name for name, alias in self.aliases.items() if means(alias, info)]


def _rank(complete: Sequence[CheckpointInfo], metric: str, mode: str) -> list[CheckpointInfo]:
    """Return the checkpoints from the best to the worst. Raises ``InvalidArgumentError`` if none has the metric."""
    ranked = sort_by_metric(complete, metric, mode)
    if complete and not ranked:
        metrics = ", ".join(sorted({name for info in complete for name in info.metrics})) or "none"
        raise InvalidArgumentError(f"no checkpoint has a finite metric {metric!r}; there are: {metrics}")
    return ranked


def _own_bytes(info: CheckpointInfo) -> int:
    """Return the disk space that no other checkpoint shares. Objects are never shared."""
    return info.nbytes if store_of(info.path).is_remote else own_bytes(info.path)


def _parse_best(text: str) -> tuple[str, str]:
    """Parse ``METRIC`` or ``METRIC:max``. Raises ``InvalidArgumentError``.

    For example, ``loss`` means the lowest loss, and ``accuracy:max`` the highest accuracy.
    """
    metric, colon, mode = text.rpartition(":")
    if colon and mode not in {"min", "max"}:
        raise InvalidArgumentError(f"--best must be METRIC, METRIC:min or METRIC:max; got {text!r}")
    return (metric, mode) if colon else (text, "min")


def build_table(listing: RunListing, leftovers: Sequence[StaleDirectory]) -> Table:
    """Return the table, without columns that say nothing about these checkpoints."""
    infos, now = listing.checkpoints, time.time()
    columns = [
        Column("tag", elastic="middle"),
        Column("alias", elastic="end"),
        Column("step", right=True),
        Column("saved"),
        Column("age", right=True),
        Column("ranks", right=True),
        Column("run"),
        Column("size", right=True),
        Column("own", right=True),
        Column("status"),
        Column("metrics", elastic="end"),
    ]
    complete = [info for info in infos if info.status == "complete"]
    useless = {"alias"} if not listing.aliases else set[str]()
    useless |= {"ranks"} if len({info.world_size for info in complete}) < _SEVERAL else set()
    useless |= {"run"} if len({info.run for info in complete}) < _SEVERAL else set()
    useless |= {"own"} if all(listing.own[info.tag] >= info.nbytes * _SHARING for info in infos) else set()
    useless |= {"metrics"} if not any(info.metrics for info in infos) else set()
    rows = [*(_format_row(listing, info, now) for info in infos), *map(_format_leftover, leftovers)]
    kept = [number for number, column in enumerate(columns) if column.title not in useless]
    return Table([columns[number] for number in kept], [[row[number] for number in kept] for row in rows])


def _format_leftover(leftover: StaleDirectory) -> list[Cell]:
    tag, saved, size = escape_control_characters(leftover.tag), format_time(leftover.time), format_size(leftover.nbytes)
    return [tag, "", "", saved, "", "", "", size, "", _leftover_status(leftover), ""]


def _leftover_status(leftover: StaleDirectory) -> Cell:
    if leftover.is_whole:
        return "whole, no tag", "yellow"
    return ("corrupt", "bold red") if leftover.state == "corrupt" else ("unfinished", "yellow")


def _complete_status(info: CheckpointInfo, marks: str) -> Cell:
    if not info.is_current:
        return "abandoned", "yellow"
    return (f"complete ({marks})", "bold green") if marks else ("complete", "green")


def _format_row(listing: RunListing, info: CheckpointInfo, now: float) -> list[Cell]:
    tag = escape_control_characters(info.tag)
    if info.status != "complete":
        return [tag, "", "", "", "", "", "", "", "", (info.status, "bold red"), ""]
    is_latest, is_best = info is listing.checkpoints[-1], info.tag == listing.best
    marks = ", ".join(mark for mark, is_set in (("latest", is_latest), ("best", is_best)) if is_set)
    return [
        tag,
        escape_control_characters(", ".join(listing.aliases_of(info))),
        "" if info.step is None else str(info.step),
        format_time(info.time),
        format_age(now - info.time),
        str(info.world_size or ""),
        info.run[:RUN_CHARACTERS],
        format_size(info.nbytes),
        format_size(listing.own[info.tag]),
        _complete_status(info, marks),
        escape_control_characters(format_metrics(info.metrics)),
    ]
