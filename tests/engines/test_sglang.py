"""A real SGLang that loads with rankless: its parameters and tokens are those with its own loader."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import rankless
import tests.engines.torchvision_for_cpus  # noqa: F401 - transformers imports torchvision
from campaigns.common.reserved_port import reserve_port
from tests.helpers.corruption import flip_tensor_bit

if find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)


def run(program: str, **options: Any) -> subprocess.CompletedProcess[str]:
    size = options.get("tp_size", 1)
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.engines.sglang_programs", program, json.dumps(options)],
        # SGLang wants a NUMA node for each rank, unless it is told the cores of each.
        env={**os.environ, "SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(size))), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def lines_of(result: subprocess.CompletedProcess[str], mark: str) -> list[Any]:
    lines = [line for line in result.stdout.splitlines() if line.startswith(mark)]
    assert lines, result.stdout[-3000:] + result.stderr[-5000:]
    return [json.loads(line.removeprefix(mark)) for line in lines]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the Hub has it, without checksums."""
    from campaigns.engines.tiny_models import write_model

    return write_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return lines_of(run("generate", model_path=str(model)), "TOKENS ")


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "qwen3_moe"])
def test_all_parameters_are_those_of_sglangs_own_loader(name: str, size: int, tmp_path: Path) -> None:
    from campaigns.engines.tiny_models import write_model

    with reserve_port() as port:
        result = run("compare", model_path=str(write_model(name, tmp_path)), tp_size=size, port=port)
    ranks = [line for line in result.stdout.splitlines() if line.startswith("RANK ")]
    assert len(ranks) == size, result.stdout[-3000:] + result.stderr[-5000:]
    for line in ranks:
        assert "RanklessSglangLoader" in line
        assert line.endswith("different: []")


@pytest.mark.parametrize("size", [1, 2])
def test_a_folder_of_the_hub_serves_as_with_sglangs_own_loader(
    model: Path, expected: list[list[int]], size: int
) -> None:
    result = run("generate", model_path=str(model), load_format="rankless", tp_size=size)
    assert lines_of(result, "TOKENS ") == expected
    assert f"rankless has loaded {model}: " in result.stdout + result.stderr


def test_a_checkpoint_of_a_training_serves_verified_and_a_flipped_bit_does_not(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    stored = load_file(model / "model.safetensors")
    rankless.save_checkpoint(tmp_path / "run", "step_1", stored, rng=False)
    options = json.dumps({"path": str(tmp_path / "run")})
    arguments = {"model_path": str(model), "load_format": "rankless", "model_loader_extra_config": options}
    result = run("generate", **arguments)
    assert lines_of(result, "TOKENS ") == expected
    assert "; verified; " in result.stdout + result.stderr
    flip_tensor_bit(tmp_path / "run/step_1/model/model.safetensors", "model.norm.weight")
    result = run("generate", **arguments)
    assert "TOKENS" not in result.stdout
    assert "model tensor 'model.norm.weight'" in result.stdout + result.stderr
    assert "is corrupt" in result.stdout + result.stderr


def test_new_weights_are_loaded_in_place(model: Path, expected: list[list[int]], tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "new")
    stored = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    new = {name: torch.randn(t.shape, generator=generator).to(t.dtype) * 0.05 for name, t in stored.items()}
    save_file(new, folder / "model.safetensors", {"format": "pt"})
    result = run("generate", model_path=str(model), then=str(folder), load_format="rankless", tp_size=2)
    (is_updated,) = [answer[0] for answer in lines_of(result, "UPDATED ")]
    assert is_updated
    assert lines_of(result, "TOKENS ") == [*expected, *lines_of(run("generate", model_path=str(folder)), "TOKENS ")]


def test_an_unknown_option_is_named(model: Path) -> None:
    options = json.dumps({"gap": 1})
    result = run("generate", model_path=str(model), load_format="rankless", model_loader_extra_config=options)
    assert "TOKENS" not in result.stdout
    assert "the load format rankless has no option 'gap'" in result.stdout + result.stderr
