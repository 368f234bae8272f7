"""The output of the benchmarks: Markdown, JSON and a plot in ``benchmarks/results``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.measure import Figure, Table
from benchmarks.peers import OURS
from benchmarks.plot import draw_plot

RESULTS = Path(__file__).parent / "results"


def store_tables(tables: Sequence[Table], folder: Path, heading: Iterable[str]) -> None:
    """Merge tables with those of cases that were not run again, and write all of them."""
    folder.mkdir(exist_ok=True)
    merged = {table.title: table for table in (*_read_stored(folder / "figures.json"), *tables)}
    (folder / "figures.json").write_text(json.dumps([_to_plain(table) for table in merged.values()], indent=1) + "\n")
    (folder / "table.md").write_text("\n".join([*heading, *format_report(merged.values())]) + "\n")
    draw_plot(list(merged.values()), folder / "plot.png")


def format_report(tables: Iterable[Table]) -> Iterator[str]:
    """Return each contender's median and spread, relative to rankless and to the best limit."""
    yield ""
    yield "Each figure is the median of the rounds ± half the range between the quartiles. *x rankless*: how many times"
    yield "as much as rankless; *of the limit*: the best raw figure divided by this one."
    for table in tables:
        yield ""
        yield from format_table(table)


def format_table(table: Table) -> Iterator[str]:
    """Return one table."""
    limit = min((table.figures[name].median for name in table.limits), default=None)
    ours = next(figure.median for name, figure in table.figures.items() if name.startswith(OURS))
    yield f"| {table.title} | {table.unit} | x rankless |{' of the limit |' if limit else ''}"
    yield f"|---|---:|---:|{'---:|' if limit else ''}"
    for name, figure in table.figures.items():
        ratio = f"{figure.median / ours:.2f}" if ours > 0 else ""
        of_limit = f" {limit / figure.median:.2f} |" if limit else ""
        spread = f" ± {figure.spread:.0%}" if len(figure.rounds) > 1 else ""
        yield f"| {name} | {_format_number(figure.median)}{spread} | {ratio} |{of_limit}"
    if table.note:
        yield f"\n{table.note}"


def _format_number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"  # noqa: PLR2004 - three digits


def _read_stored(file: Path) -> Iterator[Table]:
    """Return the stored tables: cases that are not run again keep their results."""
    for row in json.loads(file.read_text()) if file.is_file() else []:
        figures = {name: Figure(tuple(rounds)) for name, rounds in row["figures"].items()}
        yield Table(row["title"], row["unit"], figures, tuple(row["limits"]), row["note"])


def _to_plain(table: Table) -> Mapping[str, object]:
    figures = {name: figure.rounds for name, figure in table.figures.items()}
    return {
        "title": table.title,
        "unit": table.unit,
        "limits": table.limits,
        "note": table.note,
        "figures": figures,
    }
