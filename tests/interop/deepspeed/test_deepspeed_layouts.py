"""Tests that parameters are found however DeepSpeed has divided them: all stages, orders, paddings and optimizers.

``write_zero`` divides known tensors by DeepSpeed's rules, which the checkpoints of DeepSpeed itself confirm: see
:mod:`tests.interop.deepspeed.test_deepspeed_reader`.
"""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rankless
from rankless.errors import CorruptCheckpointError
from tests.helpers.deepspeed_files import ZeroSave, random_save, write_zero
from tests.helpers.equality import equal_bits
from tests.helpers.torch_files import LEGACY_OPTIONS

pytestmark = pytest.mark.filterwarnings("ignore:.*missing in the checkpoint")

SHAPES = {"a.weight": (5, 3), "a.bias": (5,), "b.weight": (7, 5), "b.gate": (1,), "c.weight": (2, 3, 4), "c.scale": ()}
GROUPS = [["a.weight", "b.weight", "c.weight"], ["a.bias", "b.gate", "c.scale"]]
ADAM = ("exp_avg", "exp_avg_sq")
STEP = torch.tensor(7.0)

#: Options of the saves, by what they are about.
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one rank": {"ranks": 1},
    "more ranks than elements": {"ranks": 16},
    "round-robin gradients": {"round_robin": True, "ranks": 3},
    "parameter alignment": {"alignment": 4},
    "alignment and round robin": {"alignment": 8, "round_robin": True, "ranks": 4},
    "bfloat16": {"dtype": torch.bfloat16, "ranks": 3},
    "float16": {"dtype": torch.float16, "alignment": 8},
    "old files of torch": {"save_options": LEGACY_OPTIONS},
    "ZeRO-3": {"stage": 3},
    "ZeRO-3 on one rank": {"stage": 3, "ranks": 1},
    "ZeRO-3 on many ranks": {"stage": 3, "ranks": 7},
    "ZeRO-3 in sub-groups": {"stage": 3, "ranks": 3, "sub_group_size": 6},
    "ZeRO-3 in old files": {"stage": 3, "save_options": LEGACY_OPTIONS},
}


def check(path: Path, save: ZeroSave) -> Any:
    opened = rankless.open(path)
    for name, tensor in save.masters.items():
        assert equal_bits(opened[f"model/{name}"], tensor), name
        for state, tensors in save.states.items():
            assert equal_bits(opened[f"optimizer/{name}/{state}"], tensors[name]), (name, state)
    assert [result.problem for result in opened.verify() if result.problem] == []
    return opened


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read(tmp_path: Path, layout: str) -> None:
    save = random_save(SHAPES, GROUPS, ADAM, step=STEP, **LAYOUTS[layout])
    write_zero(tmp_path, save)
    opened = check(tmp_path, save)
    assert all(float(opened[f"optimizer/{name}/step"]) == 7 for name in SHAPES)
    groups = opened.values["optimizer"]["groups"]
    assert [group["params"] for group in groups] == [[*order] for order in _group_orders(save)]
    assert [group["settings"] for group in groups] == [{"lr": 0.5, "weight_decay": n / 10} for n in range(2)]


def _group_orders(save: ZeroSave) -> list[list[str]]:
    if save.stage == 3:
        return save.groups
    return save.number_groups


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("states", "step"),
    [
        pytest.param(("momentum_buffer",), None, id="SGD, Muon"),
        pytest.param(("exp_avg",), 7, id="Lion"),
        pytest.param(("sum",), STEP, id="Adagrad"),
        pytest.param((*ADAM, "max_exp_avg_sq"), STEP, id="AMSGrad"),
        pytest.param(("a state of its own",), None, id="others"),
    ],
)
def test_optimizers_of_every_kind_are_read(tmp_path: Path, stage: int, states: tuple[str, ...], step: Any) -> None:
    save = random_save(SHAPES, GROUPS, states, step=step, stage=stage)
    write_zero(tmp_path, save)
    names = {name.rpartition("/")[2] for name in check(tmp_path, save) if name.startswith("optimizer/")}
    assert names == {*states, *(["step"] if isinstance(step, torch.Tensor) else [])}


@pytest.mark.parametrize("in_groups", [False, True])
@pytest.mark.parametrize("elastic", [False, True])
def test_steps_that_are_numbers_are_restored(tmp_path: Path, elastic: bool, in_groups: bool) -> None:
    """Optimizers of DeepSpeed count steps in Python, and of apex in the group; AdamW of torch has tensors."""
    save = random_save(SHAPES, GROUPS, ADAM, step=7, step_in_groups=in_groups, elastic=elastic)
    write_zero(tmp_path, save)
    check(tmp_path, save)
    values = rankless.open(tmp_path).values["optimizer"]["groups"]
    assert all(state == {"step": 7} for group in values for state in group["state"].values())
    assert all("step" not in group["settings"] for group in values)
    model = torch.nn.Module()
    model.a = torch.nn.Linear(3, 5)
    optimizer = torch.optim.AdamW([{"params": [model.a.weight]}, {"params": [model.a.bias]}])
    rankless.load_checkpoint(tmp_path, model=model, optimizer=optimizer, strict=False)
    assert equal_bits(optimizer.state[model.a.weight]["step"], STEP)


def test_elastic_checkpoints_have_no_settings(tmp_path: Path) -> None:
    save = random_save(SHAPES, GROUPS, ADAM, step=STEP, elastic=True, ranks=3)
    write_zero(tmp_path, save)
    opened = check(tmp_path, save)
    assert [group["settings"] for group in opened.values["optimizer"]["groups"]] == [{}, {}]


@pytest.mark.parametrize("stage", [1, 3])
def test_an_optimizer_that_never_stepped_has_no_states(tmp_path: Path, stage: int) -> None:
    save = random_save(SHAPES, GROUPS, (), stage=stage)
    write_zero(tmp_path, save)
    assert not any(name.startswith("optimizer/") for name in check(tmp_path, save))


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_and_tied_parameters_and_buffers_are_in_the_model(tmp_path: Path, stage: int) -> None:
    frozen = {"base.weight": torch.randn(3, 5).bfloat16(), "base.bias": torch.randn(2)}
    buffers = {"counts": torch.arange(5)}
    save = dataclasses.replace(
        random_save(SHAPES, GROUPS, ADAM, step=STEP, stage=stage, ranks=3),
        frozen=frozen,
        buffers=buffers,
        shared={"head.weight": "a.weight"},
    )
    write_zero(tmp_path, save)
    opened = check(tmp_path, save)
    assert all(equal_bits(opened[f"model/{name}"], tensor) for name, tensor in {**frozen, **buffers}.items())
    names = {name for name in opened if name.startswith("model/")}
    assert names == {f"model/{name}" for name in (*SHAPES, *frozen, *buffers)}
    model = torch.nn.Module()
    model.a = torch.nn.Linear(3, 5)
    model.head = torch.nn.Linear(3, 5, bias=False)
    model.head.weight = model.a.weight
    rankless.load_checkpoint(tmp_path, model=model, strict=False)
    assert equal_bits(model.head.weight, save.masters["a.weight"])


def test_lightnings_prefix_is_removed(tmp_path: Path) -> None:
    """Its strategy wraps the module of the user. Its values are client state, the list of schedulers among them."""
    shapes = {f"_forward_module.{name}": shape for name, shape in SHAPES.items()}
    groups = [[f"_forward_module.{name}" for name in group] for group in GROUPS]
    client = {"epoch": 3, "lr_schedulers": [{"last_epoch": 5}], "pytorch-lightning_version": "2.6.0"}
    save = random_save(shapes, groups, ADAM, step=STEP, client_state=client)
    write_zero(tmp_path / "last.ckpt", save, tag="checkpoint")
    opened = rankless.open(tmp_path / "last.ckpt")
    assert {name.partition("/")[2] for name in opened if name.startswith("model/")} == SHAPES.keys()
    assert equal_bits(opened["model/a.bias"], save.masters["_forward_module.a.bias"])
    assert equal_bits(opened["optimizer/a.bias/exp_avg"], save.states["exp_avg"]["_forward_module.a.bias"])
    assert opened.values["scheduler"] == {"class": None, "state": {"last_epoch": 5}}
    assert opened.values["user_content"]["epoch"] == 3
    assert "lr_schedulers" not in opened.values["user_content"]


def test_a_scheduler_of_torch_is_restored(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    save = random_save(
        {"weight": (5, 3), "bias": (5,)},
        [["weight", "bias"]],
        ADAM,
        step=STEP,
        scheduler={"last_epoch": 7, "_step_count": 8},
    )
    write_zero(tmp_path, save)
    content = rankless.load_checkpoint(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler)
    assert scheduler.last_epoch == 7
    assert equal_bits(optimizer.state[model.weight]["exp_avg"], save.states["exp_avg"]["weight"])
    assert content["global_steps"] == 7


def test_what_deepspeed_gets_wrong(tmp_path: Path) -> None:
    """With round-robin gradients, 0.19.8 records the places of parameters in the order before it was changed.

    Its own converter to universal checkpoints goes by these, and writes other parameters' values without an error.
    ``param_shapes`` has the right order. The weights prove it: a checkpoint with the wrong order is not verified.
    """
    save = random_save(SHAPES, [list(SHAPES)], ADAM, step=STEP, round_robin=True, ranks=3, dtype=torch.bfloat16)
    folder = write_zero(tmp_path / "right", save)
    check(tmp_path / "right", save)
    path = folder / "mp_rank_00_model_states.pt"
    tree = torch.load(path, weights_only=False)
    tree["param_shapes"] = [type(tree["param_shapes"][0])((name, torch.Size(shape)) for name, shape in SHAPES.items())]
    torch.save(tree, path)
    problems = [result.problem for result in rankless.open(tmp_path / "right").verify() if result.problem]
    assert len(problems) == 1
    assert "rounded, are not the weights of the model" in problems[0]
    with pytest.raises(CorruptCheckpointError, match="rounded, are not the weights of the model"):
        rankless.convert(tmp_path / "right", tmp_path / "converted", to="native")


def test_a_client_state_may_have_any_keys_and_arrays(tmp_path: Path) -> None:
    client = {1: 2, "counts": collections.defaultdict(int, a=1), "array": np.arange(4, dtype=np.uint32)}
    write_zero(tmp_path / "ds", random_save(SHAPES, [list(SHAPES)], ADAM, step=STEP, client_state=client))
    content = rankless.open(tmp_path / "ds").values["user_content"]
    assert content[1] == 2
    assert content["counts"] == {"a": 1}
    rankless.convert(tmp_path / "ds", tmp_path / "native", to="native")
    assert not rankless.diff(tmp_path / "ds", tmp_path / "native")
    client["array"][2] += 1
    write_zero(tmp_path / "other", random_save(SHAPES, [list(SHAPES)], ADAM, step=STEP, client_state=client))
    difference = rankless.diff(tmp_path / "other", tmp_path / "native")
    assert [entry.differing for entry in difference.tensors] == [1]
