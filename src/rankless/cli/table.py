"""Tables of aligned text.

rich's table takes 45 s for the 150,000 tensors of a large mixture of experts; this one takes a second.

All commands that print a table use it. Text of a cell must be one line without control characters: callers escape text
from a checkpoint, with :func:`~rankless.observe.terminal.escape_control_characters`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.style import Style

#: Text, or text with a style.
Cell = str | tuple[str, str]

#: The minimum width of a column that is cut.
_MIN_WIDTH = 12


@dataclass(frozen=True, slots=True)
class Column:
    """A column. If a line is too long, ``elastic`` columns are cut in the middle or at the end."""

    title: str
    right: bool = False
    elastic: Literal["", "middle", "end"] = ""
    style: str = ""


@dataclass(frozen=True)
class Table:
    """A table with columns two spaces apart. It has no header if no column has a title."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]

    def __rich_console__(self, out: Console, options: ConsoleOptions) -> Iterator[Segment]:
        head = [(column.title, "bold") for column in self.columns]
        rows = [head, *self.rows] if any(column.title for column in self.columns) else self.rows
        widths = self._column_widths(rows, _available_width(out))
        styles: dict[str, Style] = {}
        for row in rows:
            texts = [
                _cut_text(_cell_text(cell), width, column)
                for cell, width, column in zip(row, widths, self.columns, strict=True)
            ]
            gap = ""
            for i, text in enumerate(texts):
                style = row[i][1] if isinstance(row[i], tuple) else self.columns[i].style
                fill = " " * (widths[i] - cell_len(text))
                if text:
                    yield Segment(gap + fill if self.columns[i].right else gap)
                    yield Segment(text, styles.setdefault(style, Style.parse(style)))
                    gap = ""
                gap += ("" if self.columns[i].right and text else fill) + "  "
            yield Segment.line()

    def _column_widths(self, rows: Sequence[Sequence[Cell]], width_limit: int | None) -> list[int]:
        widths = [max(cell_len(_cell_text(cell)) for cell in column) for column in zip(*rows, strict=True)]
        elastic = [i for i, column in enumerate(self.columns) if column.elastic]
        excess = 0 if width_limit is None or not elastic else sum(widths) + 2 * (len(widths) - 1) - width_limit
        for _ in range(excess):  # narrow the widest
            widest = max(elastic, key=widths.__getitem__)
            widths[widest] = max(_MIN_WIDTH, widths[widest] - 1)
        return widths


def _available_width(out: Console) -> int | None:
    """Return the width of the terminal, or ``None`` in a pipe, where names are not cut."""
    return out.width if out.is_terminal or os.environ.get("COLUMNS", "").isdigit() else None


def _cell_text(cell: Cell) -> str:
    return cell[0] if isinstance(cell, tuple) else cell


def _cut_text(text: str, width: int, column: Column) -> str:
    if cell_len(text) <= width:
        return text
    # The beginning and the end of a tensor's name are the most informative.
    head = (width - 1) // 2 if column.elastic == "middle" else width - 1
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"
