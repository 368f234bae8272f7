"""Measures how fast large pages of ``rankless report`` open and scroll in Chromium: ``make report-speed``.

The pages are of 20,000 tensors with statistics of 20 checkpoints, in a run of 20 and one of 1,000 checkpoints.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from playwright.sync_api import Browser, sync_playwright

from tests.helpers.large_pages import make_large_page

_ROUNDS = 5

_WIDTHS = (1400, 390)

#: By how many pixels the table is scrolled in each frame: as fast as a wheel is turned, and more than its height.
_STEPS = (200, 700)

#: Scroll down for two seconds, and return the frames a second.
_SCROLL = """(step) => new Promise((done) => {
  const scroller = document.querySelector('.scroller');
  scroller.scrollIntoView();
  const start = performance.now();
  let frames = 0;
  const tick = (now) => {
    frames += 1;
    scroller.scrollTop += step;
    if (now - start < 2000) requestAnimationFrame(tick);
    else done(1000 * frames / (now - start));
  };
  requestAnimationFrame(tick);
})"""


def measure_page(browser: Browser, page: Path, width: int) -> list[float]:
    """Return the seconds until tensors and modules are drawn, and for each step the frames a second."""
    context = browser.new_context(viewport={"width": width, "height": 900}, offline=True)
    tab = context.new_page()
    began = time.perf_counter()
    tab.goto(page.as_uri())
    tab.wait_for_selector(".rows .row")
    tab.wait_for_selector(".map li")
    opened = time.perf_counter() - began
    rates = [tab.evaluate(_SCROLL, step) for step in _STEPS]
    context.close()
    return [opened, *rates]


def main() -> None:
    """Print the medians."""
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("google-chrome"),
            args=["--no-sandbox", "--disable-gpu"],
        )
        for checkpoints in (20, 1000):
            page = Path(folder, f"{checkpoints}.html")
            page.write_bytes(make_large_page(checkpoints))
            for width in _WIDTHS:
                rounds = [measure_page(browser, page, width) for _ in range(_ROUNDS)]
                opened, *rates = map(median, zip(*rounds, strict=True))
                print(f"{checkpoints} checkpoints, {page.stat().st_size / 1e6:.2f} MB, {width} px:", end=" ")
                frames = [f"{rate:.0f} by {step} px" for rate, step in zip(rates, _STEPS, strict=True)]
                print(f"opened in {opened:.2f} s, frames a second: {', '.join(frames)}")
        browser.close()


if __name__ == "__main__":
    main()
