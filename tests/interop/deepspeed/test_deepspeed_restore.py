"""Tests that trainings with DeepSpeed go on in plain torch: in one process, and with FSDP2 on other numbers of ranks.

After the load, the next steps are those of a process that has the training's state from the oracle.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import rankless
from rankless.errors import MismatchError
from tests.helpers.deepspeed_files import extract_golden, random_save, write_zero
from tests.helpers.equality import equal_bits
from tests.helpers.pool import Ranks
from tests.interop.deepspeed.golden import NAMED, Oracle

#: Each kind of division: by groups, with padding, by parameters, in stages, of experts, and none.
DIVIDED = ("z1_w2_fp32", "z2_w4_fp16", "z2_w2_bf16", "z3_w4_bf16", "pipe_p2_d2_z1_bf16", "moe_w2_ep2_z1_fp32")

STEPS = 3


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extract_golden(tmp_path_factory.mktemp("deepspeed"))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(oracle: Oracle, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take steps with gradients that depend on the parameter and the step only."""
    for step in range(STEPS):
        for number, name in enumerate(name for group in oracle.trained for name in group):
            parameter = model.get_parameter(name)
            gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1000 * step + number))
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()


def collect(oracle: Oracle, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors = {name: whole(model.state_dict(keep_vars=True)[name]) for name in oracle.model}
    for name in (name for group in oracle.trained for name in group):
        state = optimizer.state[model.get_parameter(name)]
        tensors |= {f"{name}/{key}": whole(value) for key, value in state.items()}
    return tensors


def resume(root: str, case: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[Any], Any]:
    """Load a checkpoint on these ranks. Return the state after the load and after some steps."""
    oracle = Oracle.load(Path(root), case)
    model = oracle.build_model()
    if dist.is_initialized() and dist.get_world_size() > 1:
        frozen = {parameter for parameter in model.parameters() if not parameter.is_floating_point()}
        fully_shard(model, ignored_params=frozen)
    optimizer = oracle.build_optimizer(model)
    restored = rankless.restore(oracle.folder, model=model, optimizer=optimizer, verify=True)
    loaded = collect(oracle, model, optimizer)
    train(oracle, model, optimizer)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return loaded, collect(oracle, model, optimizer), groups, restored.user_content


def expected_after_steps(oracle: Oracle) -> dict[str, torch.Tensor]:
    """Train on from the oracle, in one process and without rankless."""
    model = oracle.build_model()
    model.load_state_dict(oracle.model)
    optimizer = oracle.build_optimizer(model)
    step = torch.tensor(float(next(iter(oracle.values.get("optimizer steps", [3.0])))))
    for group, settings in zip(optimizer.param_groups, oracle.values["groups"], strict=True):
        group |= {key: value for key, value in settings.items() if key not in {"params", "betas"}}
        group["betas"] = tuple(settings["betas"])
    for name in (name for group in oracle.trained for name in group):
        moments = {state: oracle.tensors[state][name].clone() for state in ("exp_avg", "exp_avg_sq")}
        optimizer.state[model.get_parameter(name)] = {"step": step.clone(), **moments}
    train(oracle, model, optimizer)
    return collect(oracle, model, optimizer)


def check(oracle: Oracle, results: list[Any]) -> None:
    after = expected_after_steps(oracle)
    for loaded, trained, groups, content in results:
        for name, tensor in oracle.model.items():
            assert equal_bits(loaded[name], tensor), name
        for state in ("exp_avg", "exp_avg_sq"):
            for name, tensor in oracle.tensors[state].items():
                assert equal_bits(loaded[f"{name}/{state}"], tensor), (name, state)
        assert trained.keys() == after.keys()
        assert [name for name in after if not equal_bits(trained[name], after[name])] == []
        settings = [
            {key: value for key, value in group.items() if key != "params"} for group in oracle.values["groups"]
        ]
        assert [{**group, "betas": list(group["betas"])} for group in groups] == settings
        assert content["global_steps"] in {2, 3, 4}


@pytest.mark.parametrize("case", [case for case in NAMED if "_ds_" not in case])
def test_a_training_goes_on_in_one_process(ranks: Ranks, golden: Path, case: str) -> None:
    check(Oracle.load(golden, case), ranks(1, resume, str(golden), case))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("case", DIVIDED)
def test_a_training_goes_on_with_fsdp2(ranks: Ranks, golden: Path, case: str, world_size: int) -> None:
    check(Oracle.load(golden, case), ranks(world_size, resume, str(golden), case))


def test_numbers_are_matched_with_the_users_optimizer(ranks: Ranks, golden: Path) -> None:
    """Without ZeRO, parameters have numbers: the order of the optimizer counts."""
    check(Oracle.load(golden, "z0_w2_fp32"), ranks(1, resume, str(golden), "z0_w2_fp32"))


def test_groups_that_differ_are_refused(golden: Path) -> None:
    """A parameter must keep the settings that it was trained with."""
    oracle = Oracle.load(golden, "z1_w2_fp32")
    model = oracle.build_model()
    optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.is_floating_point())
    with pytest.raises(MismatchError):
        rankless.load_checkpoint(oracle.folder, model=model, optimizer=optimizer)


def test_a_scheduler_of_deepspeed_is_not_loaded_into_another(golden: Path) -> None:
    """Its state has only a counter, which a scheduler of torch would ignore."""
    oracle = Oracle.load(golden, "z1_w2_fp32")
    model = oracle.build_model()
    optimizer = oracle.build_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(MismatchError, match="scheduler"):
        rankless.load_checkpoint(oracle.folder, model=model, optimizer=optimizer, scheduler=scheduler)


@pytest.mark.filterwarnings("ignore:.*missing in the checkpoint")
@pytest.mark.parametrize("to", ["native", "torch", "dcp"])
@pytest.mark.parametrize("case", ["z2_w2_bf16", "z3_w4_bf16"])
def test_a_converted_checkpoint_is_loaded_back(golden: Path, tmp_path: Path, case: str, to: str) -> None:
    oracle = Oracle.load(golden, case)
    converted = rankless.convert(oracle.folder, tmp_path / "converted", to=to)
    model = oracle.build_model()
    optimizer = oracle.build_optimizer(model)
    content = rankless.load_checkpoint(converted, model=model, optimizer=optimizer)
    loaded = collect(oracle, model, optimizer)
    assert all(equal_bits(loaded[name], tensor) for name, tensor in oracle.model.items())
    for state in ("exp_avg", "exp_avg_sq"):
        assert all(equal_bits(loaded[f"{name}/{state}"], tensor) for name, tensor in oracle.tensors[state].items())
    assert content["note"] == oracle.values["client_state"]["note"]


def test_the_model_is_exported_to_hugging_face(golden: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    oracle = Oracle.load(golden, "trainer_ds_z2_w2")
    rankless.convert(oracle.folder, tmp_path / "hf", to="hf")
    saved = load_file(tmp_path / "hf/model.safetensors")
    assert saved.keys() == oracle.tensors["weights"].keys()
    assert all(equal_bits(saved[name], tensor) for name, tensor in oracle.tensors["weights"].items())


def test_a_converted_run_goes_on_with_a_checkpointer(tmp_path: Path) -> None:
    """The step of DeepSpeed is that of the checkpoint, which ``resume`` goes on from."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    write_zero(tmp_path / "ds", random_save(shapes, [[*shapes]], ("exp_avg", "exp_avg_sq"), step=torch.tensor(7.0)))
    assert rankless.restore(tmp_path / "ds", model=model, optimizer=optimizer, rng=False).step == 7
    rankless.convert(tmp_path / "ds", tmp_path / "run/step_7", to="native")
    assert rankless.open(tmp_path / "run").step == 7
    with rankless.Checkpointer(tmp_path / "run", model=model, optimizer=optimizer, save_every=1) as checkpointer:
        assert checkpointer.resume() == 7
        checkpointer.step(8)
    assert [info.step for info in rankless.list_checkpoints(tmp_path / "run")] == [7, 8]


def test_a_parameter_without_elements_needs_no_state(tmp_path: Path) -> None:
    """DeepSpeed saves it with the model, and leaves it out of the optimizer. Its state has no values."""
    save = random_save({"a": (3, 4)}, [["a"]], ("exp_avg", "exp_avg_sq"), step=torch.tensor(3.0))
    write_zero(tmp_path, replace(save, buffers={"none": torch.zeros(0, 4)}))
    model = torch.nn.ParameterDict({"a": torch.zeros(3, 4), "none": torch.zeros(0, 4)})
    optimizer = torch.optim.AdamW(model.parameters())
    result = rankless.restore(tmp_path, model=model, optimizer=optimizer, rng=False)
    assert result.missing == ()
    assert torch.equal(optimizer.state[model["a"]]["exp_avg"], save.states["exp_avg"]["a"])
    (model["a"].sum() + model["none"].sum()).backward()
    optimizer.step()
    assert optimizer.state[model["a"]]["step"] == 4


def test_a_parameter_with_elements_does(tmp_path: Path) -> None:
    save = random_save({"a": (3, 4)}, [["a"]], ("exp_avg", "exp_avg_sq"), step=torch.tensor(3.0))
    write_zero(tmp_path, replace(save, buffers={"b": torch.zeros(1, 4)}))
    model = torch.nn.ParameterDict({"a": torch.zeros(3, 4), "b": torch.zeros(1, 4)})
    with pytest.raises(MismatchError, match="'b', and the checkpoint has no optimizer state of them"):
        rankless.load_checkpoint(tmp_path, model=model, optimizer=torch.optim.AdamW(model.parameters()), rng=False)
