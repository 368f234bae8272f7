"""``holdfast ls``: the checkpoints of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.output import format_count, human_metrics, human_time, print_error, print_json
from holdfast.cli.table import Cell, Column, Table
from holdfast.cli.target import check_run
from holdfast.observe.terminal import escape_control_characters, terminal_console
from holdfast.observe.units import format_size
from holdfast.run.catalog import StaleDirectory, list_checkpoints, list_stale_directories
from holdfast.run.scan import CheckpointInfo
from holdfast.storage.posix import local_path


def ls(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's folder.")],
    show_all: Annotated[
        bool, typer.Option("--all", "-a", help="Also what saves that never ended left behind.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON, for programs.")] = False,
) -> None:
    """List the checkpoints of a run.

    Oldest first, but damaged ones before all others. "complete" says that the save was: verify reads the tensors. Exit
    code 1 if there is none, or a damaged one.
    """
    path = local_path(run)
    check_run(path)
    found = list_checkpoints(path)
    drafts = list_stale_directories(path)
    shown = drafts if show_all else []
    if as_json:
        _print_json(path, found, shown)
    elif found or shown:
        _print_table(found, shown)
    if not found:
        hidden = len(drafts) - len(shown)
        hint = f"--all shows {format_count(hidden, 'save')} that never ended." if hidden else ""
        print_error(f"there is no checkpoint in {path}", hint)
    raise typer.Exit(0 if found and all(info.status == "complete" for info in found) else 1)


def _print_json(path: Path, found: Sequence[CheckpointInfo], drafts: Sequence[StaleDirectory]) -> None:
    table = {
        "path": str(path),
        "latest": next((info.tag for info in found[-1:] if info.status == "complete"), None),
        "checkpoints": [_as_record(info) for info in found],
        "leftovers": [
            {"name": draft.name, "tag": draft.tag, "path": str(draft.path), "time": draft.time, "bytes": draft.nbytes}
            for draft in drafts
        ],
    }
    print_json(table)


def _as_record(info: CheckpointInfo) -> dict[str, object]:
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
    }


def _print_table(found: Sequence[CheckpointInfo], drafts: Sequence[StaleDirectory]) -> None:
    columns = [Column("tag", elastic="middle"), Column("step", right=True), Column("saved"), Column("size", right=True)]
    columns += [Column("status"), Column("metrics" if any(info.metrics for info in found) else "", elastic="end")]
    rows = [_row(info, latest=info is found[-1]) for info in found]
    rows += [
        [
            escape_control_characters(draft.tag),
            "",
            human_time(draft.time),
            format_size(draft.nbytes),
            _leftover_status(draft),
            "",
        ]
        for draft in drafts
    ]
    out = terminal_console()
    out.print(Table(columns, rows), end="")
    for info in found:
        if info.problem:
            out.print(f"{escape_control_characters(info.tag)}: {escape_control_characters(info.problem)}", style="red")
    if drafts:
        out.print("unfinished: a save in progress, or what is left of one that was killed", style="dim")


def _leftover_status(draft: StaleDirectory) -> Cell:
    return ("corrupt", "bold red") if draft.state == "corrupt" else ("unfinished", "yellow")


def _row(info: CheckpointInfo, *, latest: bool) -> list[Cell]:
    if info.status != "complete":
        return [escape_control_characters(info.tag), "", "", "", (info.status, "bold red"), ""]
    return [
        escape_control_characters(info.tag),
        "" if info.step is None else str(info.step),
        human_time(info.time),
        format_size(info.nbytes),
        ("complete (latest)", "bold green") if latest else ("complete", "green"),
        human_metrics(info.metrics),
    ]
