"""``rankless stats``: shows the statistics of the tensors of a checkpoint.

It only reads, in one process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from rankless.cli import checkpoint_argument
from rankless.cli.command_process import leave_on_interrupt
from rankless.cli.completion import complete_checkpoints
from rankless.cli.format_values import as_plain_value
from rankless.cli.output import print_error, print_json
from rankless.cli.table import Cell, Column, Table
from rankless.inspection import inspected_checkpoint
from rankless.inspection.checkpoint_statistics import measure_checkpoint, select_tensors
from rankless.inspection.inspected_checkpoint import InspectedCheckpoint
from rankless.inspection.kept_statistics import find_statistics
from rankless.inspection.tensor_statistics import TensorStatistics, bucket_bounds
from rankless.observe.terminal import escape_control_characters, show_progress, terminal_console
from rankless.observe.units import format_count

#: The columns of numbers: their titles, and the attributes of statistics.
_NUMBERS = {"min": "minimum", "max": "maximum", "mean": "mean", "std": "std", "norm": "norm"}


def stats(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CKPT|RUN",
            help="A checkpoint of any format, or a run's folder for its latest one.",
            autocompletion=complete_checkpoints,
        ),
    ],
    pattern: Annotated[
        str | None, typer.Argument(metavar="PATTERN", help="Show only these tensors: a glob, or part of a name.")
    ] = None,
    tag: checkpoint_argument.Tag = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Show the minimum, maximum, mean, standard deviation and norm of each tensor, and how many NaNs and infs it has.

    Tensors are read and verified, unless the checkpoint was saved with stats=True: then the statistics that are kept
    with it are shown. All but the numbers of NaNs and infs are those of the finite elements. The JSON output also has a
    histogram of each tensor. The exit code is 1 if no tensor matches PATTERN.
    """
    inspected = inspected_checkpoint.inspect_path(checkpoint_argument.resolve_path(checkpoint, tag))
    keys = select_tensors(inspected, pattern)
    if pattern is not None and not keys:
        print_error(f"no tensor of {inspected.path} matches {pattern!r}", "Without a pattern all tensors are shown.")
        raise typer.Exit(1)
    statistics = _find_or_compute(inspected, keys)
    if as_json:
        print_json(_json_record(inspected, keys, statistics))
    else:
        _print_table(inspected, keys, statistics)


def _find_or_compute(inspected: InspectedCheckpoint, keys: Sequence[tuple[str, str]]) -> Mapping[str, TensorStatistics]:
    kept = find_statistics(inspected)
    if kept is not None:
        return kept.tensors
    with leave_on_interrupt():
        from rankless.inspection import measured_tensors  # noqa: F401, PLC0415 - NumPy is slow to import
    nbytes = sum(inspected.reader.groups[group][name].nbytes for group, name in keys)
    with show_progress("reading", nbytes) as done:
        return measure_checkpoint(inspected, keys, done).tensors


def _print_table(
    inspected: InspectedCheckpoint, keys: Sequence[tuple[str, str]], statistics: Mapping[str, TensorStatistics]
) -> None:
    columns = [
        Column("tensor", elastic="middle"),
        Column("dtype"),
        *(Column(title, right=True) for title in (*_NUMBERS, "zeros", "NaN", "inf")),
    ]
    rows = [
        _table_row(name, inspected.reader.groups[group][name].dtype, statistics[f"{group}/{name}"], group)
        for group, name in keys
    ]
    out = terminal_console()
    out.print(Table(columns, rows))
    out.print(_summary_line([statistics[f"{group}/{name}"] for group, name in keys]), style="dim")
    for note in inspected.notes:
        out.print(escape_control_characters(note), style="yellow")


def _table_row(name: str, dtype: str, of: TensorStatistics, group: str) -> list[Cell]:
    infinities = of.positive_infinities + of.negative_infinities
    numbers = [_format_number(getattr(of, attribute)) for attribute in _NUMBERS.values()]
    counts = [_format_share(of.zeros, of.elements), *(f"{count:,}" if count else "" for count in (of.nans, infinities))]
    style = "bold red" if of.nans or infinities else ""
    return [(text, style) for text in (escape_control_characters(f"{group}/{name}"), dtype, *numbers, *counts)]


def _format_number(number: float | None) -> str:
    return "" if number is None else f"{number:.4g}"


def _format_share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if part else ""


def _summary_line(of_tensors: Sequence[TensorStatistics]) -> str:
    elements = sum(of.elements for of in of_tensors)
    not_finite = sum(of.finite < of.elements for of in of_tensors)
    text = f"{format_count(len(of_tensors), 'tensor')}, {format_count(elements, 'element')}"
    return f"{text}; {format_count(not_finite, 'tensor')} with NaN or inf" if not_finite else f"{text}, all finite"


def _json_record(
    inspected: InspectedCheckpoint, keys: Sequence[tuple[str, str]], statistics: Mapping[str, TensorStatistics]
) -> dict[str, Any]:
    groups = inspected.reader.groups
    return {
        "path": str(inspected.path),
        "tensors": [
            {
                "name": f"{group}/{name}",
                "dtype": groups[group][name].dtype,
                "shape": list(groups[group][name].shape),
                **_statistics_record(statistics[f"{group}/{name}"]),
            }
            for group, name in keys
        ],
        "notes": list(inspected.notes),
    }


def _statistics_record(of: TensorStatistics) -> dict[str, Any]:
    """Return statistics as JSON. The histogram has ``[from, to, count]`` of each bucket that is not empty."""
    buckets = [(*bucket_bounds(bucket), count) for bucket, count in enumerate(of.histogram) if count]
    histogram = [[*(bound if math.isfinite(bound) else None for bound in bounds), count] for *bounds, count in buckets]
    return {**as_plain_value(asdict(of)), "histogram": histogram}
