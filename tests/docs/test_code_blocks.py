"""Tests that every block of code in the README and the documentation runs as it is written, page by page.

The Python blocks of a page run one after the other in one namespace, with its commands (``$ rankless ...``) in between,
in one empty directory. Hidden comments describe the context: ``<!-- ranks: 4 -->`` runs the page on that many ranks,
``<!-- given ... -->`` creates what it needs, and ``<!-- not run: why -->`` skips the next block. The ranks have a
process group, and keep it.
"""

from __future__ import annotations

import ast
import builtins
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from rankless import errors
from tests.helpers.pool import Ranks

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_STEP = re.compile(
    r"^<!-- (?P<said>ranks|not run): (?P<about>.*?) -->$|^<!-- given\n(?P<given>.*?)^-->$|"
    r"^(?P<fence>```+)(?P<kind>\w*)\n(?P<code>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)


class Step(NamedTuple):
    """Code or commands, and the line where they begin."""

    kind: str
    code: str
    line: int


def steps(text: str) -> Iterator[Step]:
    skipped = False
    for match in _STEP.finditer(text):
        line = text.count("\n", 0, match.start()) + 2
        if match["said"] == "not run":
            skipped = True
        elif match["given"] is not None:
            yield Step("python", match["given"], line)
        elif match["kind"] is not None:
            if not skipped and match["kind"] in {"python", "console"}:
                yield Step(match["kind"], match["code"], line)
            skipped = False


def world_size(text: str) -> int:
    return next((int(match["about"]) for match in _STEP.finditer(text) if match["said"] == "ranks"), 1)


def play(page: str, todo: list[Step], folder: Path) -> None:
    """Run the steps of a page on this rank; commands on the first."""
    module = ModuleType("page")
    sys.modules["page"] = module  # where dataclasses look for their names
    before = Path.cwd()
    os.chdir(folder)
    try:
        with kept_process_group(todo):
            for kind, code, line in todo:
                if kind == "python":
                    exec(compile("\n" * (line - 1) + code, page, "exec"), vars(module))  # noqa: S102 - our own documentation
                    continue
                dist.barrier()
                if dist.get_rank() == 0:
                    for command in code.splitlines():
                        run(command)
                dist.barrier()
    finally:
        os.chdir(before)
        del sys.modules["page"]


@contextmanager
def kept_process_group(todo: list[Step]) -> Iterator[None]:
    """Keep the process group of the pool inside the ``with`` block. A page that reads torchrun's variable gets it."""
    reads_size = any('environ["WORLD_SIZE"]' in step.code for step in todo)
    variables = {"WORLD_SIZE": str(dist.get_world_size())} if reads_size else {}
    nothing: dict[str, Any] = {"init_process_group": lambda **_: None, "destroy_process_group": lambda: None}
    with mock.patch.multiple(dist, **nothing), mock.patch.dict(os.environ, variables):
        yield


def run(line: str) -> None:
    from rankless.cli.main import app

    prompt, program, *args = shlex.split(line, comments=True)
    assert (prompt, program) == ("$", "rankless"), line
    result = CliRunner().invoke(app, args)
    is_answer = args[0] in {"diff", "ls"} and result.exit_code == 1 and not result.stderr
    assert result.exit_code == 0 or is_answer, f"{line}\n{result.output}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_says_runs(ranks: Ranks, page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    todo = list(steps(text))
    if todo:
        ranks(world_size(text), play, str(page), todo, tmp_path)


def test_every_block_is_found_and_says_what_it_is() -> None:
    """An opening fence that the pattern above passes over would never be run."""
    for page in PAGES:
        text = page.read_text()
        fences = re.findall(r"^ *```+\w*$", text, re.MULTILINE)
        actual = [item for item in _STEP.finditer(text) if item["kind"] is not None]
        assert len(fences) == 2 * len(actual), page
        assert {item["kind"] for item in actual} <= {"python", "console", "sh", "json", "yaml", "text", ""}, page


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def test_every_error_that_is_documented_exists() -> None:
    known = {*vars(builtins), *vars(errors), *vars(dist)}
    for page in PAGES:
        named = set(re.findall(r"`(?:rankless\.)?(?:errors\.)?([A-Z]\w*Error)`", page.read_text()))
        assert named <= known, page
    for file in (ROOT / "src/rankless").rglob("*.py"):
        nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, _DOCUMENTED)]
        texts = [ast.get_docstring(node) or "" for node in nodes]
        named = {name for text in texts for name in re.findall(r"\b[A-Z]\w*Error\b", text)}
        assert named <= known, file


def test_a_command_in_a_block_of_no_kind_is_none_of_ranklesss() -> None:
    for page in PAGES:
        for match in _STEP.finditer(page.read_text()):
            if match["kind"] in {"", "sh", "text"}:
                assert not re.search(r"^\$? ?rankless (?!\[)", match["code"], re.MULTILINE), page
