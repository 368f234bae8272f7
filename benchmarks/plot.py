"""The plot of the results: times relative to rankless, with a panel for each kind of work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Table
from benchmarks.peers import OURS

#: The panels, with the prefixes of their tables' titles. Other tables are in the Markdown file only.
PANELS = {
    "saves": ("save",),
    "asynchronous saves": ("stall", "until durable", "loop"),
    "loads": ("load", "one tensor"),
    "conversions": ("conversion",),
}

#: The height of a row, and of a panel without rows, in inches.
_ROW, _FRAME, _WIDTH = 0.24, 0.55, 10

#: The fastest setting of each system, by panel, table and system.
Ratios = Mapping[str, Mapping[str, Mapping[str, float]]]


def draw_plot(tables: Sequence[Table], path: Path) -> None:
    """Plot the fastest setting of each system, in panels with one scale."""
    import matplotlib as mpl  # noqa: PLC0415 - only here, and slow to import

    mpl.use("agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: PLC0415

    panels = compute_ratios(tables)
    if not panels:
        return
    heights = [_ROW * len(rows) + _FRAME for rows in panels.values()]
    colors = _choose_colors(panels, plt.get_cmap("tab10"))
    chart, subplots = plt.subplots(
        *(len(panels), 1),
        figsize=(_WIDTH, sum(heights) + 1),
        height_ratios=heights,
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for axes, (panel, rows) in zip(subplots[:, 0], panels.items(), strict=True):
        _draw_panel(axes, panel, rows, colors)
    scale = subplots[-1, 0].xaxis
    scale.set_major_locator(LogLocator(subs=(1, 2, 5)))
    scale.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    scale.set_minor_formatter(NullFormatter())
    subplots[-1, 0].set_xlabel("times as long as rankless, each system at its fastest setting")
    marks = [plt.Line2D([], [], marker="o", linestyle="", color=color, label=name) for name, color in colors.items()]
    chart.legend(handles=marks, fontsize=8, loc="outside lower center", ncols=4)
    chart.savefig(path, dpi=130)
    plt.close(chart)


def compute_ratios(tables: Sequence[Table]) -> Ratios:
    """Return the time of each system's fastest setting relative to rankless, by panel and table."""
    rows = {table.title: _compute_row(table) for table in tables if table.unit == "s" and OURS in table.figures}
    panels = {
        panel: {title: row for title, row in rows.items() if title.startswith(beginnings) and row}
        for panel, beginnings in PANELS.items()
    }
    return {panel: ratios_by_table for panel, ratios_by_table in panels.items() if ratios_by_table}


def _compute_row(table: Table) -> dict[str, float]:
    ratios: dict[str, float] = {}
    for name, figure in table.figures.items():
        system, ratio = name.split(",", 1)[0], figure.median / table.figures[OURS].median
        if name not in table.limits and system != OURS:
            ratios[system] = min(ratio, ratios.get(system, ratio))
    return ratios


def _choose_colors(panels: Ratios, colors: Any) -> dict[str, Any]:
    systems = dict.fromkeys(system for rows in panels.values() for row in rows.values() for system in row)
    return {system: colors(number % colors.N) for number, system in enumerate(systems)}


def _draw_panel(axes: Any, panel: str, rows: Mapping[str, Mapping[str, float]], colors: Mapping[str, Any]) -> None:
    for height, row in enumerate(rows.values()):
        for system, ratio in row.items():
            axes.scatter(ratio, height, s=32, color=colors[system], alpha=0.85)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="x", which="both", alpha=0.25)
    axes.set_title(panel, loc="left", fontsize=10, fontweight="bold")
