"""Tests bitsandbytes: its 8-bit optimizers resume bit for bit, unsharded; quantized layers are refused by name."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import rankless
from rankless.errors import OptimizerMismatchError, UnsupportedTensorError
from tests.helpers.pool import Ranks
from tests.interop.quantised.runs import (
    Run,
    assert_equal_bits,
    start_run,
    state_tensors,
    train_steps,
    trained_tensors,
)

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

OPTIONS: dict[str, dict[str, Any]] = {"SGD8bit": {"momentum": 0.9}}
KINDS = ["AdamW8bit", "Lion8bit", "LAMB8bit", "RMSprop8bit", "Adagrad8bit", "SGD8bit", "AdEMAMix8bit", "AdamW"]


def make(kind: str, parameters: Any) -> torch.optim.Optimizer:
    import bitsandbytes

    return getattr(bitsandbytes.optim, kind)(parameters, lr=1e-3, **OPTIONS.get(kind, {}))


def start(kind: str, **options: Any) -> Run:
    return start_run(functools.partial(make, kind), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumes_bit_for_bit(kind: str, tmp_path: Path) -> None:
    run = start(kind)
    train_steps(run, 0, 3)
    rankless.save_checkpoint(tmp_path, "s", *run)
    train_steps(run, 3, 5)
    resumed = start(kind)
    rankless.load_checkpoint(tmp_path, model=resumed[0], optimizer=resumed[1])
    train_steps(resumed, 3, 5)
    assert_equal_bits(trained_tensors(resumed), trained_tensors(run))
    assert_equal_bits(state_tensors(resumed), state_tensors(run))


@pytest.mark.parametrize("with_state_dict", [False, True])
def test_an_optimizer_is_restored_without_its_model(with_state_dict: bool, tmp_path: Path) -> None:
    """Parameters are matched by position then, although most states have other shapes. Its state dict nests them."""
    run, other = start("AdamW8bit"), start("AdamW8bit")
    train_steps(run, 0, 3)
    if with_state_dict:
        train_steps(other, 5, 6)
        saved, loaded = run[1].state_dict(), copy.deepcopy(other[1].state_dict())
        rankless.save_checkpoint(tmp_path, "s", optimizer=saved)
        rankless.load_checkpoint(tmp_path, optimizer=loaded)
        other[1].load_state_dict(loaded)
    else:
        rankless.save_checkpoint(tmp_path, "s", optimizer=run[1])
        rankless.load_checkpoint(tmp_path, optimizer=other[1])
    assert_equal_bits(state_tensors(other), state_tensors(run))


def test_parameters_in_another_order_are_refused(tmp_path: Path) -> None:
    run = start("AdamW8bit")
    train_steps(run, 0, 3)
    rankless.save_checkpoint(tmp_path, "s", optimizer=run[1])
    other = make("AdamW8bit", [*run[0].parameters()][::-1])
    with pytest.raises(OptimizerMismatchError, match="matched by position only"):
        rankless.load_checkpoint(tmp_path, optimizer=other)


def give_states(path: Path) -> None:
    """Set states as a step would: bitsandbytes itself cannot step a DTensor."""
    model, optimizer = start("AdamW8bit", sharded=True)
    for number, parameter in enumerate(model.parameters()):
        assert isinstance(parameter, DTensor)
        optimizer.init_state(optimizer.param_groups[0], parameter, 0, number)
    rankless.save_checkpoint(path, "s", model, optimizer)


def load_sharded(path: Path) -> None:
    model, optimizer = start("AdamW8bit", sharded=True)
    rankless.load_checkpoint(path, model=model, optimizer=optimizer)


def test_sharded_states_are_refused_by_name(ranks: Ranks, tmp_path: Path) -> None:
    for error in ranks.outcomes(2, give_states, tmp_path):
        assert isinstance(error, UnsupportedTensorError)
        assert "'0.weight/qmap1' is a plain tensor of shape [256], and its parameter is sharded" in str(error)
    run = start("AdamW8bit")
    train_steps(run, 0, 3)
    rankless.save_checkpoint(tmp_path, "s", *run)
    for error in ranks.outcomes(2, load_sharded, tmp_path):
        assert isinstance(error, OptimizerMismatchError)
        assert "'0.weight/" in str(error)


def quantized_model(kind: str) -> nn.Module:
    import bitsandbytes

    layer = {
        "4bit": functools.partial(bitsandbytes.nn.Linear4bit, quant_type="nf4"),
        "8bit": functools.partial(bitsandbytes.nn.Linear8bitLt, has_fp16_weights=False),
    }[kind]
    return nn.Sequential(layer(128, 64), nn.Linear(64, 3)).to("cpu")


@pytest.mark.parametrize("hooks", [True, False])
@pytest.mark.parametrize("has_run", [True, False])
@pytest.mark.parametrize(("kind", "name"), [("4bit", "Params4bit"), ("8bit", "Int8Params")])
def test_quantized_layers_are_refused_by_name(kind: str, name: str, has_run: bool, hooks: bool, tmp_path: Path) -> None:
    model = quantized_model(kind)
    if has_run:
        model(torch.ones(2, 128))
    with pytest.raises(UnsupportedTensorError, match=f"'0.weight' is a quantized {name} of bitsandbytes"):
        rankless.save_checkpoint(tmp_path, "s", model, state_dict_hooks=hooks)
    with pytest.raises(UnsupportedTensorError, match=f"'0.weight' is a quantized {name} of bitsandbytes"):
        rankless.save_checkpoint(tmp_path, "s", model.state_dict(keep_vars=True))


def test_what_is_trained_beside_quantized_layers_is_saved_as_a_state_dict(tmp_path: Path) -> None:
    def trained(model: nn.Module) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in model[1].named_parameters() if parameter.requires_grad}

    models = [quantized_model("4bit") for _ in range(2)]
    optimizers = [make("AdamW8bit", trained(model).values()) for model in models]
    models[0](torch.ones(2, 128)).square().sum().backward()
    optimizers[0].step()
    rankless.save_checkpoint(tmp_path, "s", trained(models[0]), optimizers[0])
    rankless.load_checkpoint(tmp_path, model=trained(models[1]), optimizer=optimizers[1])
    assert_equal_bits(dict(trained(models[1])), dict(trained(models[0])))
    assert_equal_bits(state_tensors((models[1][1], optimizers[1])), state_tensors((models[0][1], optimizers[0])))
