"""What people see of the figures: Markdown, JSON and a plot, in ``benchmarks/results``."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.measure import Figure, Table
from benchmarks.peers import OURS

RESULTS = Path(__file__).parent / "results"


def keep(found: Sequence[Table], folder: Path = RESULTS) -> None:
    """Put tables beside those of cases that were not run again, and write them all."""
    folder.mkdir(exist_ok=True)
    every = {table.title: table for table in (*_kept(folder / "figures.json"), *found)}
    (folder / "figures.json").write_text(json.dumps([_plain(table) for table in every.values()], indent=1) + "\n")
    (folder / "table.md").write_text("\n".join(markdown(every.values())) + "\n")
    plot(list(every.values()), folder / "plot.png")


def markdown(tables: Iterable[Table]) -> Iterator[str]:
    """Of each contender the median, the spread, and how it stands to us and to the best of the limits."""
    yield f"{os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}; median of the rounds"
    yield "± half the range between the quartiles. *x holdfast*: how many times as much as holdfast; *of the limit*:"
    yield "the best raw figure divided by this one."
    for table in tables:
        yield ""
        yield from _rows(table)


def _rows(table: Table) -> Iterator[str]:
    limit = min((table.figures[name].median for name in table.limits), default=None)
    ours = next(figure.median for name, figure in table.figures.items() if name.startswith(OURS))
    yield f"| {table.title} | {table.unit} | x holdfast |{' of the limit |' if limit else ''}"
    yield f"|---|---:|---:|{'---:|' if limit else ''}"
    for name, figure in table.figures.items():
        ratio = f"{figure.median / ours:.2f}" if ours > 0 else ""
        rest = f" {limit / figure.median:.2f} |" if limit else ""
        yield f"| {name} | {_number(figure.median)} ± {figure.spread:.0%} | {ratio} |{rest}"
    if table.note:
        yield f"\n{table.note}"


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"  # noqa: PLR2004 - three digits


def plot(tables: Sequence[Table], path: Path) -> None:
    """How many times as long as holdfast others take, case by case."""
    import matplotlib as mpl  # noqa: PLC0415 - only here, and slow to import

    mpl.use("agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    timed = [table for table in tables if table.unit == "s" and OURS in table.figures]
    rows = [
        (table.title, name, figure.median / table.figures[OURS].median)
        for table in timed
        for name, figure in table.figures.items()
        if name not in table.limits and not name.startswith(OURS)
    ]
    names = sorted({name for _, name, _ in rows})
    titles = [table.title for table in timed][::-1]
    chart, axes = plt.subplots(figsize=(9, 1.5 + 0.32 * len(titles)), layout="constrained")
    for name in names:
        points = [(ratio, titles.index(title)) for title, one, ratio in rows if one == name]
        across, up = ([point[axis] for point in points] for axis in (0, 1))
        axes.scatter(across, up, s=28, label=name, alpha=0.85)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_yticks(range(len(titles)), titles, fontsize=8)
    axes.set_xlabel("times as long as holdfast (right of the line: slower)")
    axes.grid(axis="x", which="both", alpha=0.25)
    chart.legend(fontsize=7, loc="outside lower center", ncols=4)
    chart.savefig(path, dpi=130)
    plt.close(chart)


def _kept(file: Path) -> Iterator[Table]:
    """What was measured before: cases that are not run again keep their figures."""
    for row in json.loads(file.read_text()) if file.is_file() else []:
        figures = {name: Figure(tuple(rounds)) for name, rounds in row["figures"].items()}
        yield Table(row["title"], row["unit"], figures, tuple(row["limits"]), row["note"])


def _plain(table: Table) -> Mapping[str, object]:
    figures = {name: figure.rounds for name, figure in table.figures.items()}
    return {
        "title": table.title,
        "unit": table.unit,
        "limits": table.limits,
        "note": table.note,
        "figures": figures,
    }
