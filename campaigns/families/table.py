"""The table of model families in ``docs/optimizers-and-families.md``, between two comments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import transformers

from campaigns.families.verdicts import Outcome, Verdict

PAGE = Path(__file__).parents[2] / "docs" / "optimizers-and-families.md"

_START, _STOP = "<!-- families: written by python -m campaigns.families --write -->", "<!-- end of families -->"


def write_table(verdicts: Sequence[Verdict]) -> None:
    """Replace the table in the page by that of some verdicts."""
    before, _, after = _split_page()
    PAGE.write_text(f"{before}{_START}\n{make_table(verdicts)}\n{_STOP}{after}")


def read_table() -> str:
    """Return the table that the page has."""
    return _split_page()[1]


def _split_page() -> tuple[str, str, str]:
    before, table = PAGE.read_text().split(_START)
    table, after = table.split(_STOP)
    return before, table.strip("\n"), after


def make_table(verdicts: Sequence[Verdict]) -> str:
    """Return the table: each family once, with its verdict, and the reason if rankless or transformers fails."""
    groups = {outcome: [verdict for verdict in verdicts if verdict.outcome is outcome] for outcome in Outcome}
    lines = [
        f"With transformers {transformers.__version__}, {len(verdicts)} families:\n",
        "| verdict | families |",
        "|---|---|",
    ]
    lines += [
        f"| {outcome.value} | {', '.join(sorted(f'`{verdict.family}`' for verdict in group))} |"
        for outcome in (Outcome.RIGHT, Outcome.NOT_BUILT)
        if (group := groups.pop(outcome))
    ]
    others = [verdict for group in groups.values() for verdict in sorted(group, key=lambda verdict: verdict.family)]
    lines += [f"| {verdict.outcome.value} | `{verdict.family}`: {_escape(verdict.reason)} |" for verdict in others]
    return "\n".join(lines)


def _escape(text: str) -> str:
    """Return a text that is one cell of a table in Markdown."""
    return text.replace("`", "'").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
