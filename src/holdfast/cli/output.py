"""How every command speaks: aligned tables, sizes and times for people, JSON for programs, errors.

Tables are our own, as rich's take 45 s for the 150,000 tensors of a large mixture of experts, and these half a second.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.style import Style

from holdfast.errors import FormatError, NoCheckpointError

#: Text, or text with a style.
Cell = str | tuple[str, str]

#: No column is cut to less than this.
_LEAST = 12

_HINTS = {
    NoCheckpointError: "Name a checkpoint's folder or file, or the folder of a run that has one.",
    FormatError: "Name a checkpoint's folder or file, or the folder of a run.",
}


def console(*, stderr: bool = False) -> Console:
    """A console that prints text as it is: names in a checkpoint may look like markup."""
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=True)


def width(out: Console) -> int | None:
    """The columns there are; ``None`` where nobody looks on, and names should come out whole."""
    return out.width if out.is_terminal or os.environ.get("COLUMNS", "").isdigit() else None


@dataclass(frozen=True, slots=True)
class Column:
    """One column. An ``elastic`` one is cut in the middle where the line would be too long."""

    title: str
    right: bool = False
    elastic: bool = False
    style: str = ""


@dataclass(frozen=True)
class Table:
    """Aligned columns, two spaces apart. Without any title there is no head."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    indent: int = 0

    def __rich_console__(self, out: Console, options: ConsoleOptions) -> Iterator[Segment]:
        head = [(column.title, "bold") for column in self.columns]
        rows = [head, *self.rows] if any(column.title for column in self.columns) else self.rows
        widths = self._widths(rows, width(out))
        styles: dict[str, Style] = {}
        for row in rows:
            yield Segment(" " * self.indent)
            for i, (cell, column) in enumerate(zip(row, self.columns, strict=True)):
                text, style = cell if isinstance(cell, tuple) else (cell, column.style)
                text = elide(text, widths[i]) if column.elastic else text
                gap = " " * (widths[i] - cell_len(text))
                tail = "" if i == len(widths) - 1 else "  "
                yield Segment(gap if column.right else "")
                yield Segment(text, styles.setdefault(style, Style.parse(style)))
                yield Segment((gap if not column.right and tail else "") + tail)
            yield Segment.line()

    def _widths(self, rows: Sequence[Sequence[Cell]], room: int | None) -> list[int]:
        widths = [max((cell_len(_text(cell)) for cell in column), default=0) for column in zip(*rows, strict=True)]
        excess = 0 if room is None else sum(widths) + 2 * (len(widths) - 1) + self.indent - room
        for i, column in enumerate(self.columns):
            if column.elastic and excess > 0:
                cut = min(excess, max(0, widths[i] - _LEAST))
                widths[i], excess = widths[i] - cut, excess - cut
        return widths


def _text(cell: Cell) -> str:
    return cell[0] if isinstance(cell, tuple) else cell


def elide(text: str, room: int) -> str:
    """The beginning and the end of a text that is too long; in names of tensors these tell most."""
    if cell_len(text) <= room:
        return text
    head = (room - 1) // 2
    return f"{text[:head]}…{text[len(text) - (room - 1 - head) :]}"


def clean(text: str) -> str:
    """Text from a checkpoint with what could steer a terminal escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def human_size(nbytes: float) -> str:
    """``1.23 GB``: three digits and a decimal unit, as in ``max_shard_size``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 999.5:  # noqa: PLR2004 - would be printed as 1000
            break
        nbytes /= 1000
    return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.{max(0, 3 - len(str(int(nbytes))))}f} {unit}"


def human_time(seconds: float) -> str:
    """Seconds since 1970 as local date and time."""
    try:
        return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):  # what a manifest says may be anything
        return str(seconds)


def count(n: int, noun: str) -> str:
    """``1 file``, ``2,000 files``."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def print_json(value: object) -> None:
    """One JSON value: indented where a person looks on, on one line for programs."""
    print(json.dumps(value, indent=2 if sys.stdout.isatty() else None, allow_nan=False))


def print_error(error: Exception | str, hint: str = "") -> None:
    """An error and what to do about it, on stderr."""
    text = str(error.args[-1]) if isinstance(error, Exception) and error.args else str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    hint = hint or next((hint for kind, hint in _HINTS.items() if isinstance(error, kind)), "")
    err = console(stderr=True)
    err.print("error:", style="bold red", end=" ")
    err.print("\n".join(clean(line) for line in text.splitlines()))
    if hint:
        err.print(hint, style="dim")
