"""Tests the visible output of commands: on a terminal of 80 columns, in a pipe, and when interrupted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rankless
from rankless.cli.commands import COMMANDS
from tests.helpers.terminal import code_on_terminal, start_on_terminal

#: Calls the commands whose arguments are given as JSON, one after the other, each under a line with its exit code.
CALLS = """
import json, sys
from rankless.cli.main import app
for args in json.loads(sys.argv[1]):
    code = app(args, prog_name="rankless", standalone_mode=False) or 0
    print("\\nexit", code, flush=True)
"""

#: Converts, 0.4 s for each chunk of 4 MiB.
SLOWLY = """
import sys, time
from rankless.engine.io import write
quick = write._write_chunk
def slow(*args):
    time.sleep(0.4)
    return quick(*args)
write._write_chunk = slow
from rankless.cli.entry import main
sys.argv[0] = "rankless"
main()
"""


#: Ctrl-C comes while a module is imported; it may be lost in another error.
INTERRUPTED_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "MODULE":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                if SWALLOWED:
                    raise ImportError("cannot load module more than once per process") from None
                raise
sys.meta_path.insert(0, Finder())
from rankless.cli.entry import main
main()
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("screen")
    name = "model.layers.10." + "deeply." * 12 + "nested.weight"
    for step in (1, 2):
        tensors = {name: torch.full((2, 3), float(step)), "body.bias": torch.zeros(1)}
        content = {"arguments": {"data": "/data/" + "x" * 90, "step": step}}
        metrics = {f"metric_{i}": 0.1 for i in range(12)}
        rankless.save_checkpoint(
            path / "run", f"step_{step}", tensors, user_content=content, step=step, metrics=metrics
        )
    (path / "empty").mkdir()
    return path


def sections(text: str) -> list[tuple[str, int]]:
    """What each call wrote, and its exit code."""
    actual = re.split(r"\nexit (\d+)\n", text)
    return list(zip(actual[::2], map(int, actual[1::2]), strict=False))


class TestOnATerminal:
    def test_every_command_fits_80_columns_has_colour_and_no_traceback(self, made: Path) -> None:
        run, left, right = made / "run", made / "run/step_1", made / "run/step_2"
        calls = [
            ["ls", run],
            ["show", run],
            ["verify", run],
            ["diff", left, right],
            ["prune", run, "--keep", "1", "--dry-run"],
        ]
        calls += [
            ["convert", left, made / "x.pt", "--to", "torch"],
            ["consolidate", left, "--output", made / "y.pt"],
        ]
        calls += [
            ["ls", made / "empty"],
            ["show", made / "nothing"],
            ["--help"],
            *([name, "--help"] for name in COMMANDS),
        ]
        with code_on_terminal(CALLS, json.dumps([[str(arg) for arg in args] for args in calls])) as terminal:
            terminal.end()
        actual = sections(terminal.text)
        assert [code for _, code in actual] == [0, 0, 0, 1, 0, 0, 0, 1, 2, *[0] * (1 + len(COMMANDS))][: len(actual)]
        assert len(actual) == len(calls)
        assert "\x1b[1;32mcomplete (latest)" in terminal.raw
        assert "Traceback" not in terminal.text
        for text, _ in actual:
            lines = [line for line in text.splitlines() if str(made) not in line]
            assert max(map(len, lines), default=0) <= 80, max(lines, key=len)
        for (text, _), name in zip(actual[-len(COMMANDS) :], COMMANDS, strict=True):
            assert f"Example: rankless {name} " in re.sub(r"\s+", " ", text)
            assert "Usage: rankless" in text

    @pytest.mark.parametrize(
        "module", ["typer", "rankless.cli.verify", "rich.progress", "numpy", "rankless.load.checkpoint_verification"]
    )
    @pytest.mark.parametrize("swallowed", [False, True])
    def test_ctrl_c_while_modules_are_imported(self, tmp_path: Path, module: str, swallowed: bool) -> None:
        """Also in modules that make another error of it, as compiled ones do."""
        rankless.save_checkpoint(tmp_path, "a", {"w": torch.zeros(1)}, rng=False)
        script = INTERRUPTED_IMPORT.replace("MODULE", module).replace("SWALLOWED", str(swallowed))
        command = [sys.executable, "-c", script, "verify", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")

    def test_a_bar_and_ctrl_c_is_one_word_exit_130_and_nothing_left_behind(self, tmp_path: Path) -> None:
        rankless.save_checkpoint(tmp_path, "big", {"w": torch.zeros(100 * 2**20, dtype=torch.uint8)}, rng=False)
        (tmp_path / "out").mkdir()
        with code_on_terminal(
            SLOWLY, "convert", str(tmp_path / "big"), str(tmp_path / "out/new"), "--to", "native"
        ) as terminal:
            while not re.search(r"converting big .*\d\.\d/\d+\.\d MB +\d+\.\d MB/s +0:00:0\d", terminal.text):
                assert terminal.read(), terminal.text
            assert list((tmp_path / "out").rglob("*.safetensors"))
            terminal.type(b"\x03")
            assert terminal.end() == 130
        assert terminal.text.replace("^C", "").strip().splitlines()[-1].endswith("error: interrupted")
        assert list((tmp_path / "out").iterdir()) == []


#: Saves with a bar on stderr, and logs: by handlers that were there before it, and by prints; argv: where to.
LOGGING = """
import logging, sys, time
import torch
import rankless
from rankless.engine.io import write
logging.basicConfig(level=logging.WARNING)
logging.getLogger("rankless").setLevel(logging.INFO)
own = logging.getLogger("mine")
own.propagate = False
own.addHandler(logging.StreamHandler(sys.stdout))
own.setLevel(logging.INFO)
quick = write._write_chunk
def slow(*args):
    time.sleep(0.5)
    return quick(*args)
write._write_chunk = slow
def listen(event):
    if isinstance(event, rankless.Progress) and event.done > event.total * 0.6 and not told:
        told.append(event)
        own.info("MINE half of it")
        logging.getLogger("other").warning("OTHER half of it")
        print("PRINTED half of it", flush=True)
told = []
model = {"w": torch.zeros(60 * 2**20, dtype=torch.uint8)}
rankless.save_checkpoint(sys.argv[1], "step_1", model, rng=False, on_event=listen)
logging.getLogger("other").warning("END")
"""


def screen(raw: str) -> list[str]:
    """What is left on a terminal: lines, as a cursor goes over them."""
    rows, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|[^\x1b]", raw):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            rows += [""] * (row == len(rows))
        elif part == "\x1b[2K":
            rows[row] = ""
        elif re.fullmatch(r"\x1b\[\d*A", part):
            row -= int(part[2:-1] or 1)
        elif not part.startswith("\x1b"):
            rows[row] = rows[row][:column].ljust(column) + part + rows[row][column + 1 :]
            column += 1
    return rows


class TestLogLinesBesideTheBar:
    def test_no_line_shares_its_line_with_the_bar_and_the_bar_is_gone_at_the_end(self, tmp_path: Path) -> None:
        with code_on_terminal(LOGGING, str(tmp_path)) as terminal:
            assert terminal.end() == 0
        assert re.search(r"saving step_1 .*MB/s", terminal.text)
        seen = [line.rstrip() for line in screen(terminal.raw) if line.strip()]
        saved = (
            r"INFO:rankless:saved .*/step_1: 62\.9 MB in [\d.]+ s \([\d.]+ MB/s\), of which the caller waited [\d.]+ s"
        )
        assert seen[:3] == ["MINE half of it", "WARNING:other:OTHER half of it", "PRINTED half of it"]
        assert re.fullmatch(saved, seen[3])
        assert seen[4:] == ["WARNING:other:END"]

    def test_what_is_printed_into_a_file_stays_there(self, tmp_path: Path) -> None:
        script = f"import sys; sys.stdout = open({str(tmp_path / 'out')!r}, 'w')\n" + LOGGING
        with code_on_terminal(script, str(tmp_path / "run")) as terminal:
            assert terminal.end() == 0
        assert (tmp_path / "out").read_text() == "MINE half of it\nPRINTED half of it\n"
        assert "WARNING:other:OTHER half of it" in terminal.text
        assert "PRINTED" not in terminal.text


#: Runs a command for which the import of torch takes longer than the bar waits.
SLOW_IMPORT = """
import sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            time.sleep(1.5)
sys.meta_path.insert(0, Slow())
from rankless.cli.entry import main
main()
"""

UNKNOWN = """
import time
from rankless.observe.terminal import progress_bar
with progress_bar("converting a") as show:
    time.sleep(1.3)
    show(0, 5000)
    time.sleep(0.3)
"""


class TestTheBarOfTinyWork:
    @pytest.mark.parametrize("command", [pytest.param("verify", marks=pytest.mark.full), "diff"])
    def test_there_is_none_while_torch_is_imported(self, tmp_path: Path, command: str) -> None:
        for tag in ("a", "b"):
            rankless.save_checkpoint(tmp_path, tag, {"w": torch.full((1,), ord(tag))}, rng=False)
        paths = [str(tmp_path / tag) for tag in ("a", "b")]
        terminal = start_on_terminal("-c", SLOW_IMPORT, command, *(paths if command == "diff" else paths[:1]))
        assert terminal.end() == (1 if command == "diff" else 0)
        assert "verifying" not in terminal.text
        assert "comparing" not in terminal.text

    def test_what_is_not_known_yet_is_not_shown(self) -> None:
        with code_on_terminal(UNKNOWN) as terminal:
            assert terminal.end() == 0
        assert "converting a" in terminal.text
        assert "0.0/5.0 kB" in terminal.text
        assert "?" not in terminal.text


class TestHelp:
    def test_the_list_of_commands_says_what_each_says_itself(self) -> None:
        from rankless.cli.commands import LazyCommands

        for name, command in LazyCommands().items():
            assert command.name == name
            assert f"rankless {name} " in command.epilog
            assert COMMANDS[name].summary.endswith(".")

    def test_help_and_completion_import_nothing_heavy(self) -> None:
        """They answer in a tenth of a second: rich alone takes half of that, and msgspec, awscrt and torch the rest."""
        heavy = r"\| +(torch|numpy|rich|msgspec|awscrt|rankless\.formats)$"
        for args, env in (
            (["--help"], {}),
            ([], {"_RANKLESS_COMPLETE": "complete_bash", "COMP_WORDS": "rankless con", "COMP_CWORD": "1"}),
        ):
            command = [sys.executable, "-X", "importtime", "-m", "rankless", *args]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | env)
            assert "consolidate" in done.stdout
            if not env:
                assert not re.search(heavy, done.stderr, re.MULTILINE)
            assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE)

    def test_a_mistyped_command_is_guessed(self) -> None:
        done = subprocess.run([sys.executable, "-m", "rankless", "shwo"], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "Did you mean 'show'?" in done.stderr
