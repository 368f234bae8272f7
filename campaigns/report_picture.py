"""Draws a page of ``rankless report`` as a picture, with Chromium: ``make report-picture``."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

_SIZE = {"width": 1280, "height": 1020}


def draw_page(page: Path, picture: Path) -> None:
    """Draw the first screen of a page."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("google-chrome"), args=["--no-sandbox"]
        )
        tab = browser.new_context(viewport=_SIZE, color_scheme="light", offline=True).new_page()
        tab.goto(page.absolute().as_uri())
        tab.wait_for_selector(".map li")
        tab.wait_for_selector(".chart canvas")
        tab.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    draw_page(*map(Path, sys.argv[1:3]))
