"""``holdfast diff``: which tensors and values of two checkpoints differ, and by how much."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli import target
from holdfast.cli.completion import complete_checkpoints
from holdfast.cli.diff import report
from holdfast.cli.diff.compare import CheckpointComparison, compare_checkpoints
from holdfast.cli.output import print_error, print_json
from holdfast.observe.terminal import terminal_console


def diff(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A", help="A checkpoint of any format, or a run: its latest.", autocompletion=complete_checkpoints
        ),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="The same.", autocompletion=complete_checkpoints)],
    pattern: Annotated[
        str | None, typer.Argument(metavar="PATTERN", help="Only tensors of these names: a glob, or part of a name.")
    ] = None,
    tag: Annotated[
        str | None,
        typer.Option("--tag", metavar="TAG", help="Of two runs: the checkpoints of this tag, not the latest."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON, for programs.")] = False,
) -> None:
    """Tell which tensors and values of two checkpoints differ, and by how much.

    Exit code 1 where any does. Tensors whose checksums agree are not read. Elements are compared bit by bit; those of
    different dtypes by value. REL is the largest |a - b| / max(|a|, |b|).
    """
    left, right = (target.inspect_path(target.named_path(path, tag)) for path in (a, b))
    found = compare_checkpoints(left, right, pattern)
    if pattern is not None and not found.compared:
        print_error(f"no tensor of either matches {pattern!r}", "Without a pattern all are compared.")
        raise typer.Exit(1)
    if as_json:
        print_json(report.comparison_record(found))
    else:
        _print(found)
    raise typer.Exit(0 if found.is_equal else 1)


def _print(found: CheckpointComparison) -> None:
    out = terminal_console()
    for part in report.comparison_tables(found):
        out.print(part)
    if found.is_equal:
        out.print("no difference", style="bold green", end="  ")
    out.print(report.comparison_summary(found), style="dim")
    for note in found.notes:
        out.print(note, style="dim")
