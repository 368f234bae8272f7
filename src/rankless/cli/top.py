"""``rankless top``: a live view of the saves of a training, on its disk and in its local tier.

It only reads, in one process, next to the training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from rankless.cli.checkpoint_argument import Local, check_run
from rankless.cli.command_process import leave_on_interrupt
from rankless.cli.live_view import LiveView, show_live
from rankless.cli.run_listing import RunListing, build_table
from rankless.cli.table import Cell, Column, Table
from rankless.errors import StorageError
from rankless.observe.terminal import escape_control_characters
from rankless.observe.units import format_age, format_rate, format_seconds, format_size, format_time
from rankless.run.aliases import list_meant
from rankless.run.catalog import list_checkpoints
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.journal import JournalEntry, read_journal
from rankless.run.pin import is_pinned
from rankless.run.run_store import StaleDirectory
from rankless.storage.location import parse_location
from rankless.storage.posix import free_bytes
from rankless.storage.store import store_of

#: The number of the latest checkpoints that are shown, and that the interval is computed from.
_LAST = 10

#: The shortest save that has a rate: a journal has microseconds, and may be corrupt.
_SHORTEST = 1e-6

#: The most entries of a journal in an object store that are read.
_ENTRIES = 50

#: The number of failed saves that are shown.
_FAILURES = 3


def top(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder.")],
    local: Local = None,
) -> None:
    """Show the saves of a training as they happen, until Ctrl-C.

    These are the latest checkpoints, the time since the last one, the usual interval, the rate and the stall, a save
    in progress, and for how many more checkpoints of this size the disk has space. "kept" counts the checkpoints that
    are still there, of all that were saved, and names those that retention leaves: with an alias, or pinned. With
    --local also show what the local tier has on this host.
    """
    path = parse_location(run)
    check_run(path)
    if local is not None:
        with leave_on_interrupt():
            from rankless.cli.tier import ls_local  # noqa: F401, PLC0415 - NumPy is slow to import
    show_live(path, lambda: _build_view(path, run, local))


def _build_view(path: Path, run: str, local: str | None) -> LiveView:
    infos = list_checkpoints(path)
    listing = RunListing.of(path, infos[-_LAST:])
    complete = [info for info in infos if info.status == "complete"]
    rows: list[tuple[str, Cell]] = [("run", escape_control_characters(str(path)))]
    rows += [*_describe_saves(complete), *_describe_disk(path, complete)] if complete else []
    rows += _describe_journal(path)
    rows += [("kept", _describe_kept(listing, complete))] if complete else []
    rows += [_describe_unfinished(save) for save in listing.leftovers if save.state == "partial"]
    content: list[RenderableType] = [Table([Column("", style="bold"), Column("", elastic="end")], rows), Text()]
    content += [build_table(listing, [])] if infos else [Text("no checkpoint yet")]
    if local is None:
        return LiveView(Group(*content), listing.state)
    from rankless.cli.tier.ls_local import TierListing  # noqa: PLC0415 - only with --local

    tier = TierListing.of(run, local)
    return LiveView(Group(*content, Text(), *tier.build()), (listing.state, tier.state))


def _describe_saves(complete: Sequence[CheckpointInfo]) -> Iterator[tuple[str, Cell]]:
    latest, age = complete[-1], format_age(time.time() - complete[-1].time)
    when = f"{age} ago" if age else f"at {format_time(latest.time)}, by a clock that is ahead"
    yield "last save", f"{escape_control_characters(latest.tag)}, {when}"
    if (seconds := usual_interval(complete)) is not None:
        yield "interval", f"{format_age(seconds)} between saves"


def _describe_journal(path: Path) -> Iterator[tuple[str, Cell]]:
    try:
        yield from _describe_costs(read_journal(path, _ENTRIES))
    except StorageError as error:
        yield "journal", (escape_control_characters(str(error)), "yellow")


def _describe_costs(entries: Sequence[JournalEntry]) -> Iterator[tuple[str, Cell]]:
    """Describe the cost of the last save, and the saves that have failed since."""
    ends = [entry for entry in entries if entry.kind in {"saved", "failed"}]
    numbers = [number for number, entry in enumerate(ends) if entry.kind == "saved"]
    last = ends[numbers[-1]] if numbers else None
    if last is not None and last.seconds >= _SHORTEST:
        rate = format_rate(last.nbytes - last.shared_nbytes, last.seconds)
        stall, durable = format_seconds(last.blocking_seconds), format_seconds(last.seconds)
        yield "speed", f"{rate}, stalled the training for {stall}, durable after {durable}"
    for entry in ends[numbers[-1] + 1 if numbers else 0 :][-_FAILURES:]:
        yield "failed", (escape_control_characters(f"{entry.tag}: {entry.error}"), "bold red")


def _describe_disk(path: Path, complete: Sequence[CheckpointInfo]) -> Iterator[tuple[str, Cell]]:
    """Describe the free space of a disk. An object store has no limit."""
    nbytes = complete[-1].nbytes
    if not store_of(path).is_remote and nbytes and (free := free_bytes(path)) is not None:
        text = f"{format_size(free)} free, for {free // nbytes:,} more checkpoints of {format_size(nbytes)}"
        yield "disk", (text, "" if free >= nbytes else "bold red")


def _describe_kept(listing: RunListing, complete: Sequence[CheckpointInfo]) -> str:
    names = store_of(listing.path).list_names(listing.path)
    aliases = [f"{name} = {tag}" for name, tag in list_meant(listing.path, listing.checkpoints).items()]
    pinned = [f"{info.tag} (pinned)" for info in complete if is_pinned(info, names)]
    count = f"{len(complete):,} of {max(len(complete), complete[-1].sequence):,} saves"
    return escape_control_characters(", ".join([count, *aliases, *pinned]))


def _describe_unfinished(save: StaleDirectory) -> tuple[str, Cell]:
    """Describe a save that is in progress, or was interrupted: this is unknown here."""
    age = format_age(max(0.0, time.time() - save.time))
    return "unfinished", (
        f"{escape_control_characters(save.tag)}, {format_size(save.nbytes)}, changed {age} ago",
        "yellow",
    )


def usual_interval(complete: Sequence[CheckpointInfo]) -> float | None:
    """Return the median of the seconds between saves of the latest run; ``None`` if it has only one checkpoint.

    Retention may have removed checkpoints between two: their sequence numbers tell how many saves there were.
    """
    infos = [info for info in complete if info.run == complete[-1].run][-_LAST:]
    intervals = [
        (new.time - old.time) / (new.sequence - old.sequence)
        for old, new in pairwise(infos)
        if new.sequence > old.sequence
    ]
    return median(intervals) if intervals else None
