"""The results of the campaign: a file, and the section of ``docs/optimizers-and-families.md`` that is made of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

from campaigns.optimizers.verdict import EXACT, FAILS_BY_ITSELF, Verdict

RESULTS = Path(__file__).parent / "results.json"
PAGE = Path(__file__).parents[2] / "docs/optimizers-and-families.md"

_BEGIN = "<!-- written by python -m campaigns.optimizers packages --write -->\n"
_END = "<!-- end of what it writes -->\n"

#: The titles of the layouts on the page.
_TITLES = {"plain": "One process", "fsdp2": "FSDP2"}

#: By package its version, and by layout and name the verdict as a pair of texts.
Results = dict[str, dict[str, Any]]


def read_results() -> Results:
    """Return the results that the repository has."""
    results: Results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    return results


def add_results(results: Results, package: str, version: str, layout: str, verdicts: Mapping[str, Verdict]) -> None:
    """Replace the results of a package in a layout."""
    of_package = results.setdefault(package, {})
    of_package["version"] = version
    of_package[layout] = {name: [verdict.kind, verdict.text] for name, verdict in verdicts.items()}


def write_results(results: Results) -> None:
    """Write the file and the section of the page."""
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(replace_section(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")


def replace_section(page: str, results: Results) -> str:
    """Return the page with the section of these results."""
    before, _, rest = page.partition(_BEGIN)
    return f"{before}{_BEGIN}\n{format_results(results)}\n\n{_END}{rest.partition(_END)[2]}"


def format_results(results: Results) -> str:
    """Return the names by verdicts, and the reason of each verdict that is not torch's fault."""
    verdicts: dict[tuple[str, ...], list[str]] = {}
    for (package, *kinds), names in _group(results).items():
        line = f"- {package} {results[package]['version']} ({len(names)}): {', '.join(names)}"
        verdicts.setdefault(tuple(kinds), []).append(line)
    parts = ["\n".join([f"{_describe(kinds)}\n", *lines]) for kinds, lines in verdicts.items()]
    reasons: dict[str, list[str]] = {}
    for package, layout, name, kind, text in _iterate(results):
        if kind not in {EXACT, FAILS_BY_ITSELF}:
            reason = shorten(re.sub(r"'[^']*'", "'…'", text.replace("`", "")), 200, placeholder=" …")
            reasons.setdefault(f"{_TITLES[layout]}, {kind}: `{reason}`", []).append(f"{name} of {package}")
    lines = [f"- {', '.join(names)}, {reason}" for reason, names in reasons.items()]
    return "\n\n".join([*parts, "Reasons:", "\n".join(lines)])


def _describe(kinds: tuple[str, ...]) -> str:
    """Return the verdicts in the layouts as the title of a list."""
    return f"**{', '.join(f'{title}: {kind}' for title, kind in zip(_TITLES.values(), kinds, strict=True))}**"


def _iterate(results: Results) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield package, layout, name, verdict and text."""
    for package, of_package in results.items():
        for layout in _TITLES:
            for name, (kind, text) in of_package.get(layout, {}).items():
                yield package, layout, name, kind, text


def _group(results: Results) -> dict[tuple[str, ...], list[str]]:
    """Return the names by package and the verdict in each layout."""
    grouped: dict[tuple[str, ...], list[str]] = {}
    for package, of_package in results.items():
        layouts = [of_package.get(layout, {}) for layout in _TITLES]
        for name in dict.fromkeys(name for names in layouts for name in names):
            kinds = (names[name][0] if name in names else "not tried" for names in layouts)
            grouped.setdefault((package, *kinds), []).append(name)
    return grouped
