"""Tests that checkpoints of DeepSpeed are read as the training held them: every tensor bit for bit, and all values.

The checkpoints were written by DeepSpeed 0.19.8, Accelerate and transformers; DeepSpeed is not needed here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rankless
from rankless.errors import FormatError, InvalidArgumentError
from tests.helpers.deepspeed_files import extract_golden
from tests.helpers.equality import equal_bits
from tests.interop.deepspeed.golden import DETAILED, NAMED, SIXTEEN_BIT, Oracle


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extract_golden(tmp_path_factory.mktemp("deepspeed"))


def split(opened: Any, group: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(f"{group}/"): opened[name] for name in opened if name.startswith(f"{group}/")}


@pytest.mark.parametrize("case", NAMED)
def test_the_model_is_that_of_the_training(golden: Path, case: str) -> None:
    """Its parameters are the fp32 master weights; frozen parameters and buffers have their own dtypes."""
    oracle = Oracle.load(golden, case)
    expected = oracle.model
    actual = split(rankless.open(oracle.folder), "model")
    unknown = {"counts", "scale"} if case == "acc_ds_z2_w2" else set()  # buffers that are not in its oracle
    assert actual.keys() == (expected.keys() - oracle.tied.keys()) | unknown
    assert [name for name in actual.keys() - unknown if not equal_bits(actual[name], expected[name])] == []


@pytest.mark.parametrize("case", NAMED)
def test_the_optimizer_is_that_of_the_training(golden: Path, case: str) -> None:
    oracle = Oracle.load(golden, case)
    states = split(rankless.open(oracle.folder), "optimizer")
    trained = {name for group in oracle.trained for name in group}
    assert states.keys() == {f"{name}/{state}" for name in trained for state in ("exp_avg", "exp_avg_sq", "step")}
    for state in ("exp_avg", "exp_avg_sq"):
        assert oracle.tensors[state].keys() == trained
        for name, tensor in oracle.tensors[state].items():
            assert equal_bits(states[f"{name}/{state}"], tensor), (name, state)
    steps = {float(states[f"{name}/step"]) for name in trained}
    assert steps == set(oracle.values.get("optimizer steps", [3.0]))


@pytest.mark.parametrize("case", DETAILED)
def test_the_values_are_those_of_the_training(golden: Path, case: str) -> None:
    oracle = Oracle.load(golden, case)
    opened = rankless.open(oracle.folder)
    content, groups = opened.values["user_content"], opened.values["optimizer"]["groups"]
    assert {key: content[key] for key in oracle.values["client_state"]} == oracle.values["client_state"]
    counters = ("global_steps", "global_samples", "skipped_steps")
    assert [content[key] for key in counters] == [oracle.values[key] for key in counters]
    assert content.get("lr_scheduler") == oracle.values["scheduler"]
    assert "scheduler" not in opened.values
    for group, expected in zip(groups, oracle.values["groups"], strict=True):
        assert group["params"] == expected["params"]
        settings = {**group["settings"], "betas": list(group["settings"]["betas"])}
        assert settings == {key: value for key, value in expected.items() if key != "params"}
    if oracle.values["loss scaler"] is not None and "acc32" not in case:
        scaler = {key: str(value) if key == "dtype" else value for key, value in content["loss_scaler"].items()}
        assert scaler == oracle.values["loss scaler"]


@pytest.mark.parametrize("case", ["z2_w2_bf16", "z3_w2_fp32"])
def test_tied_parameters_are_stored_once(golden: Path, case: str) -> None:
    oracle = Oracle.load(golden, case)
    assert oracle.tied == {"head.weight": "embed.weight"}
    opened = rankless.open(oracle.folder)
    assert "model/embed.weight" in opened
    assert "model/head.weight" not in set(opened)
    model = oracle.build_model()
    rankless.load_checkpoint(oracle.folder, model=model)
    assert equal_bits(model.get_parameter("head.weight"), oracle.model["embed.weight"])


def test_without_zero_parameters_have_numbers(golden: Path) -> None:
    """The files have no names, as those of ``Optimizer.state_dict``."""
    oracle = Oracle.load(golden, "z0_w2_fp32")
    opened = rankless.open(oracle.folder)
    states = split(opened, "optimizer")
    (names,) = oracle.trained
    assert len(states) == 3 * len(names)
    for number, name in enumerate(names):
        assert equal_bits(states[f"{number}/exp_avg"], oracle.tensors["exp_avg"][name])


@pytest.mark.parametrize("case", SIXTEEN_BIT)
def test_the_weights_that_the_model_computes_with_can_be_chosen(golden: Path, case: str) -> None:
    oracle = Oracle.load(golden, case)
    model = oracle.build_model().to(next(iter(oracle.tensors["weights"].values())).dtype)
    rankless.load_checkpoint(oracle.folder, model=model, keys={"weights": "model"}, cast_dtype=True)
    for name, tensor in oracle.tensors["weights"].items():
        assert equal_bits(model.get_parameter(name), tensor), name


@pytest.mark.parametrize("case", SIXTEEN_BIT)
def test_master_weights_cast_to_those_weights(golden: Path, case: str) -> None:
    oracle = Oracle.load(golden, case)
    model = oracle.build_model().to(next(iter(oracle.tensors["weights"].values())).dtype)
    rankless.load_checkpoint(oracle.folder, model=model, cast_dtype=True)
    for name, tensor in oracle.tensors["weights"].items():
        assert equal_bits(model.get_parameter(name), tensor), name


def test_zero_3_has_only_master_weights(golden: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="has the weights as master weights only"):
        rankless.load_checkpoint(
            Oracle.load(golden, "z3_w4_bf16").folder, model=torch.nn.Linear(1, 1), keys={"weights": "model"}
        )


@pytest.mark.parametrize("case", [*NAMED, "z0_w2_fp32"])
def test_an_intact_checkpoint_is_verified(golden: Path, case: str) -> None:
    assert [check.problem for check in rankless.open(Oracle.load(golden, case).folder).verify() if check.problem] == []


@pytest.mark.parametrize("case", ["z1_w2_fp32", "z3_w4_bf16", "z1_w2_fp32_universal"])
def test_the_folder_of_the_tag_is_the_same_checkpoint(golden: Path, case: str) -> None:
    oracle = Oracle.load(golden, case)
    by_latest, by_tag = rankless.open(oracle.folder), rankless.open(oracle.tag)
    assert set(by_latest) == set(by_tag)
    assert all(equal_bits(by_latest[name], by_tag[name]) for name in by_tag)
    assert by_latest.path == by_tag.path == oracle.tag


def test_the_model_of_transformers_next_to_it_has_no_priority(golden: Path) -> None:
    """The Trainer saves ``model.safetensors`` next to DeepSpeed's folder, without the optimizer."""
    oracle = Oracle.load(golden, "trainer_ds_z2_w2")
    assert (oracle.folder / "model.safetensors").exists()
    assert any(name.startswith("optimizer/") for name in rankless.open(oracle.folder))


@pytest.mark.parametrize(
    "name", ["zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"]
)
def test_the_part_of_one_rank_is_no_checkpoint(golden: Path, name: str) -> None:
    """The model of a rank of ZeRO-3 has tensors without elements."""
    path = Oracle.load(golden, "z3_w2_fp32").tag / name
    with pytest.raises(FormatError, match="the part of one rank of a DeepSpeed checkpoint: open the folder"):
        rankless.open(path)
