"""What people see: commands on a terminal of 80 columns, in a pipe, and when they are interrupted."""

from __future__ import annotations

import codecs
import json
import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.cli.commands import COMMANDS

#: Calls the commands whose arguments are given as JSON, one after the other, each under a line with its exit code.
CALLS = """
import json, sys
from holdfast.cli.main import app
for args in json.loads(sys.argv[1]):
    code = app(args, prog_name="holdfast", standalone_mode=False) or 0
    print("\\nexit", code, flush=True)
"""

#: Converts, 0.4 s for each chunk of 4 MiB.
SLOWLY = """
import sys, time
from holdfast.engine import write
quick = write._write
def slow(*args):
    time.sleep(0.4)
    return quick(*args)
write._write = slow
from holdfast.cli.main import main
sys.argv[0] = "holdfast"
main()
"""


class Terminal:
    """A program on a terminal of 80 columns, and what it has written."""

    def __init__(self, *command: str) -> None:
        self._ours, theirs = pty.openpty()
        env = {key: value for key, value in os.environ.items() if key not in {"COLUMNS", "NO_COLOR"}}
        env |= {"TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env,
            start_new_session=True,
            preexec_fn=_controlling,  # noqa: PLW1509 - Ctrl-C reaches the program that has the terminal
        )
        os.close(theirs)
        self.raw = ""
        # A character may come in two reads.
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def read(self, seconds: float = 60.0) -> bool:
        """Take in what has been written; ``False`` at the end."""
        if not select.select([self._ours], [], [], seconds)[0]:
            raise TimeoutError(self.raw)
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # the other end is closed
            data = b""
        self.raw += self._decoder.decode(data)
        return bool(data)

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def end(self) -> int:
        while self.read():
            pass
        os.close(self._ours)
        return self.process.wait(30)

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.raw).replace("\r\n", "\n")


def _controlling() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    fcntl.ioctl(0, termios.TIOCSWINSZ, (24).to_bytes(2, "little") + (80).to_bytes(2, "little") + bytes(4))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("screen")
    name = "model.layers.10." + "deeply." * 12 + "nested.weight"
    for step in (1, 2):
        tensors = {name: torch.full((2, 3), float(step)), "body.bias": torch.zeros(1)}
        content = {"arguments": {"data": "/data/" + "x" * 90, "step": step}}
        metrics = {f"metric_{i}": 0.1 for i in range(12)}
        holdfast.save_checkpoint(
            path / "run", f"step_{step}", tensors, user_content=content, step=step, metrics=metrics
        )
    (path / "empty").mkdir()
    return path


def sections(text: str) -> list[tuple[str, int]]:
    """What each call wrote, and its exit code."""
    found = re.split(r"\nexit (\d+)\n", text)
    return list(zip(found[::2], map(int, found[1::2]), strict=False))


class TestOnATerminal:
    def test_every_command_fits_80_columns_has_colour_and_no_traceback(self, made: Path) -> None:
        run, one, two = made / "run", made / "run/step_1", made / "run/step_2"
        calls = [
            ["ls", run],
            ["show", run],
            ["verify", run],
            ["diff", one, two],
            ["prune", run, "--keep", "1", "--dry-run"],
        ]
        calls += [
            ["convert", one, made / "x.pt", "--to", "torch"],
            ["consolidate", one, "--output_file", made / "y.pt"],
        ]
        calls += [
            ["ls", made / "empty"],
            ["show", made / "nothing"],
            ["--help"],
            *([name, "--help"] for name in COMMANDS),
        ]
        terminal = Terminal("-c", CALLS, json.dumps([[str(arg) for arg in args] for args in calls]))
        terminal.end()
        found = sections(terminal.text)
        assert [code for _, code in found] == [0, 0, 0, 1, 0, 0, 0, 1, 2, *[0] * (1 + len(COMMANDS))][: len(found)]
        assert len(found) == len(calls)
        assert "\x1b[1;32mcomplete (latest)" in terminal.raw
        assert "Traceback" not in terminal.text
        for text, _ in found:
            lines = [line for line in text.splitlines() if str(made) not in line]
            assert max(map(len, lines), default=0) <= 80, max(lines, key=len)
        for (text, _), name in zip(found[-len(COMMANDS) :], COMMANDS, strict=True):
            assert f"Example: holdfast {name} " in re.sub(r"\s+", " ", text)
            assert "Usage: holdfast" in text

    def test_a_bar_and_ctrl_c_is_one_word_exit_130_and_nothing_left_behind(self, tmp_path: Path) -> None:
        holdfast.save_checkpoint(tmp_path, "big", {"w": torch.zeros(100 * 2**20, dtype=torch.uint8)}, rng=False)
        (tmp_path / "out").mkdir()
        terminal = Terminal("-c", SLOWLY, "convert", str(tmp_path / "big"), str(tmp_path / "out/new"), "--to", "native")
        while not re.search(r"converting big .*\d\.\d/\d+\.\d MB +\d+\.\d MB/s +0:00:0\d", terminal.text):
            assert terminal.read(), terminal.text
        assert list((tmp_path / "out").rglob("*.safetensors"))
        terminal.type(b"\x03")
        assert terminal.end() == 130
        assert terminal.text.replace("^C", "").strip().splitlines()[-1].endswith("error: interrupted")
        assert list((tmp_path / "out").iterdir()) == []


class TestHelp:
    def test_the_list_of_commands_says_what_each_says_itself(self) -> None:
        from holdfast.cli.commands import Lazily

        for name, command in Lazily().items():
            assert command.name == name
            assert f"holdfast {name} " in command.epilog
            assert COMMANDS[name].summary.endswith(".")

    def test_help_and_completion_import_nothing_heavy(self) -> None:
        """They answer in a tenth of a second: rich alone takes half of that, and msgspec, awscrt and torch the rest."""
        heavy = r"\| +(torch|numpy|rich|msgspec|awscrt|holdfast\.formats)$"
        for args, env in (
            (["--help"], {}),
            ([], {"_HOLDFAST_COMPLETE": "complete_bash", "COMP_WORDS": "holdfast con", "COMP_CWORD": "1"}),
        ):
            command = [sys.executable, "-X", "importtime", "-m", "holdfast", *args]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | env)
            assert "consolidate" in done.stdout
            if not env:
                assert not re.search(heavy, done.stderr, re.MULTILINE)
            assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE)

    def test_a_mistyped_command_is_guessed(self) -> None:
        done = subprocess.run([sys.executable, "-m", "holdfast", "shwo"], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "Did you mean 'show'?" in done.stderr
