"""A model under FSDP1, what torch gathers of it, and what rankless's flat shards say of it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullyShardedDataParallel, StateDictType

from rankless.state.model import fsdp1
from rankless.state.model.flat_shards import FlatShard, flat_elements

CPU = torch.device("cpu")


class Net(nn.Module):
    """Uneven shapes, a tied weight, modules at two places, a buffer, and a parameter of a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 6, bias=False))
        self.norm = nn.LayerNorm(6)
        self.again = self.norm
        self.scale = nn.Parameter(torch.full((1,), 0.5))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.out = self.head
        self.register_buffer("running", torch.zeros(6))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        return self.head(self.again(self.norm(hidden + self.body(hidden)) * self.scale))


def make_net() -> Net:
    torch.manual_seed(1)
    return Net()


def wrap_fsdp1(module: nn.Module, **options: Any) -> FullyShardedDataParallel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one rank does not shard; NO_SHARD is deprecated
        return FullyShardedDataParallel(module, device_id=CPU, **options)


def make_nested(**options: Any) -> FullyShardedDataParallel:
    model = make_net()
    model.body[0] = wrap_fsdp1(model.body[0], **options)
    model.body = wrap_fsdp1(model.body, **options)
    return wrap_fsdp1(model, **options)


def train_model(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for number in range(steps):
        tokens = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(number))
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def gather_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """What torch gathers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def gather_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    # With its default, to offload, torch returns the last state of a parameter for all of them where all is on the CPU.
    separate = FullOptimStateDictConfig(offload_to_cpu=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with FullyShardedDataParallel.state_dict_type(
            model, StateDictType.FULL_STATE_DICT, optim_state_dict_config=separate
        ):
            return FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]


def held_range(part: FlatShard, rank: int) -> tuple[int, int]:
    """What the description says that a rank holds."""
    at = part.mesh_ranks.index(rank) % part.mesh_shape[-1]
    numel = math.prod(part.shape)
    return max(at * part.length - part.offset, 0), min((at + 1) * part.length - part.offset, numel)


def assemble_parts(described: list[tuple[FlatShard, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tensors put together from the parts of all ranks, each where its own rank's description of it says."""
    mine = {p.fqn: (p.shape, p.offset, p.length, p.mesh_shape, p.mesh_ranks, p.tied, p.dtype) for p, _ in described}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, [local for _, local in described]))
    result = {}
    for number, (part, local) in enumerate(described):
        whole = torch.full((math.prod(part.shape),), math.nan, dtype=local.dtype)
        for rank, (theirs, parts) in enumerate(everyone):
            assert theirs == mine, "one description, equal on all ranks"
            start, stop = held_range(part, rank)
            assert parts[number].shape == (max(stop - start, 0),)
            if start < stop:
                known = whole[start:stop]
                assert torch.equal(known[~known.isnan()], parts[number][~known.isnan()]), "replicas are equal"
                whole[start:stop] = parts[number]
        result[part.fqn] = whole.view(part.shape)
    return result


def read_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters as the parts tell them, under all their names."""
    parts = list(fsdp1.flat_shards(model))
    whole = assemble_parts([(part, part.local) for part in parts])
    return whole | {name: whole[part.fqn] for part in parts for name in part.tied}


def read_states(
    model: nn.Module, optimizer: torch.optim.Optimizer, names: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    """The optimizer's states as the parts tell them."""
    result: dict[str, dict[str, Any]] = {}
    for name in names:
        described = []
        for part in fsdp1.flat_shards(model):
            state = optimizer.state.get(part.parameter, {}).get(name)
            if not part.parameter.requires_grad:
                assert state is None
            elif state is None:
                assert part.local.numel() == 0
                described.append((part, part.local))
            else:
                described.append((part, flat_elements(part, state)))
        for fqn, tensor in assemble_parts(described).items():
            result.setdefault(fqn, {})[name] = tensor
    return result


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name


def drop_buffers(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if name.rpartition(".")[2] != "running"}


def check_parts(model: nn.Module, optimizer: torch.optim.Optimizer, *, fresh: bool = True) -> None:
    """Parameters before and after training, optimizer states, and writing: all as torch sees them."""
    if fresh:
        assert_equal(read_parameters(model), drop_buffers(make_net().state_dict()))
    train_model(model, optimizer)
    assert_equal(read_parameters(model), drop_buffers(gather_state_dict(model)))
    assert not torch.equal(read_parameters(model)["scale"], make_net().scale)
    known = gather_optimizer_state(model, optimizer)
    actual = read_states(model, optimizer, ("exp_avg", "exp_avg_sq"))
    for fqn, tensors in actual.items():
        assert all(torch.equal(tensor, known[fqn][name]) for name, tensor in tensors.items()), fqn
    assert known.keys() == actual.keys()
    check_writes(model)


def check_writes(model: nn.Module, *, evaluate: bool = True) -> None:
    """Numbers written through the parts are what the next forward uses, and what torch gathers."""
    tokens = torch.arange(10).view(2, 5)
    if evaluate:
        model(tokens)  # what it leaves gathered is not what is then written
    fsdp1.reshard(model)
    for part in fsdp1.flat_shards(model):
        start, stop = held_range(part, dist.get_rank())
        part.local.copy_(torch.arange(start, max(stop, start)) / 64 + len(part.fqn))
        assert part.parameter.requires_grad
    expected = make_net()
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            parameter.copy_((torch.arange(parameter.numel()) / 64 + len(name)).view(parameter.shape))
    with torch.no_grad():
        assert torch.allclose(model(tokens).float(), expected(tokens), rtol=1e-2)
    assert_equal(drop_buffers(gather_state_dict(model)), drop_buffers(expected.state_dict()))


def make_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def check_everything(build: Callable[..., FullyShardedDataParallel], options: dict[str, Any]) -> list[tuple[int, ...]]:
    model = build(**options)
    check_parts(model, make_adam(model))
    return sorted({part.mesh_shape for part in fsdp1.flat_shards(model)})


def make_single(**options: Any) -> FullyShardedDataParallel:
    return wrap_fsdp1(make_net(), **options)


ORIG = pytest.mark.parametrize("orig", [True, False], ids=["orig", "flat"])
