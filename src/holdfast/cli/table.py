"""Aligned columns of text.

Our own, as rich's table takes 45 s for the 150,000 tensors of a large mixture of experts, and this one a second.
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

#: No column is cut to less than this.
_LEAST = 12


@dataclass(frozen=True, slots=True)
class Column:
    """One column. An ``elastic`` one is cut where the line would be too long, in the middle or at its end."""

    title: str
    right: bool = False
    elastic: Literal["", "middle", "end"] = ""
    style: str = ""


@dataclass(frozen=True)
class Table:
    """Aligned columns, two spaces apart. Without any title there is no head."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]

    def __rich_console__(self, out: Console, options: ConsoleOptions) -> Iterator[Segment]:
        head = [(column.title, "bold") for column in self.columns]
        rows = [head, *self.rows] if any(column.title for column in self.columns) else self.rows
        widths = self._widths(rows, _room(out))
        styles: dict[str, Style] = {}
        for row in rows:
            texts = [
                _fit(_text(cell), width, column) for cell, width, column in zip(row, widths, self.columns, strict=True)
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

    def _widths(self, rows: Sequence[Sequence[Cell]], room: int | None) -> list[int]:
        widths = [max(cell_len(_text(cell)) for cell in column) for column in zip(*rows, strict=True)]
        elastic = [i for i, column in enumerate(self.columns) if column.elastic]
        excess = 0 if room is None or not elastic else sum(widths) + 2 * (len(widths) - 1) - room
        for _ in range(excess):  # the widest gives way
            widest = max(elastic, key=widths.__getitem__)
            widths[widest] = max(_LEAST, widths[widest] - 1)
        return widths


def _room(out: Console) -> int | None:
    """The columns there are; ``None`` where nobody looks on, and names should come out whole."""
    return out.width if out.is_terminal or os.environ.get("COLUMNS", "").isdigit() else None


def _text(cell: Cell) -> str:
    return cell[0] if isinstance(cell, tuple) else cell


def _fit(text: str, room: int, column: Column) -> str:
    if cell_len(text) <= room:
        return text
    # In names of tensors the beginning and the end tell most.
    head = (room - 1) // 2 if column.elastic == "middle" else room - 1
    return f"{text[:head]}…{text[len(text) - (room - 1 - head) :]}"
