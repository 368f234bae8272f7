"""``docs/api.md`` is what ``docs/make_api.py`` makes of the code, and has each public name."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import rankless

DOCS = Path(__file__).parents[2] / "docs"


def test_the_overview_is_that_of_the_code() -> None:
    written = runpy.run_path(str(DOCS / "make_api.py"))["write_overview"]()
    assert (DOCS / "api.md").read_text() == written, "run python docs/make_api.py"


def test_the_overview_has_every_public_name() -> None:
    listed = set(re.findall(r"^- `(\w+)", (DOCS / "api.md").read_text(), re.MULTILINE))
    assert set(rankless.__all__) - listed - {"__version__", "Event"} == set()
