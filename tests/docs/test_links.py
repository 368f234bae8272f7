"""Tests that relative links and anchors of the documentation lead somewhere, on the site and among the files."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
]

_LINK = re.compile(r"\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*?)(?: *\{[^}]*\})?$", re.MULTILINE)
_ANCHOR = re.compile(r"\{[^}]*#([\w.-]+)[^}]*\}|<a (?:id|name)=\"([^\"]+)\"")


@cache
def prose(page: Path) -> str:
    """Return the text of a page without blocks of code."""
    return re.sub(r"^( *)```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def slug(heading: str) -> str:
    """Return the anchor that Python-Markdown gives to a heading."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


@cache
def anchors(page: Path) -> frozenset[str]:
    text, slugs = prose(page), set()
    for heading in _HEADING.findall(text):
        first = slug(heading)
        number = 0
        while (name := f"{first}_{number}" if number else first) in slugs:
            number += 1
        slugs.add(name)
    return frozenset(slugs | {first or second for first, second in _ANCHOR.findall(text)})


def links() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for target in _LINK.findall(re.sub(r"`[^`]*`", "", prose(page))):
            if not re.match(r"[a-z]+:", target):
                yield page, target


def test_links_lead_to_files_and_headings() -> None:
    dead = []
    for page, target in links():
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            dead.append(f"{page.relative_to(ROOT)}: {target}")
    assert dead == []


def test_pages_of_the_site_are_in_its_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = (page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.is_relative_to(ROOT / "docs"))
    assert [page for page in pages if not re.search(rf"[ :]{re.escape(page)}$", navigation, re.MULTILINE)] == []
