"""``rankless diff``: compares the tensors and values of two checkpoints.

It only reads, in one process.
"""

from __future__ import annotations

from typing import Annotated

import typer

from rankless.cli import checkpoint_argument
from rankless.cli.command_process import leave_on_interrupt
from rankless.cli.completion import complete_checkpoints
from rankless.cli.diff import diff_output
from rankless.cli.output import print_error, print_json
from rankless.inspection import inspected_checkpoint
from rankless.inspection.compare import CheckpointComparison, compare_metadata, compare_suspects
from rankless.observe.terminal import show_progress, terminal_console


def diff(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="A checkpoint of any format, or a run's folder for its latest one.",
            autocompletion=complete_checkpoints,
        ),
    ],
    b: Annotated[
        str, typer.Argument(metavar="B", help="The other checkpoint or run.", autocompletion=complete_checkpoints)
    ],
    pattern: Annotated[
        str | None, typer.Argument(metavar="PATTERN", help="Compare only these tensors: a glob, or part of a name.")
    ] = None,
    tag: Annotated[
        str | None,
        typer.Option(
            "--tag", metavar="TAG", help="If A and B are runs: the checkpoints with this tag; default: the latest."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Show which tensors and values of two checkpoints differ, and by how much.

    The exit code is 1 if anything differs. Tensors with equal checksums are not read. Elements are compared bit by bit,
    and those of different dtypes by value. "max rel" is the largest |a - b| / max(|a|, |b|).
    """
    left, right = (inspected_checkpoint.inspect_path(checkpoint_argument.resolve_path(path, tag)) for path in (a, b))
    comparison = compare_metadata(left, right, pattern)
    if comparison.suspect:
        with leave_on_interrupt():
            from rankless.inspection import tensor_differences  # noqa: F401, PLC0415 - NumPy is slow to import
        with show_progress("comparing", comparison.suspect_nbytes) as done:
            comparison = compare_suspects(comparison, done)
    if pattern is not None and not comparison.compared:
        print_error(
            f"no tensor of either checkpoint matches {pattern!r}", "Without a pattern all tensors are compared."
        )
        raise typer.Exit(1)
    if as_json:
        print_json(diff_output.comparison_record(comparison))
    else:
        _print_comparison(comparison)
    raise typer.Exit(0 if comparison.is_equal else 1)


def _print_comparison(comparison: CheckpointComparison) -> None:
    out = terminal_console()
    if not comparison.is_equal:
        out.print(diff_output.comparison_headline(comparison), style="bold")
    for table in diff_output.comparison_tables(comparison):
        out.print(table)
    if comparison.is_equal:
        out.print("no difference", style="bold green", end="  ")
    out.print(diff_output.comparison_summary(comparison), style="dim")
    for note in comparison.notes:
        out.print(note, style="dim")
