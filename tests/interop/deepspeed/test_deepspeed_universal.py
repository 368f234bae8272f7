"""Tests of the universal checkpoints that rankless writes: their files, what is refused, and the way back.

That DeepSpeed loads them is tested with DeepSpeed itself, in ``tests/peers/deepspeed``.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankless
from rankless.errors import CorruptCheckpointError, InvalidArgumentError
from tests.helpers.deepspeed_files import deepspeed_modules, extract_golden, random_save, write_zero
from tests.helpers.equality import equal_bits
from tests.interop.deepspeed.golden import Oracle

#: The cases without pipelines and experts, whose names DeepSpeed's own modules would not have.
CASES = ("z1_w2_fp32", "z1_w2_bf16_acc32", "z2_w2_bf16", "z2_w4_fp16", "z3_w2_fp32", "z3_w4_bf16", "z0_w2_bf16")

TO = "deepspeed-universal"

pytestmark = pytest.mark.filterwarnings(
    "ignore:DeepSpeed does not restore", "ignore:groups of the", "ignore:under ZeRO"
)


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extract_golden(tmp_path_factory.mktemp("deepspeed"))


def trained_run(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> Path:
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    rankless.save_checkpoint(folder / "run", "step_7", model, optimizer, step=7, rng=False)
    return folder / "run/step_7"


def load_file(path: Path) -> Any:
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("case", CASES)
def test_the_way_there_and_back_changes_nothing(golden: Path, tmp_path: Path, case: str) -> None:
    oracle = Oracle.load(golden, case)
    rankless.convert(oracle.folder, tmp_path / "universal", to=TO)
    before, after = rankless.open(oracle.folder), rankless.open(tmp_path / "universal")
    assert list(after) == list(before)
    assert [name for name in before if not equal_bits(before[name], after[name])] == []
    assert after.values["optimizer"] == before.values["optimizer"]
    changed = {"dp_world_size", "mp_world_size"} | ({"loss_scaler"} if case.startswith("z0") else set())
    contents = [opened.values["user_content"] for opened in (before, after)]
    assert {k: v for k, v in contents[0].items() if k not in changed} == {
        k: v for k, v in contents[1].items() if k not in changed
    }


@pytest.mark.parametrize("case", ["z2_w4_fp16", "z3_w2_fp32"])
def test_files_are_those_that_deepspeed_looks_for(golden: Path, tmp_path: Path, case: str) -> None:
    oracle = Oracle.load(golden, case)
    rankless.convert(oracle.folder, tmp_path / "out", to=TO)
    tag = (tmp_path / "out/latest_universal").read_text()
    folder = tmp_path / "out" / tag
    assert tag == f"global_step{oracle.values['global_steps']}_universal"
    trained = {name for group in oracle.trained for name in group}
    assert {path.name for path in (folder / "zero").iterdir()} == trained | {"optimizer_state.pt"}
    for name in trained:
        for file, kind in (("fp32", "master"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            assert equal_bits(load_file(folder / "zero" / name / f"{file}.pt")["param"], oracle.tensors[kind][name])
        assert float(load_file(folder / "zero" / name / "step.pt")) == oracle.values["optimizer steps"][0]
    for file in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        states = load_file(folder / file)
        assert states["global_steps"] == oracle.values["global_steps"]
        assert states["lr_scheduler"] == oracle.values["scheduler"]
        assert states["shared_params"] == oracle.tied
        assert {key: states[key] for key in oracle.values["client_state"]} == oracle.values["client_state"]


@pytest.mark.parametrize("file", ["fp32.pt", "exp_avg.pt", "step.pt"])
def test_a_missing_file_of_a_parameter_is_named(golden: Path, tmp_path: Path, file: str) -> None:
    """Without it a conversion would lack a state of one parameter, and nobody would see that."""
    oracle = Oracle.load(golden, "z1_w2_fp32")
    rankless.convert(oracle.folder, tmp_path / "out", to=TO)
    path = next((tmp_path / "out").glob(f"*/zero/{oracle.trained[0][1]}/{file}"))
    path.unlink()
    with pytest.raises(CorruptCheckpointError, match=rf"{path.parent.name}/{file}.* is missing"):
        rankless.open(tmp_path / "out")


def test_the_loss_scaler_is_an_object_of_deepspeed(golden: Path, tmp_path: Path) -> None:
    oracle = Oracle.load(golden, "z2_w4_fp16")
    rankless.convert(oracle.folder, tmp_path / "out", to=TO)
    (path,) = (tmp_path / "out").glob("*/zero/optimizer_state.pt")
    assert b"deepspeed.runtime.fp16.loss_scaler\nDynamicLossScaler" in path.read_bytes()
    with deepspeed_modules() as _, pytest.raises(AttributeError, match="DynamicLossScaler"):
        torch.load(path, weights_only=False)  # the stand-in for the module lacks the class


def test_settings_that_zero_3_would_give_to_other_groups_are_left_out(golden: Path, tmp_path: Path) -> None:
    oracle = Oracle.load(golden, "z3_w2_fp32")
    with pytest.warns(UserWarning, match="groups of the optimizer have different weight_decay"):
        rankless.convert(oracle.folder, tmp_path / "out", to=TO)
    state = rankless.open(tmp_path / "out").values["optimizer"]["groups"]
    assert [group["settings"]["weight_decay"] for group in state] == [
        group["weight_decay"] for group in oracle.values["groups"]
    ]


def test_a_checkpoint_of_another_job_gets_what_the_engine_needs(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    source = trained_run(tmp_path, model, torch.optim.AdamW(model.parameters()))
    rankless.convert(source, tmp_path / "out", to=TO)
    folder = tmp_path / "out/global_step7_universal"
    states = load_file(folder / "mp_rank_00_model_states.pt")
    needed = ("global_steps", "skipped_steps", "dp_world_size", "mp_world_size", "lr_scheduler")
    assert [states[key] for key in needed] == [7, 0, 1, 1, None]
    optimizer = load_file(folder / "zero/optimizer_state.pt")
    assert optimizer["ds_version"]
    assert float(optimizer["optimizer_state_dict"]["state"][0]["step"]) == 2
    assert equal_bits(load_file(folder / "zero/weight/fp32.pt")["param"], model.weight.detach())


def test_what_has_no_place_is_refused_by_its_name(tmp_path: Path) -> None:
    half = nn.Linear(3, 2).bfloat16()
    source = trained_run(tmp_path / "half", half, torch.optim.AdamW(half.parameters()))
    with pytest.raises(InvalidArgumentError, match=r"'weight' is bfloat16.*--dtype float32"):
        rankless.convert(source, tmp_path / "out", to=TO)
    rankless.convert(source, tmp_path / "cast", to=TO, dtype="float32")

    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    source = trained_run(tmp_path / "steps", model, optimizer)
    optimizer.state[model.bias]["step"] += 1
    rankless.save_checkpoint(tmp_path / "steps/run", "other", model, optimizer, rng=False)
    with pytest.raises(InvalidArgumentError, match=r"2 steps of 'weight', and 3 of 'bias'|3 steps of 'bias', and 2"):
        rankless.convert(tmp_path / "steps/run/other", tmp_path / "out", to=TO)

    del optimizer.state[model.bias]
    rankless.save_checkpoint(tmp_path / "steps/run", "partial", model, optimizer, rng=False)
    with pytest.raises(InvalidArgumentError, match=r"other states of '(bias|weight)' than of '(weight|bias)'"):
        rankless.convert(tmp_path / "steps/run/partial", tmp_path / "out", to=TO)

    adafactor = torch.optim.NAdam(model.parameters())
    source = trained_run(tmp_path / "nadam", model, adafactor)
    with pytest.raises(InvalidArgumentError, match=r"'mu_product' of '(bias|weight)' has the shape \[\]"):
        rankless.convert(source, tmp_path / "out", to=TO)

    rankless.save_checkpoint(tmp_path / "alone/run", "step", model, rng=False)
    with pytest.raises(InvalidArgumentError, match="the source has no optimizer"):
        rankless.convert(tmp_path / "alone/run/step", tmp_path / "out", to=TO)

    rename = {"^weight$": "a/b"}
    with pytest.raises(InvalidArgumentError, match="the parameter 'a/b' cannot have a folder"):
        rankless.convert(tmp_path / "steps/run/step_7", tmp_path / "out", to=TO, rename=rename)
    sgd = torch.optim.SGD(model.parameters())
    rankless.save_checkpoint(tmp_path / "taken/run", "step", model, sgd, None, {"module": 1}, rng=False)
    with pytest.raises(InvalidArgumentError, match="user_content has 'module'"):
        rankless.convert(tmp_path / "taken/run/step", tmp_path / "out", to=TO)
    assert not (tmp_path / "out").exists()


def optimizer_tree(state: str = "sum", step: Any = 1) -> dict[str, Any]:
    """A file of ``torch.save`` with a model of one parameter, and an optimizer with a state of any name."""
    states = {"step": step, state: torch.ones(2)}
    group = {"lr": 0.1, "params": [0], "param_names": ["w"]}
    return {"model": {"w": torch.ones(2)}, "optimizer": {"state": {0: states}, "param_groups": [group]}}


@pytest.mark.parametrize("state", ["../../../../outside", "/outside", "a/b", "", "a\0b", "x" * 253, "fp32"])
def test_states_that_cannot_have_a_file_are_refused(tmp_path: Path, state: str) -> None:
    """None is written outside of the folder, or over the master weights."""
    torch.save(optimizer_tree(state), tmp_path / "c.pt")
    with pytest.raises(InvalidArgumentError, match="of 'w' cannot have a file of its name"):
        rankless.convert(tmp_path / "c.pt", tmp_path / "out", to=TO)
    assert [path.name for path in tmp_path.rglob("*")] == ["c.pt"]


@pytest.mark.parametrize(
    "step", ["1", [1], -1, 1.5, float("nan"), float("inf"), 2**70, torch.ones(1), torch.tensor(1j)]
)
def test_steps_that_are_no_number_are_refused(tmp_path: Path, step: Any) -> None:
    torch.save(optimizer_tree(step=step), tmp_path / "c.pt")
    with pytest.raises(InvalidArgumentError, match=r"the number of steps of 'w' is .*: it must be a whole number"):
        rankless.convert(tmp_path / "c.pt", tmp_path / "out", to=TO)


def test_counters_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    torch.save({**optimizer_tree(), "global_steps": {"a": 1}}, tmp_path / "c.pt")
    with pytest.raises(InvalidArgumentError, match="user_content has 'global_steps', a counter of DeepSpeed"):
        rankless.convert(tmp_path / "c.pt", tmp_path / "out", to=TO)


@contextmanager
def few_open_files(number: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_more_files_than_may_be_open_are_written(tmp_path: Path) -> None:
    shapes = {f"layers.{number}.weight": (3,) for number in range(300)}
    write_zero(tmp_path / "ds", random_save(shapes, [list(shapes)], ("exp_avg", "exp_avg_sq"), step=7))
    with few_open_files(900):
        rankless.convert(tmp_path / "ds", tmp_path / "out", to=TO)
    before, after = rankless.open(tmp_path / "ds"), rankless.open(tmp_path / "out")
    assert [name for name in before if not equal_bits(before[name], after[name])] == []
