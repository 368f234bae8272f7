"""``holdfast ls``: lists the checkpoints of a run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live

from holdfast.cli.output import print_error, print_json
from holdfast.cli.process import leave_on_interrupt
from holdfast.cli.table import Cell, Column, Table
from holdfast.cli.target import Local, check_run
from holdfast.errors import InvalidArgumentError
from holdfast.observe.terminal import escape_control_characters, terminal_console
from holdfast.observe.units import format_age, format_count, format_metrics, format_size, format_time
from holdfast.run.aliases import Alias, list_aliases
from holdfast.run.catalog import StaleDirectory, list_checkpoints, list_stale_directories
from holdfast.run.retention import sort_by_metric
from holdfast.run.scan import CheckpointInfo
from holdfast.storage.object_path import ObjectPath, parse_location
from holdfast.storage.shared_files import own_bytes

if TYPE_CHECKING:
    from holdfast.cli.tier.ls import TierListing

#: The share of a checkpoint's size below which its own disk space shows that it shares files. Files that are compressed
#: or sparse take less space than their size, too.
_SHARING = 0.95

#: Columns with as many different values, and more, are shown.
_SEVERAL = 2

#: Seconds between two looks at the directory with ``--watch``.
_WATCH_SECONDS = 2.0

#: How many characters of the id of a run are shown.
_RUN_CHARACTERS = 6


@dataclass(frozen=True)
class _Listing:
    """The contents of a run directory: ``own`` has the disk space of each checkpoint by itself, by tag.

    ``best`` is the tag of the best checkpoint, if one was asked for.
    """

    path: Path
    checkpoints: Sequence[CheckpointInfo]
    own: Mapping[str, int]
    aliases: Mapping[str, Alias]
    leftovers: Sequence[StaleDirectory]
    best: str = ""

    @classmethod
    def of(cls, path: Path, best: str | None) -> _Listing:
        checkpoints = list_checkpoints(path)
        own = {info.tag: _own_bytes(info) for info in checkpoints}
        complete = [info for info in checkpoints if info.status == "complete"]
        ranked = sort_by_metric(complete, *_parse_best(best)) if best is not None else []
        if best is not None and complete and not ranked:
            metrics = ", ".join(sorted({name for info in complete for name in info.metrics})) or "none"
            raise InvalidArgumentError(f"no checkpoint has a finite metric {best!r}; there are: {metrics}")
        best_tag = ranked[0].tag if ranked else ""
        return cls(path, checkpoints, own, list_aliases(path), list_stale_directories(path), best_tag)

    def aliases_of(self, info: CheckpointInfo) -> list[str]:
        """Return the aliases of a checkpoint."""
        return [name for name, alias in self.aliases.items() if alias == Alias(info.tag, info.id)]


def _own_bytes(info: CheckpointInfo) -> int:
    """Return the disk space that no other checkpoint shares. Objects are never shared."""
    return info.nbytes if isinstance(info.path, ObjectPath) else own_bytes(info.path)


def _parse_best(text: str) -> tuple[str, str]:
    """Parse ``METRIC`` or ``METRIC:max``. Raises ``InvalidArgumentError``."""
    metric, colon, mode = text.rpartition(":")
    if colon and mode not in {"min", "max"}:
        raise InvalidArgumentError(f"--best must be METRIC, METRIC:min or METRIC:max; got {text!r}")
    return (metric, mode) if colon else (text, "min")


def ls(  # noqa: PLR0917 - options of the command
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder.")],
    show_all: Annotated[bool, typer.Option("--all", "-a", help="Also list what interrupted saves left.")] = False,
    best: Annotated[
        str | None, typer.Option(metavar="METRIC[:max]", help="Mark the best checkpoint by a metric.")
    ] = None,
    local: Local = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show the list again when it changes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """List the checkpoints of a run, oldest first.

    "own" is the disk space that no other checkpoint shares; it is shown if checkpoints share files. Corrupt checkpoints
    are listed before all others. "complete" means that the save was completed; only verify reads
    the tensors. The exit code is 1 if there is no checkpoint, or a corrupt one. With --local also list what the
    local tier has on this host.
    """
    path = parse_location(run)
    if local is None:
        check_run(path)
    if watch and as_json:
        raise InvalidArgumentError("--watch and --json cannot be used together: leave one of them out")
    if watch and local is not None:
        raise InvalidArgumentError("--watch and --local cannot be used together: leave one of them out")
    tier = None if local is None else _list_tier(run, local)
    if watch:
        _watch(path, best, show_all=show_all)
    listing = _Listing.of(path, best)
    checkpoints, shown = listing.checkpoints, listing.leftovers if show_all else []
    if as_json:
        _print_json(listing, shown, tier)
    elif checkpoints or shown:
        _print_table(listing, shown)
    if tier is not None and not as_json:
        tier.print()
    if not checkpoints and not (tier is not None and tier.generations):
        hidden = len(listing.leftovers) - len(shown)
        hint = f"--all also lists {format_count(hidden, 'interrupted save')}." if hidden else ""
        print_error(f"there is no checkpoint in {path}", hint)
        raise typer.Exit(1)
    is_corrupt = any(info.status != "complete" for info in checkpoints) or (tier is not None and tier.is_corrupt)
    raise typer.Exit(1 if is_corrupt else 0)


def _list_tier(run: str, local: str) -> TierListing:
    with leave_on_interrupt():
        from holdfast.cli.tier.ls import TierListing  # noqa: PLC0415 - NumPy is slow to import
    return TierListing.of(run, local)


def _watch(path: Path, best: str | None, *, show_all: bool) -> None:
    """Show the table until the user presses Ctrl-C. On no terminal, print it when the checkpoints have changed."""
    out, seen = terminal_console(), None
    with Live(console=out, auto_refresh=False, transient=True) as live:
        while True:
            listing = _Listing.of(path, best)
            shown = listing.leftovers if show_all else []
            if out.is_terminal:
                live.update(_build_table(listing, shown), refresh=True)
            elif seen != (state := [(info.tag, info.id, info.status) for info in listing.checkpoints]):
                seen = state
                out.print(_build_table(listing, shown))
            time.sleep(_WATCH_SECONDS)


def _print_json(listing: _Listing, leftovers: Sequence[StaleDirectory], tier: TierListing | None) -> None:
    checkpoints = listing.checkpoints
    table = {
        "path": str(listing.path),
        "latest": next((info.tag for info in checkpoints[-1:] if info.status == "complete"), None),
        "best": listing.best or None,
        "checkpoints": [_as_record(listing, info) for info in checkpoints],
        "leftovers": [
            {
                "name": leftover.name,
                "tag": leftover.tag,
                "path": str(leftover.path),
                "time": leftover.time,
                "bytes": leftover.nbytes,
            }
            for leftover in leftovers
        ],
    }
    print_json(table if tier is None else {**table, "local": tier.as_record()})


def _as_record(listing: _Listing, info: CheckpointInfo) -> dict[str, object]:
    readable = info.status == "complete"
    return {
        "tag": info.tag,
        "path": str(info.path),
        "status": info.status,
        "problem": info.problem or None,
        "step": info.step,
        "metrics": dict(info.metrics),
        "aliases": listing.aliases_of(info),
        "sequence": info.sequence if readable else None,
        "time": info.time if readable else None,
        "run": info.run if readable else None,
        "world_size": info.world_size or None,
        "bytes": info.nbytes if readable else None,
        "own_bytes": listing.own[info.tag] if readable else None,
    }


def _print_table(listing: _Listing, leftovers: Sequence[StaleDirectory]) -> None:
    out = terminal_console()
    out.print(_build_table(listing, leftovers), end="")
    for info in listing.checkpoints:
        if info.problem:
            out.print(f"{escape_control_characters(info.tag)}: {escape_control_characters(info.problem)}", style="red")
    if leftovers:
        out.print("unfinished: a save that is still running, or was interrupted", style="dim")


def _build_table(listing: _Listing, leftovers: Sequence[StaleDirectory]) -> Table:
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
    return ("corrupt", "bold red") if leftover.state == "corrupt" else ("unfinished", "yellow")


def _format_row(listing: _Listing, info: CheckpointInfo, now: float) -> list[Cell]:
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
        info.run[:_RUN_CHARACTERS],
        format_size(info.nbytes),
        format_size(listing.own[info.tag]),
        (f"complete ({marks})", "bold green") if marks else ("complete", "green"),
        escape_control_characters(format_metrics(info.metrics)),
    ]
