"""Tests that help is fast and coloured only on a terminal, and that shell completion works."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import rankless
from rankless.cli.commands import COMMANDS
from rankless.cli.completion import DTYPES, FORMATS
from rankless.conversion.pipeline import TARGETS
from rankless.conversion.tensor_filter import FLOATING
from rankless.formats.registry import NXD
from rankless.state.tensor_views import DTYPES as TORCH

RANKLESS = [sys.executable, "-m", "rankless"]
IMPORTS = [sys.executable, "-X", "importtime", "-m", "rankless"]


def on_a_terminal(*arguments: str) -> tuple[str, str]:
    """What a command prints on a terminal of 100 columns, and what it imports."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "COLUMNS": "100", "TERM": "xterm-256color"} | {"NO_COLOR": "", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen([*IMPORTS, *arguments], stdout=theirs, stderr=subprocess.PIPE, env=env, text=True)
    os.close(theirs)
    shown = b""
    while chunk := _read(ours):
        shown += chunk
    os.close(ours)
    assert process.stderr is not None
    imports = process.stderr.read()
    assert process.wait() == 0
    return shown.decode(), imports


def _read(terminal: int) -> bytes:
    """A terminal whose other side is closed is an error on Linux."""
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""


def imported(reported: str) -> set[str]:
    return set(re.findall(r"\| +(torch|numpy|rich)$", reported, re.MULTILINE))


@pytest.mark.parametrize("arguments", [["--help"], ["convert", "--help"], ["show", "--help"]])
def test_on_a_terminal_help_is_in_colour(arguments: list[str]) -> None:
    shown, reported = on_a_terminal(*arguments)
    assert "\x1b[1;33mUsage" in shown
    assert imported(reported) == {"rich"}
    if arguments == ["--help"]:
        plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
        assert all(name in plain and command.summary in plain for name, command in COMMANDS.items())


@pytest.mark.parametrize("arguments", [["--help"], ["convert", "--help"]])
def test_in_a_pipe_help_is_plain(arguments: list[str]) -> None:
    done = subprocess.run([*IMPORTS, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: ")
    assert "\x1b" not in done.stdout
    assert imported(done.stderr) <= (set() if arguments == ["--help"] else {"rich"})


def completed(*words: str) -> list[str]:
    """What bash would offer for the last word."""
    env = {"_RANKLESS_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(["rankless", *words])}
    env |= {"COMP_CWORD": str(len(words))}
    script = "from rankless.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", script],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    assert imported(done.stderr) <= {"rich"}
    return done.stdout.split()


def test_formats_and_dtypes_are_completed() -> None:
    assert completed("convert", "a", "b", "--to", "l") == ["lightning", "lightning-folder"]
    assert completed("convert", "a", "b", "--to", "hf", "--dtype", "bf") == ["bfloat16"]
    assert completed("convert", "a", "b", "--to", "n") == ["native", "nxd"]
    assert completed("edit", "a", "--to", "n") == ["native"]


def test_what_is_offered_is_all_there_is() -> None:
    assert FORMATS.keys() == {*TARGETS, NXD}
    assert set(DTYPES) == {str(TORCH[name]).removeprefix("torch.") for name in FLOATING}


def test_the_checkpoints_of_a_run_are_completed(tmp_path: Path) -> None:
    for step in (1, 2):
        rankless.save_checkpoint(tmp_path / "run", f"step_{step}", nn.Linear(1, 1), step=step)
    (tmp_path / "run/.hidden").mkdir()
    expected = [f"{tmp_path}/run/step_{step}" for step in (2, 1)]
    for command in ("show", "verify", "diff", "convert", "consolidate"):
        assert completed(command, f"{tmp_path}/run/") == expected, command
    assert completed("show", f"{tmp_path}/run/step_1") == expected[1:]
    assert completed("show", f"{tmp_path}/") == completed("show", f"{tmp_path}/nowhere/") == []
