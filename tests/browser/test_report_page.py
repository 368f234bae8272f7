"""Tests the pages of ``rankless report`` in a browser: ``make report-browser``.

They are skipped without Playwright and Chromium. No test has a network.
"""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rankless
from rankless.run.journal import JournalEntry, append_entry
from tests.helpers.commands import invoke
from tests.helpers.large_pages import make_large_page
from tests.helpers.run_directories import train_as_job

sync_api = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")

HOSTILE = "<img src=x onerror=alert(1)>"


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 16, bias=False)
        self.down = torch.nn.Linear(16, 8, bias=False)


def save_run(path: Path) -> Path:
    """A run of six saves and a resume, whose second layer diverges."""
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(Layer() for _ in range(20))})
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(1, 7):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        with torch.no_grad():
            model["layers"][1].up.weight.mul_(3)  # type: ignore[index]
        if step == 4:
            rankless.load_checkpoint(path, model=model, optimizer=optimizer)
        rankless.save_checkpoint(path, f"step_{step}", model, optimizer, step=step, keep=5)
    placement = (("node-1", 3), ("node-2", 1))
    failed = JournalEntry("failed", time.time(), "step_7", world_size=5, hosts=3, error="no space", placement=placement)
    append_entry(path, failed)
    return path


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of a run, of a difference, and of names that look like markup."""
    folder = tmp_path_factory.mktemp("pages")
    run = save_run(folder / "run")
    hostile = folder / "hostile"
    tensors = {
        HOSTILE: torch.ones(3),
        "": torch.ones(1),
        "__proto__.toString": torch.empty(0),
        "large": torch.full((1,), 1.7e308, dtype=torch.float64),
        "nan": torch.full((2,), torch.nan),
    }
    for step, tag in enumerate((HOSTILE, "constructor", "__proto__")):
        rankless.save_checkpoint(hostile, tag, tensors, step=step, metrics={HOSTILE: 1.0, "__proto__": 2.0})
        tensors = {**tensors, "small": tensors["large"] * 1e-300}
    train_as_job(folder / "branched", 3)
    train_as_job(folder / "branched", 2, "step_1")
    rankless.save_checkpoint(folder / "empty", "a", {"w": torch.empty(0)}, rng=False)
    rankless.save_checkpoint(folder / "flat", "a", {f"p{number:04d}": torch.ones(3) for number in range(2000)})
    rankless.save_checkpoint(folder / "model", "a", {"w": torch.ones(9)})
    arguments = {
        "run": (run, "--stats"),
        "flat": (folder / "flat",),
        "model": (folder / "model",),
        "branched": (folder / "branched",),
        "difference": (run / "step_5", run / "step_6"),
        "hostile": (hostile, "--stats"),
        "empty": (folder / "empty", "--stats"),
    }
    files = {name: folder / f"{name}.html" for name in arguments}
    for name, file in files.items():
        invoke("report", *arguments[name], "-o", file)
    files["large"] = folder / "large.html"
    files["large"].write_bytes(make_large_page(1000))
    return files


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


class Tab:
    """A page that was opened, and what went wrong in it."""

    def __init__(self, browser: Any, file: Path, address: str = "", **options: Any) -> None:
        self.context = browser.new_context(offline=True, **options)
        self.page = self.context.new_page()
        self.problems: list[str] = []
        self.page.on("console", lambda message: self.problems.append(message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("dialog", self._note_dialog)
        self.page.on("request", lambda request: self._check_request(request.url))
        self.page.goto(f"{file.as_uri()}{address}")
        self.page.wait_for_selector(".rows .row")
        self.page.wait_for_selector(".map li")

    def _note_dialog(self, dialog: Any) -> None:
        self.problems.append(dialog.message)
        dialog.dismiss()

    def _check_request(self, url: str) -> None:
        if not url.startswith(("file:", "data:")):
            self.problems.append(url)

    def rows(self) -> list[str]:
        return [row.text_content() for row in self.page.query_selector_all(".rows .cell.name")]


@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["run", "branched", "difference", "hostile", "empty", "large"])
def test_nothing_is_wrong_with_any_page(
    browser: Any, pages: dict[str, Path], name: str, scheme: str, width: int
) -> None:
    tab = Tab(browser, pages[name], viewport={"width": width, "height": 900}, color_scheme=scheme)
    for summary in tab.page.locator("details summary").all():
        summary.click()
    tab.page.locator(".rows button").first.click()
    violations = axe.Axe().run(tab.page).response["violations"]
    assert [(each["id"], each["impact"], each["nodes"][0]["html"]) for each in violations] == []
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.problems == []
    tab.context.close()


def test_a_link_to_a_module_selects_it(browser: Any, pages: dict[str, Path]) -> None:
    tab = Tab(browser, pages["run"], "#layers.1")
    names = tab.rows()
    assert len(names) == 8
    assert all(name.startswith("layers.1.") for name in names)
    assert tab.page.locator(".crumbs li").all_inner_texts()[:2] == ["all tensors", "layers"]
    tab.page.locator(".chip").click()
    assert len(tab.rows()) > 8
    tab.context.close()


def test_the_layer_that_diverges_is_first_by_its_trend(browser: Any, pages: dict[str, Path]) -> None:
    tab = Tab(browser, pages["run"])
    tab.page.locator("select").select_option("weights")
    tab.page.get_by_role("button", name="trend").click()
    assert tab.rows()[0] == "layers.1.up.weight"
    tab.page.get_by_label("Search").fill("layers.12 down")
    assert tab.rows() == ["layers.12.down.weight"]
    tab.context.close()


def test_arrow_keys_move_through_all_rows(browser: Any, pages: dict[str, Path]) -> None:
    tab = Tab(browser, pages["run"])
    tab.page.locator(".rows button").first.focus()
    for _ in range(40):
        tab.page.keyboard.press("ArrowDown")
    focused = "document.activeElement.closest('.row')?.getAttribute('aria-rowindex')"
    assert tab.page.evaluate(focused) == "42"
    tab.page.keyboard.press("End")
    total = int(tab.page.locator("[role=table][aria-rowcount]").get_attribute("aria-rowcount"))
    assert tab.page.evaluate(focused) == str(total)
    tab.page.keyboard.press("Enter")
    assert tab.page.locator(".detail h3").first.inner_text()
    tab.context.close()


def test_names_that_look_like_markup_are_text(browser: Any, pages: dict[str, Path]) -> None:
    tab = Tab(browser, pages["hostile"])
    assert HOSTILE in tab.rows()
    assert tab.page.locator("img").count() == 0
    checkpoints = tab.page.locator("#view-checkpoints").inner_text()
    assert HOSTILE in checkpoints
    assert "undefined" not in checkpoints
    assert "model/" in tab.rows()
    tab.context.close()


def test_many_names_without_modules_are_frames_of_neighbours(browser: Any, pages: dict[str, Path]) -> None:
    tab = Tab(browser, pages["flat"], viewport={"width": 1280, "height": 900})
    labels = [frame.get_attribute("aria-label") for frame in tab.page.query_selector_all(".frame")]
    assert 20 < len(labels) <= 70
    assert any(label.startswith("p0000 … p00") for label in labels)


def test_a_kind_has_the_same_colour_in_all_pages(browser: Any, pages: dict[str, Path]) -> None:
    """Whichever kind has the most bytes: of a model of nine elements, the states of generators."""
    colours = []
    for name in ("run", "model"):
        tab = Tab(browser, pages[name], viewport={"width": 1280, "height": 900})
        items = tab.page.query_selector_all("#view-bytes ul.legend li")
        swatches = [(item.text_content(), item.query_selector(".swatch").get_attribute("class")) for item in items]
        kinds = {text.split(" ·")[0]: colour for text, colour in swatches}
        colours.append({kind: kinds[kind] for kind in ("weights", "values")})
    assert colours[0] == colours[1]


def test_on_a_phone_nothing_asks_to_point(browser: Any, pages: dict[str, Path]) -> None:
    tab = Tab(browser, pages["run"], viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    assert tab.page.text_content(".readout").startswith("Touch a save")


def test_the_table_of_events_has_all_of_them(browser: Any, pages: dict[str, Path]) -> None:
    tab = Tab(browser, pages["run"])
    data = json.loads(tab.page.locator("#data").text_content())
    tab.page.locator("details summary").first.click()
    events = tab.page.locator("details tbody tr").count()
    assert events == len(data["timeline"]["entries"]) == 6 + 1 + 1 + 1
    newest = tab.page.locator("details tbody tr").first.locator("td").all_inner_texts()
    assert newest[1:5] == ["failed to save step_7", "\u2013", "5", "3 hosts, node-1: ranks 0\u20132, node-2: rank 3, …"]
    tab.context.close()


def test_a_run_that_went_back_says_so(browser: Any, pages: dict[str, Path]) -> None:
    """In the legend of the charts, their description, the table of events and that of checkpoints."""
    tab = Tab(browser, pages["branched"])
    legend = tab.page.locator("#view-saves ul.legend").first.inner_text()
    assert ("the run went back" in legend, "abandoned" in legend) == (True, True)
    description = tab.page.locator("#view-saves [role=img]").get_attribute("aria-label")
    assert "1 rollback, 2 abandoned saves." in description
    tab.page.locator("details summary").first.click()
    events = tab.page.locator("details tbody tr").all()
    texts = [event.locator("td").all_inner_texts()[1] for event in events]
    went_back = f"went back to step_1, abandoned 2 checkpoints (incarnation 2 on {socket.gethostname()})"
    saves = ["saved step_1", "saved step_2, now abandoned", "saved step_3, now abandoned", "saved step_2"]
    assert [text for text in texts if text.startswith("saved")] == saves[::-1]
    assert texts.index("saved step_2") < texts.index(went_back) < texts.index("saved step_3, now abandoned")
    statuses = tab.page.locator("#view-checkpoints tbody tr").all()
    assert [status.locator("td").all_inner_texts()[7] for status in statuses] == [
        *("complete", "complete", "abandoned", "abandoned")
    ]
    assert tab.problems == []
    tab.context.close()


@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("name", ["run", "branched", "difference", "large"])
def test_labels_and_controls_are_not_cut_off(browser: Any, pages: dict[str, Path], name: str, width: int) -> None:
    tab = Tab(browser, pages[name], viewport={"width": width, "height": 900})
    cut = tab.page.evaluate("""() => [...document.querySelectorAll('.frame b, .choice, .card dd, .head .cell')]
        .filter((each) => each.scrollWidth > each.clientWidth + 1).map((each) => each.textContent)""")
    assert [text for text in cut if "." in text or len(text) > 20] == []  # one long name may not fit
    tab.context.close()
