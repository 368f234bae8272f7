"""Tests show and verify on ColossalAI's directories that a crash or a later save left inconsistent."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from rankless.cli.main import app
from rankless.colossalai import Booster


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    for kind in ("bins", "safe"):
        Booster().save_model(model, tmp_path / kind, shard=True, size_per_shard=0.003, use_safetensors=kind == "safe")
    Booster().save_optimizer(optimizer, tmp_path / "optim", shard=True, size_per_shard=0.005)
    return tmp_path


def run(*words: str) -> tuple[int, str]:
    actual = CliRunner().invoke(app, [*words], env={"COLUMNS": "400"})
    return actual.exit_code, actual.output


def test_sound_folders_are_sound(folder: Path) -> None:
    for kind in ("bins", "safe", "optim"):
        assert run("verify", str(folder / kind))[0] == 0
        code, said = run("show", str(folder / kind))
        assert code == 0
        assert "exp_avg" in said or "0.weight" in said


def test_every_missing_file_is_named(folder: Path) -> None:
    for name in ("pytorch_optim-00001.bin", "pytorch_optim_group.bin"):
        (folder / "optim" / name).unlink()
    for command in ("verify", "show"):
        code, said = run(command, str(folder / "optim"))
        assert code == 1
        assert "pytorch_optim-00001.bin is missing" in said
        assert "pytorch_optim_group.bin is missing" in said


def test_an_asynchronous_save_that_was_cut_short_is_told(folder: Path) -> None:
    second = folder / "safe/model-00002.safetensors"
    second.write_bytes(second.read_bytes()[:-8])
    (folder / "safe/model-00001.safetensors").unlink()
    code, said = run("verify", str(folder / "safe"))
    assert code == 1
    assert said.count("an asynchronous save, which writes its index first, did not finish") == 2


def test_a_file_with_a_tail_of_an_earlier_one_is_told(folder: Path) -> None:
    with (folder / "safe/model-00002.safetensors").open("ab") as file:
        file.write(b"tail")
    code, said = run("verify", str(folder / "safe"))
    assert code == 1
    assert "model-00002.safetensors: its tensors end at data byte" in said


def test_a_file_of_torch_save_that_was_cut_short_is_told(folder: Path) -> None:
    first = folder / "bins/pytorch_model-00001.bin"
    first.write_bytes(first.read_bytes()[:-100])
    code, said = run("verify", str(folder / "bins"))
    assert code == 1
    assert "pytorch_model-00001.bin" in said


def test_stale_shards_are_named_without_harm(folder: Path) -> None:
    shutil.copy(folder / "bins/pytorch_model-00001.bin", folder / "bins/pytorch_model-00009.bin")
    for command in ("verify", "show"):
        code, said = run(command, str(folder / "bins"))
        assert code == 0
        assert "pytorch_model-00009.bin is in no index: it was left by an earlier save" in said


def test_an_index_of_another_save_is_told(folder: Path) -> None:
    path = folder / "bins/pytorch_model.bin.index.json"
    index = json.loads(path.read_text())
    index["metadata"]["total_size"] *= 2
    path.write_text(json.dumps(index))
    assert "may be from different saves" in run("verify", str(folder / "bins"))[1]
    index["weight_map"]["0.weight"] = "pytorch_model-00002.bin"
    path.write_text(json.dumps(index))
    code, said = run("verify", str(folder / "bins"))
    assert code == 1
    assert "says that pytorch_model-00002.bin holds '0.weight', but it does not" in said
