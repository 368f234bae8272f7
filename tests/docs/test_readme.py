"""Tests that the program of the README prints what the README shows, as real jobs of torchrun."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()

#: What differs from run to run: sizes, times and rates.
_FIGURE = r"[\d.]+(?:e-\d+)? (?:[kM]?B|m?s|B/s|kB/s|MB/s)"


def block(kind: str) -> str:
    found = re.search(rf"^```{kind}\n(.*?)^```$", README[README.index("## A program") :], re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


def pattern(line: str) -> str:
    """What a shown line may look like: figures differ, paths are absolute, and the rest of a line is left out."""
    text = re.escape(line).replace("…", ".*").replace("runs/a", r"\S*runs/a")
    return re.sub(r"[\d.\\]+\\ (?:[kM]?B|m?s)\b", lambda _: _FIGURE, text)


def test_the_program_prints_what_is_shown(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block("python"))
    shown: dict[str, list[str]] = {}
    for line in block("text").splitlines():
        if line.startswith("$ "):
            shown[line[2:]] = []
        else:
            shown[[*shown][-1]].append(line)
    assert len(shown) == 2
    for command, lines in shown.items():
        torchrun, *arguments = shlex.split(command)
        assert torchrun == "torchrun"
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *arguments],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        for line in lines:
            assert re.search(f"^{pattern(line)}$", done.stderr, re.MULTILINE), (line, done.stderr)


def test_it_is_read_in_a_minute() -> None:
    assert len(README.splitlines()) <= 120
