"""Writes the table of promises into ``docs/failure-model.md``: ``python -m tests.promises.table``."""

from __future__ import annotations

import importlib
from pathlib import Path

from tests.promises.places import PLACES
from tests.promises.promise import PROMISES, Promise

PAGE = Path(__file__).parents[2] / "docs/failure-model.md"

#: What is before and after the table in the page.
BEGIN, END = "<!-- promises: written by python -m tests.promises.table -->\n", "<!-- end of promises -->\n"


def make_table() -> str:
    """Return the table, and the reasons of its empty cells below it."""
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        importlib.import_module(f"tests.promises.{file.stem}")
    reasons: dict[str, int] = {}
    lines = ["| promise | " + " | ".join(PLACES) + " |", "|---|" + ":---:|" * len(PLACES)]
    lines += [
        f"| {promise.text} | " + " | ".join(_describe_cell(promise, name, reasons) for name in PLACES) + " |"
        for promise in sorted(PROMISES.values(), key=lambda promise: promise.module)
    ]
    lines += ["", *(f"{number}. {reason}" for reason, number in reasons.items())]
    return "\n".join(lines) + "\n"


def _describe_cell(promise: Promise, place: str, reasons: dict[str, int]) -> str:
    if place in promise.broken:
        return f"**no** ({reasons.setdefault(promise.broken[place], len(reasons) + 1)})"
    if place in promise.exempt:
        return f"n.a. ({reasons.setdefault(promise.exempt[place], len(reasons) + 1)})"
    return "yes"


def replace_table(page: str) -> str:
    """Return the page with the table of now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{make_table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(replace_table(PAGE.read_text()))
