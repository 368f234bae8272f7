"""Tests that layouts and states of FSDP1 that flat shards cannot describe are refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from rankless.errors import StateError, UnsupportedTensorError
from rankless.state.model import fsdp1
from rankless.state.model.flat_shards import flat_elements
from tests.helpers.fsdp1 import (
    ORIG,
    assert_equal,
    gather_state_dict,
    make_adam,
    make_nested,
    make_net,
    read_parameters,
    train_model,
    wrap_fsdp1,
)
from tests.helpers.pool import Ranks
from tests.helpers.torch_limits import TAKES_OVER_ON_ONE_RANK


def in_irregular_groups() -> None:
    shards, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    replicas, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    model = wrap_fsdp1(make_net(), sharding_strategy=ShardingStrategy.HYBRID_SHARD, process_group=(shards, replicas))
    with pytest.raises(UnsupportedTensorError, match="do not form a mesh"):
        list(fsdp1.flat_shards(model))


def test_groups_from_which_no_mesh_can_be_told_are_refused(ranks: Ranks) -> None:
    ranks(4, in_irregular_groups)


def test_states_that_are_not_elementwise_are_refused(ranks: Ranks) -> None:
    ranks(2, factored)


def refused(model: nn.Module) -> bool:
    try:
        list(fsdp1.flat_shards(model))
    except StateError as error:
        assert "between steps" in str(error)
        return True
    return False


def out_of_step(orig: bool, strategy: ShardingStrategy) -> dict[str, bool]:
    model = make_nested(use_orig_params=orig, sharding_strategy=strategy)
    seen = {}
    tokens = torch.arange(10).view(2, 5)
    model.head.register_forward_hook(lambda *_: seen.update(forward=refused(model)))
    logits = model(tokens)
    seen["between"] = refused(model)
    logits.register_hook(lambda _: seen.update(backward=refused(model)))
    logits.sum().backward()
    seen["after"] = refused(model)
    with FullyShardedDataParallel.summon_full_params(model):
        seen["summoned"] = refused(model)
    seen["no longer summoned"] = refused(model)
    with torch.no_grad():
        model(tokens)
    seen["evaluated"] = refused(model)
    model(tokens)
    fsdp1.reshard(model)
    seen["resharded"] = refused(model)
    train_model(model, make_adam(model))  # and it goes on
    return seen


@ORIG
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_only_between_steps(ranks: Ranks, orig: bool, strategy: str) -> None:
    (seen, _) = ranks(2, out_of_step, orig, ShardingStrategy[strategy])
    # Here the module's parameters are still views of what was gathered.
    unsharded = strategy == "SHARD_GRAD_OP" and orig
    assert seen == {
        "forward": True,
        "between": unsharded,
        "backward": True,
        "after": False,
        "summoned": True,
        "no longer summoned": False,
        "evaluated": False,
        "resharded": False,
    }


def replaced(how: str) -> None:
    model = wrap_fsdp1(nn.Linear(6, 5), use_orig_params=True)
    (weight, _) = fsdp1.flat_shards(model)
    if how == "data":
        weight.parameter.data = weight.parameter.data.clone()
    else:
        model.module.weight = nn.Parameter(weight.parameter.data.clone())
    try:
        list(fsdp1.flat_shards(model))
    except StateError as error:
        assert "'weight' was assigned memory outside of FSDP1's flat parameter" in str(error)
    else:
        raise AssertionError("the clone would not be saved")
    if dist.get_world_size() > 1 or TAKES_OVER_ON_ONE_RANK:
        model(torch.ones(2, 6))  # here FSDP1 takes it over
        list(fsdp1.flat_shards(model))


@pytest.mark.parametrize("how", ["data", "parameter"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_parameter_with_memory_of_its_own_is_refused(ranks: Ranks, world: int, how: str) -> None:
    ranks(world, replaced, how)


def laid_out_otherwise() -> list[bool]:
    convolutions = [nn.Conv2d(3, 4, 2), nn.Conv2d(3, 4, 1)]
    return [unsupported(wrap_fsdp1(item.to(memory_format=torch.channels_last))) for item in convolutions]


def unsupported(model: nn.Module) -> bool:
    try:
        assert_equal(read_parameters(model), gather_state_dict(model))
    except UnsupportedTensorError as error:
        assert "'weight' is not in row-major order" in str(error)
        return True
    return False


def test_what_is_not_row_major_is_refused(ranks: Ranks) -> None:
    """A kernel of one pixel is row-major in either format."""
    assert ranks(2, laid_out_otherwise) == [[True, False]] * 2


def over_tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(nn.Linear(6, 8), mesh["tensor"], ColwiseParallel())
    model = wrap_fsdp1(model, device_mesh=mesh["data"], use_orig_params=True)
    try:
        list(fsdp1.flat_shards(model))
    except UnsupportedTensorError as error:
        assert "'weight' is a DTensor" in str(error)
    else:
        raise AssertionError("a part of a DTensor is not a part of the parameter")


def test_dtensors_inside_are_refused(ranks: Ranks) -> None:
    ranks(4, over_tensor_parallel)


def factored() -> None:
    model = wrap_fsdp1(nn.Linear(6, 5), use_orig_params=True)
    (part, _) = fsdp1.flat_shards(model)
    assert flat_elements(part, torch.tensor(3.0)) is None
    with pytest.raises(UnsupportedTensorError, match="'weight' has shape"):
        flat_elements(part, torch.zeros(1))
