"""Tests that the drawings of the documentation agree with the text next to them."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SVG = "{http://www.w3.org/2000/svg}"


def texts_of(drawing: Path) -> list[str]:
    return [text.text or "" for text in ElementTree.parse(drawing).iter(f"{SVG}text")]


@pytest.mark.parametrize("drawing", sorted(DOCS.rglob("*.svg")), ids=lambda path: path.name)
def test_a_drawing_can_be_read_and_is_shown_with_a_text(drawing: Path) -> None:
    assert ElementTree.parse(drawing).getroot().tag == f"{SVG}svg"
    shown = [
        page for page in DOCS.rglob("*.md") if re.search(rf"!\[[^]]{{20,}}\]\([./]*{drawing.name}\)", page.read_text())
    ]
    assert shown


def test_the_drawing_of_a_rollback_has_the_checkpoints_of_its_example() -> None:
    """The guide runs the example, and compares the tags with this list."""
    listed = re.search(r"assert tags == \{(.*?)\}", (DOCS / "guides/go-back.md").read_text(), re.DOTALL)
    assert listed
    drawn = [text for text in texts_of(DOCS / "history.svg") if re.fullmatch(r"step_\S+", text)]
    assert sorted(drawn) == sorted(re.findall(r'"(step_[^"]+)"', listed[1]))
