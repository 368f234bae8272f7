"""A real vLLM that loads with rankless: its tokens are those with its own loader, and corrupt weights do not serve."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import rankless
from tests.helpers.corruption import flip_tensor_bit
from tests.helpers.vllm_programs import ENVIRONMENT, generate, lists_of, run, tokens_of

pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the Hub has it, without checksums."""
    from campaigns.engines.tiny_models import write_model

    return write_model("qwen3_moe", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    return tokens_of(generate(model))


@pytest.fixture
def saved(model: Path, tmp_path: Path) -> Path:
    """The same model, as a training has saved it, with checksums: a run of two checkpoints."""
    stored = load_file(model / "model.safetensors")
    rankless.save_checkpoint(tmp_path / "run", "step_1", {name: t * 0 for name, t in stored.items()}, rng=False)
    rankless.save_checkpoint(tmp_path / "run", "step_2", stored, rng=False)
    return tmp_path / "run"


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}], ids=["tp1", "tp2"])
def test_a_folder_of_the_hub_serves_as_with_vllms_own_loader(
    model: Path, expected: list[int], options: dict[str, Any]
) -> None:
    result = generate(model, load_format="rankless", **options)
    assert tokens_of(result) == expected
    assert f"rankless has loaded {model}: " in result.stdout + result.stderr
    assert "; not verified; " in result.stdout + result.stderr


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}], ids=["tp1", "tp2"])
def test_the_newest_checkpoint_of_a_training_serves_verified(
    model: Path, saved: Path, expected: list[int], options: dict[str, Any]
) -> None:
    result = generate(model, load_format="rankless", model_loader_extra_config={"path": str(saved)}, **options)
    assert tokens_of(result) == expected
    assert f"rankless has loaded {saved / 'step_2'}: " in result.stdout + result.stderr
    assert "; verified; " in result.stdout + result.stderr


@pytest.mark.parametrize(
    "tensor",
    [
        "model.norm.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.mlp.experts.3.down_proj.weight",
    ],
)
def test_a_flipped_bit_keeps_the_engine_from_serving_and_is_named(model: Path, saved: Path, tensor: str) -> None:
    file = saved / "step_2/model/model.safetensors"
    flip_tensor_bit(file, tensor)
    options = {"path": str(saved / "step_2")}
    result = generate(model, load_format="rankless", model_loader_extra_config=options, tensor_parallel_size=2)
    assert result.returncode
    assert "TOKENS" not in result.stdout
    assert f"model tensor '{tensor}' in {file} is corrupt" in result.stdout + result.stderr


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_what_vllm_packs_late_was_loaded_before(name: str, tmp_path: Path) -> None:
    from campaigns.engines.tiny_models import write_model

    result = run("load_in_late_steps", str(write_model(name, tmp_path)))
    assert "EQUAL True" in result.stdout, result.stdout[-3000:] + result.stderr[-3000:]


class TestReloadInPlace:
    """``reload_weights`` of vLLM: what it loads is proven, too, and may come from the option ``path``."""

    @pytest.fixture
    def changed(self, model: Path, tmp_path: Path) -> Path:
        folder = shutil.copytree(model, tmp_path / "changed")
        stored = {name: tensor.flip(0) for name, tensor in load_file(model / "model.safetensors").items()}
        save_file(stored, folder / "model.safetensors")
        return folder

    def reload(
        self, model: Path, options: dict[str, Any], reloads: list[dict[str, Any]], saved: str = ""
    ) -> subprocess.CompletedProcess[str]:
        options = {"model": str(model), "load_format": "rankless", **options}
        return run(
            "reload", json.dumps([options, reloads, saved]), in_one_process="tensor_parallel_size" not in options
        )

    @pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}], ids=["tp1", "tp2"])
    def test_from_another_folder(
        self, model: Path, expected: list[int], changed: Path, options: dict[str, Any]
    ) -> None:
        result = self.reload(model, options, [{"weights_path": str(changed)}])
        assert lists_of(result) == [expected, tokens_of(generate(changed))]
        assert f"rankless has loaded {changed}: " in result.stdout + result.stderr

    @pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}], ids=["tp1", "tp2"])
    def test_from_the_newest_checkpoint_of_a_training(
        self, model: Path, saved: Path, expected: list[int], changed: Path, options: dict[str, Any]
    ) -> None:
        options = {"model_loader_extra_config": {"path": str(saved)}, **options}
        result = self.reload(model, options, [{}], f"{saved} {changed / 'model.safetensors'}")
        assert lists_of(result) == [expected, tokens_of(generate(changed))]
        assert f"rankless has loaded {saved / 'step_3'}: " in result.stdout + result.stderr
        assert (result.stdout + result.stderr).count("; verified; ") == 2

    def test_from_the_folder_of_the_model_itself(
        self, model: Path, saved: Path, expected: list[int], changed: Path
    ) -> None:
        """Although its weights are elsewhere: `path` is only for the start, and for a reload without a name."""
        rankless.save_checkpoint(saved, "step_3", load_file(changed / "model.safetensors"), rng=False)
        options = {"model_loader_extra_config": {"path": str(saved)}}
        result = self.reload(model, options, [{"weights_path": str(model)}, {}])
        assert lists_of(result) == [tokens_of(generate(changed)), expected, expected]

    def test_what_cannot_be_opened_leaves_the_engine_as_it_is(
        self, model: Path, expected: list[int], changed: Path
    ) -> None:
        lacking = shutil.copytree(changed, changed.parent / "lacking")
        stored = load_file(changed / "model.safetensors")
        del stored["model.norm.weight"]
        save_file(stored, lacking / "model.safetensors")
        reloads = [changed / "missing", "some/where/else", lacking, changed / "model.safetensors"]
        result = self.reload(model, {}, [{"weights_path": str(path)} for path in reloads])
        assert lists_of(result) == [expected, expected, expected, expected, tokens_of(generate(changed))]
        assert f"ERROR there is no model in {changed / 'missing'}" in result.stdout
        assert f"ERROR {lacking} lacks 1 tensor of this model, such as 'model.norm.weight'" in result.stdout

    def test_a_flipped_bit_is_named(self, model: Path, saved: Path, expected: list[int]) -> None:
        file = saved / "step_2/model/model.safetensors"
        flip_tensor_bit(file, "model.layers.0.self_attn.o_proj.weight")
        result = self.reload(model, {}, [{"weights_path": str(saved / "step_2")}])
        assert lists_of(result) == [expected]
        assert f"model tensor 'model.layers.0.self_attn.o_proj.weight' in {file} is corrupt" in result.stderr


def test_a_draft_model_is_loaded_from_its_own_folder(model: Path, saved: Path, tmp_path: Path) -> None:
    """Also if the weights of the model are elsewhere."""
    draft = shutil.copytree(model, tmp_path / "draft")
    options = {"model_loader_extra_config": {"path": str(saved)}, "max_num_batched_tokens": 128}
    speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    result = generate(model, load_format="rankless", speculative_config=speculation, **options)
    assert f"rankless has loaded {saved / 'step_2'}: " in result.stdout + result.stderr
    assert f"rankless has loaded {draft}: " in result.stdout + result.stderr


class TestWhatCannotBeLoaded:
    def test_a_truncated_file(self, model: Path, tmp_path: Path) -> None:
        folder = shutil.copytree(model, tmp_path / "model")
        file = folder / "model.safetensors"
        os.truncate(file, file.stat().st_size - 100)
        result = generate(folder, load_format="rankless")
        assert result.returncode
        assert f"{file}" in result.stderr
        assert "truncated" in result.stderr

    def test_a_file_that_lacks_a_part_of_a_parameter(self, model: Path, tmp_path: Path) -> None:
        """vLLM's own loader starts with memory that was never written."""
        stored = load_file(model / "model.safetensors")
        del stored["model.layers.1.self_attn.k_proj.weight"]
        folder = shutil.copytree(model, tmp_path / "model")
        save_file(stored, folder / "model.safetensors")
        result = generate(folder, load_format="rankless")
        assert result.returncode
        assert "lack a part of 'model.layers.1.self_attn.qkv_proj.weight': they fill" in result.stderr

    def test_an_unknown_option(self, model: Path) -> None:
        result = generate(model, load_format="rankless", model_loader_extra_config={"gap": 1})
        assert result.returncode
        assert "the load format rankless has no option 'gap'; it has path, tag, verify, timeout" in result.stderr

    def test_another_model(self, model: Path, tmp_path: Path) -> None:
        stored = load_file(model / "model.safetensors")
        stored["model.norm.weight"] = stored["model.norm.weight"][:-1].clone()
        rankless.save_model(stored, tmp_path / "other", shard=True)
        result = generate(model, load_format="rankless", model_loader_extra_config={"path": str(tmp_path / "other")})
        assert result.returncode
        assert "TOKENS" not in result.stdout


@pytest.mark.parametrize(
    ("name", "layout", "options"),
    [
        ("llama", "tp2", ["--tp", "2"]),
        ("llama", "pp2", ["--pp", "2"]),
        ("mixtral", "ep2", ["--tp", "2", "--ep"]),
        ("gpt_oss", "tp2", ["--tp", "2"]),
        ("mamba", "tp2", ["--tp", "2"]),
    ],
)
def test_show_for_vllm_says_what_its_ranks_need(name: str, layout: str, options: list[str], tmp_path: Path) -> None:
    from campaigns.engines.tiny_models import write_model

    folder = write_model(name, tmp_path)
    command = [sys.executable, "-m", "rankless", "show", str(folder), "--for", "vllm", *options, "--json"]
    env = {**os.environ, **ENVIRONMENT}
    shown = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert shown.returncode == 0, shown.stderr[-3000:]
    planned = json.loads(shown.stdout)
    loaded = run("needed_bytes", f"{folder} {layout}")
    lines = [line for line in loaded.stdout.splitlines() if line.startswith("NEEDED ")]
    assert lines, loaded.stderr[-3000:]
    ranks = planned["ranks"]
    assert [[r["needed"], r["parameters"]] for r in ranks] == [[n, p] for n, _, p in json.loads(lines[0][7:])]
    assert planned["from_disk"] <= planned["bytes"]
    assert sum(r["from_store"] for r in ranks) <= planned["bytes"] + sum(r["alone"] for r in ranks if r["computed"])


def test_show_for_vllm_refuses_stages_without_layers(tmp_path: Path) -> None:
    from campaigns.engines.tiny_models import write_model

    folder = write_model("llama", tmp_path)
    command = [sys.executable, "-m", "rankless", "show", str(folder), "--for", "vllm", "--pp", "5"]
    env = {**os.environ, **ENVIRONMENT}
    shown = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert shown.returncode == 2
    assert "has fewer layers than pipeline stages" in shown.stderr


def test_show_for_vllm_says_that_a_checkpoint_lacks_parameters(tmp_path: Path) -> None:
    from campaigns.engines.tiny_models import write_model

    folder = write_model("llama", tmp_path)
    stored = load_file(folder / "model.safetensors")
    del stored["model.norm.weight"]
    save_file(stored, folder / "model.safetensors")
    command = [sys.executable, "-m", "rankless", "show", str(folder), "--for", "vllm", "--tp", "2"]
    env = {**os.environ, **ENVIRONMENT}
    shown = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert shown.returncode == 2
    assert "the model here lacks 1 parameter of rank 0" in shown.stderr
    assert "such as model.norm.weight: vLLM would not start with it" in shown.stderr
