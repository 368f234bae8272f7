"""``holdfast ls``: lists the checkpoints of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.output import format_count, format_metrics, format_time, print_error, print_json
from holdfast.cli.table import Cell, Column, Table
from holdfast.cli.target import check_run
from holdfast.observe.terminal import escape_control_characters, terminal_console
from holdfast.observe.units import format_size
from holdfast.run.catalog import StaleDirectory, list_checkpoints, list_stale_directories
from holdfast.run.scan import CheckpointInfo
from holdfast.storage.posix import local_path
from holdfast.storage.shared_files import own_bytes

#: The share of a checkpoint's size below which its own disk space shows that it shares files. Files that are compressed
#: or sparse take less space than their size, too.
_SHARING = 0.95


def ls(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder.")],
    show_all: Annotated[bool, typer.Option("--all", "-a", help="Also list what interrupted saves left.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """List the checkpoints of a run, oldest first.

    "own" is the disk space that no other checkpoint shares; it is shown if checkpoints share files. Corrupt checkpoints
    are listed before all others. "complete" means that the save was completed; only verify reads
    the tensors. The exit code is 1 if there is no checkpoint, or a corrupt one.
    """
    path = local_path(run)
    check_run(path)
    checkpoints = list_checkpoints(path)
    own = {info.tag: own_bytes(info.path) for info in checkpoints}
    leftovers = list_stale_directories(path)
    shown = leftovers if show_all else []
    if as_json:
        _print_json(path, checkpoints, own, shown)
    elif checkpoints or shown:
        _print_table(checkpoints, own, shown)
    if not checkpoints:
        hidden = len(leftovers) - len(shown)
        hint = f"--all also lists {format_count(hidden, 'interrupted save')}." if hidden else ""
        print_error(f"there is no checkpoint in {path}", hint)
    raise typer.Exit(0 if checkpoints and all(info.status == "complete" for info in checkpoints) else 1)


def _print_json(
    path: Path, checkpoints: Sequence[CheckpointInfo], own: Mapping[str, int], leftovers: Sequence[StaleDirectory]
) -> None:
    table = {
        "path": str(path),
        "latest": next((info.tag for info in checkpoints[-1:] if info.status == "complete"), None),
        "checkpoints": [_as_record(info, own[info.tag]) for info in checkpoints],
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
    print_json(table)


def _as_record(info: CheckpointInfo, own: int) -> dict[str, object]:
    readable = info.status == "complete"
    return {
        "tag": info.tag,
        "path": str(info.path),
        "status": info.status,
        "problem": info.problem or None,
        "step": info.step,
        "metrics": dict(info.metrics),
        "sequence": info.sequence if readable else None,
        "time": info.time if readable else None,
        "bytes": info.nbytes if readable else None,
        "own_bytes": own if readable else None,
    }


def _print_table(
    checkpoints: Sequence[CheckpointInfo], own: Mapping[str, int], leftovers: Sequence[StaleDirectory]
) -> None:
    shares = any(own[info.tag] < info.nbytes * _SHARING for info in checkpoints)
    columns = [Column("tag", elastic="middle"), Column("step", right=True), Column("saved"), Column("size", right=True)]
    columns += [Column("own" if shares else "", right=True), Column("status")]
    columns += [Column("metrics" if any(info.metrics for info in checkpoints) else "", elastic="end")]
    rows = [
        _format_row(info, format_size(own[info.tag]) if shares else "", latest=info is checkpoints[-1])
        for info in checkpoints
    ]
    rows += [
        [
            escape_control_characters(leftover.tag),
            "",
            format_time(leftover.time),
            format_size(leftover.nbytes),
            "",
            _leftover_status(leftover),
            "",
        ]
        for leftover in leftovers
    ]
    out = terminal_console()
    out.print(Table(columns, rows), end="")
    for info in checkpoints:
        if info.problem:
            out.print(f"{escape_control_characters(info.tag)}: {escape_control_characters(info.problem)}", style="red")
    if leftovers:
        out.print("unfinished: a save that is still running, or was interrupted", style="dim")


def _leftover_status(leftover: StaleDirectory) -> Cell:
    return ("corrupt", "bold red") if leftover.state == "corrupt" else ("unfinished", "yellow")


def _format_row(info: CheckpointInfo, own: str, *, latest: bool) -> list[Cell]:
    if info.status != "complete":
        return [escape_control_characters(info.tag), "", "", "", "", (info.status, "bold red"), ""]
    return [
        escape_control_characters(info.tag),
        "" if info.step is None else str(info.step),
        format_time(info.time),
        format_size(info.nbytes),
        own,
        ("complete (latest)", "bold green") if latest else ("complete", "green"),
        format_metrics(info.metrics),
    ]
