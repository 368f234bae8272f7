"""Tests that checkpoints of DeepSpeed's AutoTP are read as DeepSpeed itself gathers their parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rankless
from rankless.errors import CorruptCheckpointError, FormatError
from tests.peers.deepspeed.launch import run_job

#: The stage, the dtype and the configuration of the model of each run.
RUNS = [(1, "fp32", {}), (2, "bf16", {}), (1, "bf16", {"tie_word_embeddings": True}), (0, "fp32", {})]


def dim_of(name: str, *, is_tied: bool) -> int | None:
    """The dimension in which the layers of Llama are divided; an embedding only if it is the output's weight, too."""
    if "norm" in name or ("embed" in name and not is_tied):
        return None
    return 1 if "o_proj" in name or "down_proj" in name else 0


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    specs = [
        {"stage": stage, "dtype": dtype, "config": config, "save": str(folder / f"run{number}")}
        for number, (stage, dtype, config) in enumerate(RUNS)
    ]
    run_job(request.param, folder / "job", specs, "tests.peers.deepspeed.autotp_jobs")
    return folder


@pytest.mark.parametrize("number", range(3))
def test_whole_parameters_and_moments(runs: Path, number: int) -> None:
    saved = runs / f"run{number}"
    ranks = [load_file(f"{saved}.rank{rank}.safetensors") for rank in range(2)]
    opened: Any = rankless.open(saved)
    names = [name.removeprefix("whole/") for name in ranks[0] if name.startswith("whole/")]
    assert len(names) > 15
    for name in names:
        master = opened[f"model/{name}"]
        assert torch.equal(master.to(ranks[0][f"whole/{name}"].dtype), ranks[0][f"whole/{name}"]), name
        for key, actual in (
            ("master", master),
            ("exp_avg", opened[f"optimizer/{name}/exp_avg"]),
            ("exp_avg_sq", opened[f"optimizer/{name}/exp_avg_sq"]),
        ):
            parts, dim = [rank[f"{key}/{name}"] for rank in ranks], dim_of(name, is_tied=number == 2)
            expected = parts[0] if dim is None else torch.cat(parts, dim)
            assert torch.equal(actual, expected.reshape(actual.shape)), (key, name)
    assert [result.problem for result in opened.verify() if result.problem] == []


def test_without_zero_the_model_is_read(runs: Path) -> None:
    whole = load_file(f"{runs / 'run3'}.rank0.safetensors")
    with pytest.raises(FormatError, match="optimizer=skip"):
        rankless.open(runs / "run3")
    opened: Any = rankless.open(runs / "run3", keys={"optimizer": "skip"})
    for name, tensor in whole.items():
        if name.startswith("whole/"):
            assert torch.equal(opened[f"model/{name.removeprefix('whole/')}"], tensor), name


def test_one_rank_is_no_model(runs: Path, tmp_path: Path) -> None:
    for file in (runs / "run0/global_step3").iterdir():
        if "mp_rank_00" in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(CorruptCheckpointError, match="1 of 2 model-parallel ranks"):
        rankless.open(tmp_path)
