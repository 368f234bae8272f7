"""Tests what all commands share: arguments, exit codes, streams, progress bars, and the format of values."""

from __future__ import annotations

import itertools
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import rankless
from rankless.cli.format_values import format_lines
from rankless.cli.show.module_sizes import summarize_modules
from rankless.inspection.brief_text import format_brief
from rankless.observe.units import format_size
from rankless.ondisk.data_files import TensorInfo
from tests.helpers.commands import invoke, invoke_json
from tests.helpers.pairwise import first_of
from tests.helpers.run_directories import list_names

#: Redirections that close streams.
CLOSED = (">&-", "2>&-", "<&- >&- 2>&-")


class TestCalls:
    @pytest.mark.parametrize("command", ["show", "verify"])
    def test_what_is_no_checkpoint_is_exit_2_and_two_lines(self, tmp_path: Path, command: str) -> None:
        (tmp_path / "text.txt").write_text("hello")
        for path in (tmp_path, tmp_path / "text.txt", tmp_path / "nothing", "hdfs://host/run"):
            result = invoke(command, path, code=2)
            assert result.stdout == ""
            assert result.stderr.startswith("error: ")
            assert len(result.stderr.splitlines()) <= 2

    @pytest.mark.parametrize("args", [["ls"], ["frobnicate"], ["show", "x", "--frobnicate"], ["ls", "a", "b"]])
    def test_wrong_arguments_are_exit_2(self, args: list[str]) -> None:
        assert "Usage" in invoke(*args, code=2).stderr

    @pytest.mark.parametrize("options", [["--keep", "1"], ["--leftovers"]])
    def test_a_checkpoint_is_no_run_to_be_pruned(self, made: Path, options: list[str]) -> None:
        assert "is a checkpoint itself" in invoke("prune", made / "step_1", *options, code=2).stderr

    @pytest.mark.parametrize("number", [0, -1])
    def test_one_checkpoint_is_always_kept(self, run: Path, number: int) -> None:
        assert f"--keep must be a number above 0; got {number}" in invoke("prune", run, "--keep", number, code=2).stderr
        assert len(list_names(run)) == 3

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (["--tp-size", "2"], "'hf' has no options tp_size"),
            (["--no-xser", "--dp-size", "1"], "'hf' has no options dp_size, xser"),
            (["--layout", "llama"], "layout is only for NxD"),
            (["--key", "model="], "--key takes PART=PATH"),
        ],
    )
    def test_an_option_that_would_do_nothing_is_refused(
        self, made: Path, tmp_path: Path, options: list[str], said: str
    ) -> None:
        assert said in invoke("convert", made, tmp_path / "out", "--to", "hf", *options, code=2).stderr
        assert list(tmp_path.iterdir()) == []

    def test_version(self) -> None:
        assert invoke("--version").stdout == f"rankless {rankless.__version__}\n"

    def test_as_a_module_in_a_pipe_without_torch_and_without_colour(self, made: Path) -> None:
        """``ls`` and ``show`` answer at once: they do not import torch."""
        command = [sys.executable, "-X", "importtime", "-m", "rankless"]
        for name in ("ls", "show"):
            done = subprocess.run([*command, name, str(made)], capture_output=True, text=True, check=True)
            assert "step_3" in done.stdout
            assert "\x1b" not in done.stdout
            assert not re.search(r"\| +(torch|numpy)$", done.stderr, re.MULTILINE)

    def test_a_reader_that_goes_away_is_no_error(self, tmp_path: Path) -> None:
        many = {f"a.rather.long.name.{i}": torch.zeros(1) for i in range(3000)}  # more than a pipe takes
        save_file(many, tmp_path / "model.safetensors")
        for more in ("--all", "--json"):
            command = f"{sys.executable} -m rankless show {tmp_path} {more} | head -c 4; echo ${{PIPESTATUS[0]}}"
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
            assert re.fullmatch(r'(path|{"pa)141\n', done.stdout)  # what cat, grep and git give there
            assert done.stderr == ""

    @first_of(
        3,
        ("args", "closed"),
        [
            *(("--help", CLOSED[0]), ("ls RUN", CLOSED[1]), ("convert RUN OUT --to dcp", CLOSED[-1])),
            *(("--help", CLOSED[1]), ("ls RUN", CLOSED[0]), ("convert RUN OUT --to dcp", CLOSED[0])),
            *(("--help", CLOSED[-1]), ("ls RUN", CLOSED[-1]), ("convert RUN OUT --to dcp", CLOSED[1])),
            *itertools.product(["ls RUN --json", "verify RUN"], CLOSED),
        ],
    )
    def test_closed_streams_are_no_error_and_get_nothing(
        self, made: Path, tmp_path: Path, args: str, closed: str
    ) -> None:
        """Not even what the files that are opened in their place would get."""
        args = args.replace("RUN", str(made)).replace("OUT", str(tmp_path / "out"))
        command = f"{sys.executable} -W always -m rankless {args} {closed}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert bool(done.stdout) == (">&-" not in closed.split())
        if "convert" in args:
            assert invoke_json("diff", made, tmp_path / "out", "model/*")["equal"]

    @pytest.mark.parametrize("args", ["ls", "show", "ls --json"])
    def test_what_cannot_be_written_is_exit_1(self, made: Path, args: str) -> None:
        command = f"{sys.executable} -m rankless {args} {made} > /dev/full"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")


class TestProgress:
    SCRIPT = """
import sys, time
from rankless.observe.terminal import show_progress
with show_progress("verifying a", 4_000_000_000) as done:
    for _ in range(3):
        time.sleep(float(sys.argv[1]))
        done(1_000_000_000)
"""

    def on_terminal(self, seconds: float) -> str:
        """What the bar writes to a terminal in a task of three steps of so many seconds."""
        ours, theirs = pty.openpty()
        env = {**os.environ, "COLUMNS": "80", "TERM": "xterm"}
        with subprocess.Popen([sys.executable, "-c", self.SCRIPT, str(seconds)], stderr=theirs, env=env) as process:
            os.close(theirs)
            written = b""
            try:
                while data := os.read(ours, 65536):
                    written += data
            except OSError:  # the terminal's other end is closed
                pass
        os.close(ours)
        assert process.returncode == 0
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written.decode())

    def test_a_bar_with_rate_and_time_left_after_a_second(self) -> None:
        shown = self.on_terminal(0.7)
        assert re.search(r"verifying a .*2\.0/4\.0 GB +\d\.\d GB/s +0:00:0\d", shown)
        assert max(len(line.rstrip()) for line in re.split("[\r\n]+", shown)) <= 80

    def test_no_bar_for_what_is_done_at_once(self) -> None:
        assert self.on_terminal(0.0) == ""


class TestWords:
    @pytest.mark.parametrize(
        ("nbytes", "text"),
        [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "1.00 kB"),
            (12_345, "12.3 kB"),
            (999_499, "999 kB"),
            (999_501, "1.00 MB"),
            (5_000_000_000, "5.00 GB"),
            (123_456 * 10**12, "123456 TB"),
        ],
    )
    def test_sizes_have_three_digits(self, nbytes: int, text: str) -> None:
        assert format_size(nbytes) == text

    def test_a_module_that_holds_nearly_everything_is_shown_by_its_parts(self) -> None:
        def big(n: int) -> TensorInfo:
            return TensorInfo("U8", (n,))

        llama = {f"model.layers.{i}.w": big(100) for i in range(32)}
        llama |= {"model.embed.weight": big(500), "model.norm.weight": big(1), "lm_head.weight": big(99)}
        actual = {part.name: part.nbytes for part in summarize_modules({"model": llama})}
        assert actual == {"": 3800, "model.layers": 3200, "model.embed": 500, "lm_head": 99, "model.norm": 1}

    def test_values_take_a_line_each_unless_they_fit_on_one(self) -> None:
        tree = {"a": {"b": 1}, "long": {"first": "x" * 40, "second": "y" * 40}, "many": [{"k": "z" * 30}] * 9}
        assert dict(format_lines(tree)) == {
            "a": "{'b': 1}",
            "long.first": repr("x" * 40),
            "long.second": repr("y" * 40),
            **{f"many[{i}]": repr({"k": "z" * 30}) for i in range(5)},
            "many[5:]": "4 more",
        }
        assert len(format_brief("x" * 10_000)) < 80
