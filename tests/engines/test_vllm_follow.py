"""A real vLLM that follows published weights: after each version its tokens are those of an engine with that model."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import rankless
from tests.helpers.vllm_programs import generate, lists_of, run, tokens_of

pytest.importorskip("vllm")

OPTIONS = [{}, {"tensor_parallel_size": 2}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from campaigns.engines.tiny_models import write_model

    return write_model("qwen3_moe", tmp_path_factory.mktemp("models"))


def make_versions(model: Path, folder: Path, count: int) -> list[Path]:
    """Write folders of models, in each of which a part of all weights has changed."""
    torch.manual_seed(0)
    folders, stored = [], load_file(model / "model.safetensors")
    for number in range(count):
        stored = {
            name: torch.where(torch.rand(t.shape) < 0.05, t * 1.02 + 0.03 * torch.randn(t.shape).to(t.dtype), t)
            for name, t in stored.items()
        }
        folders.append(shutil.copytree(model, folder / f"model_{number}"))
        save_file(stored, folders[-1] / "model.safetensors", metadata={"format": "pt"})
    return folders


def versions_of(result: subprocess.CompletedProcess[str]) -> list[str]:
    return [line.split()[1] for line in result.stdout.splitlines() if line.startswith("VERSION ")]


@pytest.mark.parametrize("options", OPTIONS, ids=["tp1", "tp2"])
def test_an_engine_follows_and_a_worker_that_fails_changes_nothing(
    model: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    folders = make_versions(model, tmp_path, 3)
    failing = options.get("tensor_parallel_size", 1) - 1
    arguments = [
        {"model": str(model), "load_format": "rankless", **options},
        str(tmp_path / "weights"),
        list(map(str, folders)),
        {"1": failing},
        2,
    ]
    result = run("follow", json.dumps(arguments), in_one_process=not options)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    first, *later = lists_of(result)
    fresh = [tokens_of(generate(folder)) for folder in folders]
    assert first == tokens_of(generate(model))
    assert later == [fresh[0], fresh[0], fresh[1], fresh[2]]
    assert versions_of(result) == ["1", "2", "3", "None"]
    assert f"all workers serve the version that they had: worker {failing}: injected" in result.stdout


@pytest.mark.parametrize("options", OPTIONS, ids=["tp1", "tp2"])
def test_an_engine_starts_with_the_newest_version(model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    folders = make_versions(model, tmp_path, 3)
    with rankless.WeightPublisher(tmp_path / "weights") as publisher:
        for folder in folders:
            publisher.publish(load_file(folder / "model.safetensors"))
    path = {"path": str(tmp_path / "weights")}
    result = generate(model, load_format="rankless", model_loader_extra_config=path, **options)
    assert tokens_of(result) == tokens_of(generate(folders[-1]))
    assert "; verified; " in result.stdout + result.stderr


def test_fifty_versions_beside_generation(model: Path, tmp_path: Path) -> None:
    """The oracle is vLLM's own loader, which reloads each folder in an engine of its own."""
    folders = list(map(str, make_versions(model, tmp_path, 50)))
    options = {"model": str(model), "tensor_parallel_size": 2}
    arguments = [{**options, "load_format": "rankless"}, str(tmp_path / "weights"), folders]
    followed = run("follow_async", json.dumps(arguments), in_one_process=False)
    assert followed.returncode == 0, followed.stdout[-3000:] + followed.stderr[-3000:]
    reloads = [{"weights_path": folder} for folder in folders]
    expected = run("reload", json.dumps([options, reloads, ""]), in_one_process=False)
    assert lists_of(followed) == lists_of(expected)[1:]
    assert versions_of(followed) == [str(number) for number in range(1, 51)]
    (busy,) = (line.split() for line in followed.stdout.splitlines() if line.startswith("BUSY "))
    assert int(busy[1]) > 50
    assert busy[2] == "50"
