"""Tests that the documentation, docstrings and messages keep to plain technical English: CONTRIBUTING.md, *Style*."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
]
SOURCE = sorted((ROOT / "src/rankless").rglob("*.py"))

#: Words of a private dialect, or with several meanings, and what to write instead.
AVOIDED = {
    "told": "reported, passed",
    "nobody": "no rank, no process, unknown",
    "whoever": "the process that, anyone who",
    "beside": "next to",
    "gone": "removed",
    "damaged": "corrupt",
    "sound": "intact",
    "for good": "permanently",
    "as ever": "as usual",
}

_AVOIDED = re.compile(rf"\b({'|'.join(AVOIDED)})\b", re.IGNORECASE)
_QUESTION = re.compile(r"(What|Who|Where|Whether|Which|How|When|Why)\b")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def complain(text: str) -> list[str]:
    return [f"{match[0]!r}: write {AVOIDED[match[0].lower()]}" for match in _AVOIDED.finditer(text)]


def docstrings(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, _DOCUMENTED):
            yield ast.get_docstring(node) or ""


def messages(file: Path) -> Iterator[str]:
    """Yield texts of more than one word, docstrings included."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value


def test_pages_use_standard_words() -> None:
    texts = ((page, re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)) for page in PAGES)
    assert [f"{page}: {complaint}" for page, text in texts for complaint in complain(text)] == []


def test_docstrings_and_messages_use_standard_words() -> None:
    texts = ((file, re.sub(r"``[^`]*``", "", text)) for file in SOURCE for text in messages(file))
    assert [f"{file}: {complaint}" for file, text in texts for complaint in complain(text)] == []


def test_docstrings_say_what_a_thing_is_or_does() -> None:
    """They start with a verb or a noun, not with a question word."""
    starts = [text.partition("\n")[0] for file in SOURCE for text in docstrings(file) if _QUESTION.match(text)]
    assert starts == []
