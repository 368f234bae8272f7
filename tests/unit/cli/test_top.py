"""Tests of ``rankless top``: on a terminal until Ctrl-C, in a pipe, with each of its lines."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import rankless
from rankless.cli.top import usual_interval
from rankless.run.checkpoint_info import CheckpointInfo
from tests.helpers.commands import invoke
from tests.helpers.fake_http import BUCKET
from tests.helpers.fake_s3 import FakeS3
from tests.helpers.terminal import Terminal, start_on_terminal


def save(run: Any, *steps: int, **options: Any) -> None:
    directory = rankless.RunDirectory(run, **options)
    for step in steps:
        directory.save(f"step_{step}", {"w": torch.ones(1000)}, step=step)


@contextmanager
def watching(*arguments: object) -> Iterator[Terminal]:
    """The command on a terminal, which Ctrl-C ends."""
    terminal = start_on_terminal("-m", "rankless", "top", *map(str, arguments))
    yield terminal
    terminal.type(b"\x03")
    assert terminal.end() == 130
    assert "Traceback" not in terminal.text


def read_until(terminal: Terminal, text: str) -> None:
    while text not in terminal.text:
        assert terminal.read(), terminal.text


def first_view(*arguments: object, until: str = "latest") -> str:
    """What the command prints first into a pipe, up to the line with a text."""
    command = [sys.executable, "-u", "-m", "rankless", "top", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        while until not in lines[-1]:
            assert lines[-1], lines
            lines.append(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
    return "".join(lines)


def field(view: str, name: str) -> str:
    return next(line.removeprefix(name).strip() for line in view.splitlines() if line.startswith(name))


def test_a_view_on_a_terminal_follows_the_run(tmp_path: Path) -> None:
    save(tmp_path, *range(1, 13))
    with watching(tmp_path) as terminal:
        read_until(terminal, "complete (latest)")
        assert re.findall(r"step_\d+(?=  )", terminal.text) == [f"step_{step}" for step in range(3, 13)]
        save(tmp_path, 13)
        read_until(terminal, "step_13")


def test_a_folder_without_checkpoints_is_waited_for(tmp_path: Path) -> None:
    with watching(tmp_path) as terminal:
        read_until(terminal, "no checkpoint yet")
        save(tmp_path, 1)
        read_until(terminal, "step_1,")


def test_a_run_that_disappears_ends_the_view(tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    for command in (["top"], ["ls", "--watch"]):
        save(tmp_path / "run", 2)
        terminal = start_on_terminal("-m", "rankless", *command, str(tmp_path / "run"))
        read_until(terminal, "complete (latest)")
        shutil.rmtree(tmp_path / "run")
        assert terminal.end() == 2
        assert "was removed" in re.sub(r"\s+", " ", terminal.text)
        assert "Traceback" not in terminal.text


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    assert "there is no folder" in invoke("top", tmp_path / "nothing", code=2).stderr
    save(tmp_path, 1)
    assert "is a checkpoint itself" in invoke("top", tmp_path / "step_1", code=2).stderr


def test_each_line_says_what_is_there(tmp_path: Path) -> None:
    save(tmp_path, *range(1, 6), keep=3)
    rankless.set_alias(tmp_path, "production", "step_3")
    (tmp_path / ".step_6.0123456789abcdef.fedcba9876543210.partial").mkdir()
    with rankless.pin(tmp_path, "step_4"):
        view = first_view(tmp_path)
    assert str(tmp_path).startswith(field(view, "run").removesuffix("…"))  # as wide as the terminal
    assert re.fullmatch(r"step_5, \d+s ago", field(view, "last save"))
    assert field(view, "kept") == "3 of 5 saves, production = step_3, step_4 (pinned)"
    assert re.fullmatch(r"step_6, \d+ B, changed \d+s ago|step_6, .* kB, changed \d+s ago", field(view, "unfinished"))
    found = re.fullmatch(r"(\S+ \S+) free, for ([\d,]+) more checkpoints of (\S+ \S+)", field(view, "disk"))
    assert found is not None
    nbytes = rankless.list_checkpoints(tmp_path)[-1].nbytes
    assert int(found[2].replace(",", "")) == pytest.approx(shutil.disk_usage(tmp_path).free // nbytes, rel=0.2)


def test_the_interval_counts_saves_that_retention_has_removed() -> None:
    def info(sequence: int, time: float, run: str = "a") -> CheckpointInfo:
        return CheckpointInfo("t", Path("t"), sequence=sequence, time=time, run=run)

    assert usual_interval([info(1, 0.0), info(2, 60.0), info(3, 120.0)]) == 60
    assert usual_interval([info(1, 0.0), info(11, 600.0)]) == 60
    # A pause between two jobs is not usual, and neither is the time since another run.
    assert usual_interval([info(1, 0.0), info(2, 60.0), info(3, 9000.0), info(4, 9060.0)]) == 60
    assert usual_interval([info(1, 0.0, "b"), info(2, 60.0)]) is None
    assert usual_interval([info(1, 0.0), info(1, 60.0)]) is None


def test_the_journal_tells_what_saves_cost(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    journal = tmp_path / ".journal.jsonl"
    with journal.open("a") as file:
        saved = {"kind": "saved", "tag": "s", "time": 1e10, "nbytes": 3_000_000_000, "shared_nbytes": 1_000_000_000}
        file.write(json.dumps({**saved, "seconds": 4.0, "blocking_seconds": 0.25}) + "\nnoise\n")
        file.write(json.dumps({"kind": "failed", "tag": "t\x1b[2J", "time": 2e10, "error": "disk full"}) + "\n")
    view = first_view(tmp_path)
    assert field(view, "speed") == "500 MB/s, stalled the training for 0.25 s, durable after 4.00 s"
    assert field(view, "failed") == r"t\x1b[2J: disk full"
    journal.unlink()
    assert "speed" not in first_view(tmp_path)


@pytest.mark.parametrize("seconds", ["1e-320", "1e308", "-1", "0"])
def test_a_corrupt_journal_breaks_no_view(tmp_path: Path, seconds: str) -> None:
    save(tmp_path, 1)
    line = f'{{"kind":"saved","tag":"s","time":1e10,"nbytes":{2**53},"seconds":{seconds},"blocking_seconds":1e10}}\n'
    (tmp_path / ".journal.jsonl").write_text(line)
    assert "speed" not in first_view(tmp_path)


def test_the_local_tier_of_the_host_is_shown(tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    local = rankless.LocalTier(tmp_path / "tier", drain_every=10**6, copies=0)
    save(tmp_path / "run", 2, local=local)
    view = first_view(tmp_path / "run", "--local", tmp_path / "tier", until="in the tier only")
    here = view.partition("in the local tier ")[2].splitlines()
    assert here[0].endswith(":")
    rows = [line.split()[:2] for line in here[1:] if not line.startswith(" ")]  # 80 columns: they take further lines
    assert rows == [["tag", "step"], ["step_2", "2"]]


def test_a_run_in_an_object_store_has_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeS3().served() as endpoint:
        for name, value in {
            "AWS_ENDPOINT_URL_S3": endpoint,
            "AWS_REGION": "r",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }.items():
            monkeypatch.setenv(name, value)
        save(f"s3://{BUCKET}/run", 1, 2)
        view = first_view(f"s3://{BUCKET}/run")
    assert field(view, "kept") == "2 of 2 saves"
    assert "disk" not in view


def test_names_cannot_control_the_terminal(tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    (tmp_path / "run/step_1").rename(tmp_path / "run/\x1b[2Jx")
    (tmp_path / "run").rename(tmp_path / "a\x1b[31m")
    view = first_view(tmp_path / "a\x1b[31m")
    assert "\x1b" not in view
    assert r"\x1b[2Jx, " in field(view, "last save")
