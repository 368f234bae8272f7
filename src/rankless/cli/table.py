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

#: The width to which names may be cut while other cells are on the same line. Shorter names may lose a quarter.
_READABLE_WIDTH = 32

#: The width of names that do not take a line of their own.
_SHORT_WIDTH = 16

#: The beginning of the further lines of a row.
_INDENT = "  "


@dataclass(frozen=True, slots=True)
class Column:
    """A column. If a line is too long, ``elastic`` columns are cut in the middle or at the end."""

    title: str
    right: bool = False
    elastic: Literal["", "middle", "end"] = ""
    style: str = ""


@dataclass(frozen=True)
class Table:
    """A table with columns two spaces apart. It has no header if no column has a title.

    If a terminal is so narrow that names could not be read, a row takes several lines: a long name its own, and the
    other cells the next ones, indented.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]

    def __rich_console__(self, out: Console, options: ConsoleOptions) -> Iterator[Segment]:
        head = [(column.title, "bold") for column in self.columns]
        rows = [head, *self.rows] if any(column.title for column in self.columns) else self.rows
        widths, lines = self._arrange(rows, _available_width(out))
        styles: dict[str, Style] = {}
        for row in rows:
            texts = [
                _cut_text(_cell_text(cell), width, column)
                for cell, width, column in zip(row, widths, self.columns, strict=True)
            ]
            for number, line in enumerate(lines):
                gap = _INDENT if number else ""
                for i in line if not number or any(texts[i] for i in line) else ():
                    style = row[i][1] if isinstance(row[i], tuple) else self.columns[i].style
                    fill = " " * (widths[i] - cell_len(texts[i]))
                    if texts[i]:
                        yield Segment(gap + fill if self.columns[i].right else gap)
                        yield Segment(texts[i], styles.setdefault(style, Style.parse(style)))
                        gap = ""
                    gap += ("" if self.columns[i].right and texts[i] else fill) + "  "
                if not number or any(texts[i] for i in line):
                    yield Segment.line()

    def _arrange(self, rows: Sequence[Sequence[Cell]], width_limit: int | None) -> tuple[list[int], list[list[int]]]:
        """Return the width of each column, and the columns of each line that a row takes."""
        widths = [max(cell_len(_cell_text(cell)) for cell in column) for column in zip(*rows, strict=True)]
        elastic = [i for i, column in enumerate(self.columns) if column.elastic]
        all_columns = list(range(len(widths)))
        if width_limit is None or not elastic:
            return widths, [all_columns]
        narrowed = list(widths)
        for _ in range(_line_width(widths) - width_limit):  # narrow the widest
            widest = max(elastic, key=narrowed.__getitem__)
            narrowed[widest] = max(_MIN_WIDTH, narrowed[widest] - 1)
        if _line_width(narrowed) <= width_limit and narrowed[0] >= min(3 * widths[0] // 4, _READABLE_WIDTH):
            return narrowed, [all_columns]
        if len(widths) == len(elastic):
            return narrowed, [all_columns]
        return _stack(widths, width_limit)


def _stack(widths: Sequence[int], width_limit: int) -> tuple[list[int], list[list[int]]]:
    """Return the widths and lines of rows that take several lines. Short names have other cells on their line."""
    cut = [min(widths[0], width_limit), *(min(width, width_limit - len(_INDENT)) for width in widths[1:])]
    lines: list[list[int]] = [[0], []] if widths[0] > _SHORT_WIDTH else [[0]]
    for i in range(1, len(cut)):
        if lines[-1] and _line_width([cut[j] for j in (*lines[-1], i)]) > width_limit - len(_INDENT):
            lines.append([])
        lines[-1].append(i)
    return cut, lines


def _line_width(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


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
