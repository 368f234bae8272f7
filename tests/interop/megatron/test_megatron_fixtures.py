"""Tests that what megatron-core wrote is read bit for bit, in every form of its optimizer states."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import rankless
from rankless.errors import FormatError
from tests.helpers.equality import equal_bits
from tests.helpers.megatron_runs import build_module, build_optimizer, gather_tensors, resume_sharded
from tests.helpers.pool import Ranks
from tests.helpers.processes import run_command
from tests.interop.megatron.conftest import NAMES, Fixture

pytestmark = pytest.mark.filterwarnings("ignore")

OpenFixture = Callable[[str], Fixture]


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_equals_the_oracle(open_fixture: OpenFixture, name: str) -> None:
    fixture = open_fixture(name)
    weights, masters = (fixture.of_kind(kind) for kind in ("weights", "master"))
    opened = rankless.open(fixture.path)
    assert opened.format == "megatron"
    names = {f"model/{key}" for key in masters}
    names |= {f"optimizer/{key}/{state}" for key in masters for state in ("exp_avg", "exp_avg_sq", "step")}
    assert set(opened.keys()) == names
    for key, master in masters.items():
        assert equal_bits(opened[f"model/{key}"], master)
        for state in ("exp_avg", "exp_avg_sq"):
            assert equal_bits(opened[f"optimizer/{key}/{state}"], fixture.of_kind(state)[key])
        assert opened[f"optimizer/{key}/step"] == fixture.numbers["steps"]
    with_weights = rankless.open(fixture.path, keys={"weights": "model"})
    assert all(equal_bits(with_weights[f"model/{key}"], weight) for key, weight in weights.items())
    assert len(weights) == len(masters) >= 20
    assert not [check for check in opened.verify() if check.problem]


@pytest.mark.parametrize("name", NAMES)
def test_values_equal_the_oracle(open_fixture: OpenFixture, name: str) -> None:
    fixture = open_fixture(name)
    content = rankless.open(fixture.path).values["user_content"]
    assert content["iteration"] == fixture.numbers["iteration"]
    assert isinstance(content["args"], Namespace)
    assert content["args"].num_layers == fixture.numbers["options"]["layers"]
    assert content["args"].exit_signal == "signal.Signals(15)"
    assert content["args"].params_dtype == next(iter(fixture.of_kind("weights").values())).dtype
    assert content["opt_param_scheduler"] == fixture.numbers["scheduler"]
    random_states = [state for states in content["rng_state"].values() for state in states]
    assert len(random_states) >= 1
    assert all(state["torch_rng_state"].dtype == torch.uint8 for state in random_states)


@pytest.mark.parametrize("name", NAMES)
def test_a_training_resumes(open_fixture: OpenFixture, name: str) -> None:
    """A module of torch and AdamW get everything, and the settings of each group are those of its last step."""
    fixture = open_fixture(name)
    module = build_module({key: tuple(tensor.shape) for key, tensor in fixture.of_kind("master").items()})
    optimizer = build_optimizer(module)
    content = rankless.load_checkpoint(fixture.path, model=module, optimizer=optimizer)
    assert content["iteration"] == 30
    check_tensors(fixture, gather_tensors(module, optimizer))
    rows = fixture.numbers["each step's lr, weight decay and multiplier of it, by group"][-1]
    expected = {multiplier: (lr, decay) for lr, decay, multiplier in rows}
    for group, multiplier in zip(optimizer.param_groups, (1.0, 0.0), strict=True):
        assert (group["lr"], group["weight_decay"]) == expected[multiplier]
        assert group["betas"] == tuple(fixture.numbers["betas"])
    optimizer.step()


def check_tensors(fixture: Fixture, tensors: dict[str, torch.Tensor]) -> None:
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        expected = fixture.of_kind(kind)
        assert expected
        assert all(equal_bits(tensors[f"{kind}/{key}"], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize(
    "name", ["dp_tp2_dp2_fp32_mcore16", "full_tp2_pp2_bf16_mcore19", "model_space_tp2_dp2_bf16_mcore15"]
)
def test_ranks_load_their_shards(ranks: Ranks, open_fixture: OpenFixture, name: str) -> None:
    fixture = open_fixture(name)
    shapes = {key: tuple(tensor.shape) for key, tensor in fixture.of_kind("master").items()}
    for world_size in (2, 3):
        for tensors, groups in ranks(world_size, resume_sharded, str(fixture.path), shapes):
            check_tensors(fixture, tensors)
            assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


@pytest.mark.parametrize(
    "name", ["dp_tp1_dp2_bf16_mcore16", "legacy_tp2_pp1_dp1_bf16_mcore16", "plain_tp2_fp32_mcore16"]
)
@pytest.mark.parametrize("to", ["native", "torch", "dcp"])
def test_conversions_keep_everything(open_fixture: OpenFixture, tmp_path: Path, name: str, to: str) -> None:
    fixture = open_fixture(name)
    converted = rankless.convert(fixture.path, tmp_path / f"converted{'.pt' if to == 'torch' else ''}", to=to)
    module = build_module({key: tuple(tensor.shape) for key, tensor in fixture.of_kind("master").items()})
    optimizer = build_optimizer(module)
    content = rankless.load_checkpoint(converted, model=module, optimizer=optimizer)
    check_tensors(fixture, gather_tensors(module, optimizer))
    assert content["iteration"] == 30


def test_the_names_of_transformers(open_fixture: OpenFixture, tmp_path: Path) -> None:
    """A model with layer norms, biases and rotary positions is a GPT-NeoX without parallel residual."""
    fixture = open_fixture("dp_tp1_dp2_bf16_mcore16")
    folder = rankless.convert(fixture.path, tmp_path / "hf", to="hf", dtype="bfloat16")
    opened, weights = rankless.open(folder), fixture.of_kind("weights")
    assert len(opened.keys()) == len(weights)
    assert equal_bits(opened["model/gpt_neox.embed_in.weight"], weights["embedding.word_embeddings.weight"])
    assert equal_bits(
        opened["model/gpt_neox.layers.1.attention.query_key_value.weight"],
        weights["decoder.layers.1.self_attention.linear_qkv.weight"],
    )
    with pytest.raises(FormatError, match=r"normalization LayerNorm.*is none of llama, qwen2"):
        rankless.convert(open_fixture("full_tp2_pp2_bf16_mcore16").path, tmp_path / "no", to="hf")


def test_a_run_names_its_newest_iteration(open_fixture: OpenFixture, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(open_fixture("full_tp2_dp1_fp32_mcore16").path, run)
    shutil.copytree(run / "iter_0000030", run / "iter_0000040")
    assert rankless.open(run).path.name == "iter_0000030"
    (run / "latest_checkpointed_iteration.txt").write_text("40\n")
    assert rankless.open(run).path.name == "iter_0000040"
    (run / "iter_0000030").rename(run / "release")
    (run / "latest_checkpointed_iteration.txt").write_text("release")
    assert rankless.open(run).path.name == "release"
    assert rankless.open(run / "iter_0000040").format == "megatron"


def test_a_run_that_moved_to_rankless(open_fixture: OpenFixture, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fixture = open_fixture("full_tp2_dp1_fp32_mcore16")
    shutil.copytree(fixture.path, run)
    module = build_module({key: tuple(tensor.shape) for key, tensor in fixture.of_kind("master").items()})
    rankless.load_checkpoint(run, model=module)
    rankless.save_checkpoint(run, "step_31", module)
    assert rankless.open(run).path.name == "step_31"


def test_the_commands(open_fixture: OpenFixture) -> None:
    path = open_fixture("dp_tp2_dp2_fp32_mcore16").path
    shown = run_command("show", str(path), "--json")
    assert json.loads(shown.stdout)["format"] == "megatron"
    assert run_command("verify", str(path)).returncode == 0
    assert run_command("diff", str(path), str(path / "iter_0000030")).returncode == 0
