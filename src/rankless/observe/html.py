"""Tables of HTML, as notebooks show them.

All text is escaped twice: control characters as for a terminal, then the characters that HTML reserves. There are no
scripts and no colours of their own, so that the tables look as all others of a notebook do, light or dark.

The pages of checkpoints, runs and differences in notebooks are built with it, in one process. Text must be escaped
here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rankless.observe.terminal import escape_control_characters
from rankless.observe.units import format_count

#: How many rows of a table are shown: from its beginning and, of the others, from its end.
_HEAD, _TAIL = 20, 10


@dataclass(frozen=True)
class HtmlTable:
    """A table. ``right`` are the numbers of the columns that are aligned to the right.

    Of a long table the rows in the middle are hidden; ``noun`` is the word for one of them, such as ``"tensor"``. A
    table without ``titles`` has a header in the first column.
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: frozenset[int] = frozenset()
    noun: str = "row"


def build_html(title: str, tables: Sequence[HtmlTable], notes: Sequence[str] = ()) -> str:
    """Return HTML with a title, the tables that have rows, and notes."""
    parts = [f"<p><strong>{_escape(title)}</strong></p>"]
    parts += [_build_table(table) for table in tables if table.rows]
    parts += [f"<p>{_escape(note)}</p>" for note in notes]
    return f"<div>{''.join(parts)}</div>"


def _escape(text: str) -> str:
    return escape(escape_control_characters(text))


def _build_table(table: HtmlTable) -> str:
    head = "".join(
        f'<th scope="col" style="{_cell_style(table, number)}">{_escape(title)}</th>'
        for number, title in enumerate(table.titles)
    )
    hidden = len(table.rows) - _HEAD - _TAIL
    rows = [_build_row(table, row) for row in (table.rows if hidden <= 1 else table.rows[:_HEAD])]
    if hidden > 1:
        span = len(table.rows[0])
        rows.append(f'<tr><td colspan="{span}"><em>… {format_count(hidden, f"more {table.noun}")} …</em></td></tr>')
        rows += [_build_row(table, row) for row in table.rows[-_TAIL:]]
    thead = f"<thead><tr>{head}</tr></thead>" if table.titles else ""
    return f"<table>{thead}<tbody>{''.join(rows)}</tbody></table>"


def _build_row(table: HtmlTable, row: Sequence[str]) -> str:
    cells = []
    for number, text in enumerate(row):
        name, scope = ("th", ' scope="row"') if not table.titles and number == 0 else ("td", "")
        cells.append(f'<{name}{scope} style="{_cell_style(table, number)}">{_escape(text)}</{name}>')
    return f"<tr>{''.join(cells)}</tr>"


def _cell_style(table: HtmlTable, number: int) -> str:
    return f"text-align: {'right' if number in table.right else 'left'}; padding: 0.1em 0.6em"
