"""Writes the lists of promises into ``docs/promises.md``: ``python -m tests.promises.table``."""

from __future__ import annotations

import importlib
from pathlib import Path

from tests.promises.places import PLACES
from tests.promises.promise import PROMISES, Promise

PAGE = Path(__file__).parents[2] / "docs/promises.md"

#: What is before and after the lists in the page.
BEGIN, END = "<!-- promises: written by python -m tests.promises.table -->\n", "<!-- end of promises -->\n"

#: The names of several places together, large ones first. They may overlap.
_GROUPS = {
    "all in stores": tuple(place for place in PLACES if "store" in place),
    "all in folders": tuple(place for place in PLACES if "store" not in place),
    "own runs": ("folder", "folder and tier", "store", "store and tier"),
    "runs": ("folder", "folder and tier", "store", "store and tier", "drain of an earlier job", "`rankless drain`"),
    "single components": ("component in a folder", "component in a file", "component in a store"),
    "weights": ("published weights", "published weights in a store"),
    "DCP": ("DCP in a folder", "DCP in a store"),
    "frameworks but NxD": ("Lightning", "Lightning's format", "Trainer", "Accelerate", "ColossalAI"),
    "frameworks": ("Lightning", "Lightning's format", "Trainer", "Accelerate", "NxD", "ColossalAI"),
    "drains": ("drain of an earlier job", "`rankless drain`"),
    "conversions": ("conversion into a folder", "conversion into a store"),
    "edits": ("edit into a folder", "edit into a store"),
}


def make_table() -> str:
    """Return the promises, those that are tested in the same places together, and the reasons of their exceptions."""
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        importlib.import_module(f"tests.promises.{file.stem}")
    promises = sorted(PROMISES.values(), key=lambda promise: promise.module)
    reasons: dict[str, int] = {}
    for promise in promises:
        for place in PLACES:
            if reason := promise.broken.get(place) or promise.exempt.get(place):
                reasons.setdefault(reason, len(reasons) + 1)
    lists: dict[str, list[str]] = {}
    for promise in sorted(promises, key=lambda promise: len(promise.exempt)):
        lists.setdefault(_describe_places(promise, reasons), []).append(promise.text)
    lines = []
    for places, texts in lists.items():
        lines += [places, "", *(f"- {text}" for text in texts), ""]
    lines += ["The exceptions:", "", *(f"{number}. {reason}" for reason, number in reasons.items())]
    return "\n".join(lines) + "\n"


def _describe_places(promise: Promise, reasons: dict[str, int]) -> str:
    kept = [place for place in PLACES if place not in promise.broken and place not in promise.exempt]
    if len(kept) == len(PLACES):
        return f"**In all {len(kept)} places.**"
    named = f" places: {_name_places(kept)}" if 3 * len(kept) < len(PLACES) else f" of {len(PLACES)} places"
    parts = [f"**In {len(kept)}{named}.**"]
    for word, left_out in (("Not kept", promise.broken), ("Not", promise.exempt)):
        by_reason: dict[int, list[str]] = {}
        for place in PLACES:
            if place in left_out:
                by_reason.setdefault(reasons[left_out[place]], []).append(place)
        if by_reason:
            parts.append(f"{word}: {', '.join(f'{_name_places(by_reason[n])} ({n})' for n in sorted(by_reason))}.")
    return " ".join(parts)


def _name_places(places: list[str]) -> str:
    """Return the names of places, and one name for all places of a group."""
    left, names = list(places), []
    for name, group in sorted(_GROUPS.items(), key=lambda item: -len(item[1])):
        if set(group) <= set(left):
            names.append(name)
            left = [place for place in left if place not in group]
    return ", ".join([*names, *left])


def replace_table(page: str) -> str:
    """Return the page with the promises of now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{make_table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(replace_table(PAGE.read_text()))
