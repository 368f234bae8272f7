"""Tests every command on every format: intact, corrupt, an empty directory, and a missing path."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

import rankless
from rankless.cli.main import app

FORMATS = {
    "native": "run/step_1",
    "hf": "hf",
    "safetensors": "x.safetensors",
    "torch": "x.pt",
    "lightning": "x.ckpt",
    "dcp": "dcp",
}

#: What each command is called with; ``OUT.safetensors`` is a path where there is nothing.
CALLS = {
    "show": ["show", "IN"],
    "verify": ["verify", "IN"],
    "stats": ["stats", "IN"],
    "diff": ["diff", "IN", "NATIVE", "model/*"],
    "convert": ["convert", "IN", "OUT.safetensors", "--to", "safetensors"],
    "consolidate": ["consolidate", "IN", "--output", "OUT.safetensors"],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("formats")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 20))
    rankless.save_checkpoint(path / "run", "step_1", model, user_content={"step": 1}, step=1)
    for to, name in FORMATS.items():
        if to not in {"native", "dcp"}:
            rankless.convert(path / "run", path / name, to=to)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model.state_dict()}, checkpoint_id=path / "dcp", no_dist=True)
    return path


def call(name: str, made: Path, given: Path, out: Path, *more: str) -> Any:
    places = {
        "IN": given,
        "NATIVE": made / "run/step_1",
        "OUT.safetensors": out / "out.safetensors",
    }
    result = CliRunner().invoke(app, [str(places.get(arg, arg)) for arg in CALLS[name]] + list(more))
    assert "Traceback" not in result.output
    assert "\x1b" not in result.output
    if result.exit_code and name != "verify":
        assert len(result.stderr.splitlines()) <= 2
    return result


@pytest.mark.parametrize("command", CALLS)
@pytest.mark.parametrize("kind", FORMATS)
class TestOnEveryFormat:
    def test_for_people_and_for_programs(self, made: Path, tmp_path: Path, kind: str, command: str) -> None:
        given = made / FORMATS[kind]
        plain = call(command, made, given, tmp_path)
        assert (plain.exit_code, plain.stderr) == (0, "")
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        report = json.loads(call(command, made, given, tmp_path, "--json").stdout)
        if command == "show":
            assert {entry["name"]: entry["shape"] for entry in report["tensors"]} == {
                "model/0.weight": [30, 40],
                "model/0.bias": [30],
                "model/1.weight": [20, 30],
                "model/1.bias": [20],
            }
        elif command == "verify":
            assert report["ok"]
        elif command == "diff":
            assert (report["equal"], report["compared"]) == (True, 4)
        else:
            assert Path(report["path"]).exists()
            assert rankless.open(report["path"])["model/0.weight"].shape == (30, 40)

    def test_cut_off_it_is_told_in_two_lines_and_nothing_is_left(
        self, made: Path, tmp_path: Path, kind: str, command: str
    ) -> None:
        name = FORMATS[kind].rsplit("/", maxsplit=1)[-1]
        source, copy = made / FORMATS[kind], tmp_path / "in" / name
        copy.parent.mkdir()
        shutil.copytree(source, copy) if source.is_dir() else shutil.copyfile(source, copy)
        files = [file for file in copy.rglob("*") if file.is_file()] if copy.is_dir() else [copy]
        largest = max(files, key=lambda file: file.stat().st_size)
        os.truncate(largest, largest.stat().st_size // 2)
        (tmp_path / "out").mkdir()
        result = call(command, made, copy, tmp_path / "out")
        assert result.exit_code in {1, 2}
        assert name in result.output
        assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("command", CALLS)
@pytest.mark.parametrize("there", [True, False], ids=["empty", "nothing"])
def test_where_there_is_no_checkpoint_is_exit_2_two_lines_and_nothing_left(
    made: Path, tmp_path: Path, command: str, there: bool
) -> None:
    (tmp_path / "out").mkdir()
    if there:
        (tmp_path / "in").mkdir()
    result = call(command, made, tmp_path / "in", tmp_path / "out")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert list((tmp_path / "out").iterdir()) == []
