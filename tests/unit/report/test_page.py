"""Tests the page: that it is one file, runs only its own scripts, and treats all it shows as text."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rankless.report.page import render_page

ASSETS = Path(__file__).parents[3] / "src/rankless/report/assets"

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "<img src=x onerror=alert(1)>",
    "&lt;b&gt;",
    "\u2028\u2029",
    "\x1b[31mred\x07",
    "\u202egnp.exe",
    "@@DATA@@ @@SCRIPT@@",
    "'\"`${alert(1)}",
    "\udce9",
    "]]>",
]


class Page(HTMLParser):
    """The elements of a page, and the text of those that browsers do not parse."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.raw: list[str] = []
        self.feed(page.decode("ascii", "strict") if page.isascii() else page.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in {"script", "style"}:
            self.raw.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem:
            self.raw[-1] += data


def render(**data: object) -> Page:
    return Page(render_page("runs/a", {"kind": "run", **data}))


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_data(text: str) -> None:
    page = render(names=[text], metrics={text: text})
    assert [tag for tag, _ in page.tags if tag in {"script", "img", "b", "style"}] == ["style", "script", "script"]
    data = page.raw[1]
    assert data.isascii()
    assert not set("<>&") & set(data)
    shown = json.loads(data)["names"][0]
    assert shown.isprintable()
    assert shown == text or not text.isprintable()


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_title_is_text(text: str) -> None:
    page = Page(render_page(text, {"kind": "run"}))
    assert [tag for tag, _ in page.tags if tag in {"script", "img", "b"}] == ["script", "script"]


def test_the_policy_names_the_only_script_and_style() -> None:
    page = render()
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    style, _, script = page.raw
    for text, kind in ((style, "style-src"), (script, "script-src")):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy


def test_nothing_is_loaded() -> None:
    page = render()
    for tag, attrs in page.tags:
        for name in ("src", "href", "data", "action"):
            value = attrs.get(name) or ""
            assert value.startswith(("#", "data:,")) or not value, (tag, attrs)
    assert not re.search(r"url\(|@import", page.raw[0])
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|EventSource|sendBeacon|importScripts)\b", page.raw[2])


def test_own_scripts_make_no_markup_of_text() -> None:
    for script in ASSETS.glob("*.js"):
        text = script.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc", text)


def test_the_parts_of_others_come_with_their_licences() -> None:
    script = render().raw[2]
    for notice in (
        "Copyright (c) 2022 Leon Sorokin",
        "Copyright 2010-2026 Mike Bostock",
        "Permission is hereby granted",
    ):
        assert notice in script
