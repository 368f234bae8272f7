"""``docs/cli.md`` has every command, with the options that ``docs/make_cli.py`` writes."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from rankless.cli.commands import COMMANDS

DOCS = Path(__file__).parents[2] / "docs"


def test_the_options_are_those_of_the_commands() -> None:
    page = (DOCS / "cli.md").read_text()
    assert runpy.run_path(str(DOCS / "make_cli.py"))["fill_options"](page) == page, "run python docs/make_cli.py"


def test_the_page_has_every_command() -> None:
    assert set(re.findall(r"^## rankless (\S+)", (DOCS / "cli.md").read_text(), re.MULTILINE)) == set(COMMANDS)
