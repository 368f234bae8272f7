"""Tests that the drawings of the documentation agree with the text next to them."""

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SVG = "{http://www.w3.org/2000/svg}"
PAGES = {page: page.read_text() for page in DOCS.rglob("*.md")}


def read(drawing: Path) -> ET.Element:
    return ET.parse(drawing).getroot()  # noqa: S314 - a file of the repository


@pytest.mark.parametrize("drawing", sorted(DOCS.rglob("*.svg")), ids=lambda path: path.name)
def test_a_drawing_can_be_read_and_is_shown_with_a_text(drawing: Path) -> None:
    assert read(drawing).tag == f"{SVG}svg"
    assert [page for page, text in PAGES.items() if re.search(rf"!\[[^]]{{20,}}\]\([./]*{drawing.name}\)", text)]


def test_the_drawing_of_a_rollback_has_the_checkpoints_of_its_example() -> None:
    """The guide runs the example, and compares the tags with this list."""
    listed = re.search(r"assert tags == \{(.*?)\}", PAGES[DOCS / "guides/go-back.md"], re.DOTALL)
    assert listed
    texts = [text.text or "" for text in read(DOCS / "history.svg").iter(f"{SVG}text")]
    drawn = [text for text in texts if re.fullmatch(r"step_\S+", text)]
    assert sorted(drawn) == sorted(re.findall(r'"(step_[^"]+)"', listed[1]))
