"""Tests of what a notebook shows: the tables say what the commands say, and whatever a checkpoint contains is text."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import rankless
from tests.helpers.commands import invoke

#: Names with what a page or a terminal would obey.
SCRIPT, SEQUENCE = "<script>alert('&')</script>", "\x1b[31mred\x1b[0m\x9b2J\r\u202e"

#: The only elements and attributes that a table needs.
ELEMENTS = {"div", "p", "strong", "em", "table", "thead", "tbody", "tr", "th", "td"}
STYLES = {f"text-align: {side}; padding: 0.1em 0.6em" for side in ("left", "right")}


class Page(HTMLParser):
    """The tables of a page as rows of texts, and all its text. It refuses scripts, other styles and bad nesting."""

    def __init__(self, shown: Any) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(shown._repr_html_())
        self.close()
        assert self._open == []
        assert all(character.isprintable() for character in self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ELEMENTS
        for name, value in attrs:
            assert name in {"scope", "colspan"} or (name == "style" and value in STYLES)
        self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in {"th", "td"}:
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._open and self._open[-1] in {"th", "td", "em"} and "table" in self._open:
            self.tables[-1][-1][-1] += data


def lines(*arguments: Any, **options: Any) -> list[list[str]]:
    """The columns of each line that a command prints."""
    return [re.split(r" {2,}", line.strip()) for line in invoke(*arguments, **options).stdout.splitlines()]


def layers(count: int) -> dict[str, torch.Tensor]:
    return {f"layers.{n}.{name}": torch.zeros(4, 4) for n in range(count) for name in ("weight", "bias")}


def test_a_checkpoint_is_shown_as_show_does(tmp_path: Path) -> None:
    state = {"embed": torch.zeros(100, 4), **layers(30)}
    rankless.save_checkpoint(tmp_path, "s", state, step=3, metrics={"loss": 0.25}, user_content={"t": torch.ones(2)})
    header, groups, tensors = Page(rankless.open(tmp_path)).tables
    said = lines("show", tmp_path)
    assert [row for row in header if row[0] != "size"] == [
        ["path", str(tmp_path / "s")],
        ["format", "rankless"],
        ["tag", "s"],
        ["step", "3"],
        ["saved", dict(row for row in said if len(row) == 2)["saved"].removesuffix(" by 1 rank")],
        ["metrics", "loss=0.25"],
    ]
    assert header[-1] == ["size", "5.44 kB in 61 tensors"]
    assert [row for row in said if row[0] == "61 tensors"] == [["61 tensors", "5.44 kB"]]
    assert groups[0] == ["group", "tensors", "bytes"]
    summary = said.index(["module", "tensors", "bytes", "share"])
    assert all(row in [line[:3] for line in said[summary:]] for row in groups[1:])
    first = said.index(["tensor", "dtype", "shape", "bytes"])
    assert tensors == said[first : first + len(tensors)]
    assert len(tensors) == 1 + 3


def test_of_a_long_list_the_middle_is_hidden_and_counted(tmp_path: Path) -> None:
    save_file({f"w{number}": torch.ones(number + 1) for number in range(100)}, tmp_path / "a.safetensors")
    table = Page(rankless.open(tmp_path / "a.safetensors")).tables[-1]
    assert [row[0] for row in table[1:21]] == [f"model/w{number}" for number in range(20)]
    assert table[21] == ["… 70 more rows …"]
    assert [row[0] for row in table[22:]] == [f"model/w{number}" for number in range(90, 100)]


def test_a_row_is_never_hidden_alone(tmp_path: Path) -> None:
    save_file({f"w{number}": torch.ones(number + 1) for number in range(31)}, tmp_path / "a.safetensors")
    assert len(Page(rankless.open(tmp_path / "a.safetensors")).tables[-1]) == 1 + 31


def test_a_list_is_shown_as_ls_does(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        rankless.save_checkpoint(tmp_path, f"s{step}", {"w": torch.ones(9)}, step=step, metrics={"loss": 1 / step})
    (table,) = Page(rankless.list_checkpoints(tmp_path)).tables
    said = lines("ls", tmp_path)
    shown = [dict(zip(table[0], row, strict=True)) for row in table[1:]]
    listed = [dict(zip(said[0], row, strict=True)) for row in said[1:]]
    assert [{key: row[key] for key in row if key in listed[0]} for row in shown] == [
        {key: row[key] for key in row if key not in {"age", "own"}} for row in listed
    ]
    assert [row["status"] for row in shown] == ["complete", "complete", "complete (latest)"]


def test_a_corrupt_checkpoint_is_named_with_its_problem(tmp_path: Path) -> None:
    for tag in "ab":
        rankless.save_checkpoint(tmp_path, tag, {"w": torch.ones(9)})
    (tmp_path / "b/manifest.json").write_text("{")
    page = Page(rankless.list_checkpoints(tmp_path))
    assert [(row[0], row[5]) for row in page.tables[0][1:]] == [("b", "damaged"), ("a", "complete (latest)")]
    assert "b: " in page.text
    assert Page(rankless.list_checkpoints(tmp_path / "nothing")).text == "0 checkpoints"


def test_the_list_of_checkpoints_is_a_list(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "a", {"w": torch.ones(9)})
    infos = rankless.list_checkpoints(tmp_path)
    assert infos == list(infos)
    assert repr(infos) == repr(list(infos))
    assert Page(rankless.RunDirectory(tmp_path).list()).tables == Page(infos).tables


def test_a_difference_is_shown_as_diff_does(tmp_path: Path) -> None:
    left = {"same": torch.ones(3), "w": torch.ones(4), "gone": torch.ones(1), "cast": torch.ones(2)}
    right = {"same": torch.ones(3), "w": torch.tensor([1, 2, 1.5, 1]), "new": torch.ones(2), "cast": torch.zeros(2)}
    for tag, state, content in (("a", left, {"lr": 0.1, "old": [1]}), ("b", right, {"lr": 0.2, "new": None})):
        rankless.save_checkpoint(tmp_path, tag, state, user_content=content, rng=False)
    page = Page(rankless.diff(tmp_path / "a", tmp_path / "b"))
    said = lines("diff", tmp_path / "a", tmp_path / "b", code=1)
    paths, apart, differing, values = page.tables
    assert paths == [["a", str(tmp_path / "a")], ["b", str(tmp_path / "b")]]
    assert all(row in said for row in [*apart, *values])
    assert all(row[:5] in said for row in differing)
    assert len(apart) + len(differing) + len(values) == 3 + 2 + 2 + 3
    assert page.text.startswith("4 of 5 tensors and 3 values differ")


def test_equal_checkpoints_have_a_sentence(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "a", {"w": torch.ones(9)}, rng=False)
    assert Page(rankless.diff(tmp_path / "a", tmp_path / "a")).text.startswith("no difference in 1 tensor")


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    run, names = tmp_path / "<b>&amp;", [SCRIPT, SEQUENCE, '" onload="x']
    for tag, value in (("<i>a", 1.0), ("<i>b", 2.0)):
        state = {name: torch.full((3,), value) for name in names}
        metrics = {SCRIPT: value}
        rankless.save_checkpoint(run, tag, state, user_content={SCRIPT: SEQUENCE * int(value)}, metrics=metrics)
    for shown in (
        rankless.open(run),
        rankless.list_checkpoints(run),
        rankless.diff(run / "<i>a", run / "<i>b"),
    ):
        page = Page(shown)
        assert "<i>b" in page.text
        assert SCRIPT in page.text
    assert r"model/\x1b[31mred\x1b[0m\x9b2J\r\u202e" in Page(rankless.open(run)).text


@pytest.mark.parametrize("count", [0, 1])
def test_a_checkpoint_that_is_gone_is_still_shown(tmp_path: Path, count: int) -> None:
    rankless.save_checkpoint(tmp_path / "run", "a", {f"w{n}": torch.ones(9) for n in range(count)})
    checkpoint = rankless.open(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    assert f"in {count} tensor" in Page(checkpoint).text
