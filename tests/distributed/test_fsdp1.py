"""Tests FSDP1's flat parameters against torch's gathered full state dicts and the model before wrapping."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from rankless.errors import StateError
from rankless.state.model import fsdp1
from rankless.state.model.flat_shards import blank_flat_state, flat_elements
from tests.helpers.fsdp1 import (
    ORIG,
    Net,
    assert_equal,
    check_everything,
    check_parts,
    check_writes,
    drop_buffers,
    gather_optimizer_state,
    gather_state_dict,
    held_range,
    make_adam,
    make_nested,
    make_net,
    make_single,
    read_parameters,
    read_states,
    train_model,
    wrap_fsdp1,
)
from tests.helpers.pairwise import each_value, pairwise
from tests.helpers.pool import Ranks


@pairwise({"world": [1, 2, 3, 4], "build": [make_single, make_nested], "orig": [True, False]})
def test_parts_of_all_ranks_make_up_what_torch_gathers(ranks: Ranks, world: int, build: Any, orig: bool) -> None:
    mesh = (1, 1) if world == 1 else (world,)  # one rank does not shard
    assert ranks(world, check_everything, build, {"use_orig_params": orig}) == [[mesh]] * world


@ORIG
def test_shard_grad_op(ranks: Ranks, orig: bool) -> None:
    ranks(
        2, check_everything, make_nested, {"use_orig_params": orig, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
    )


@ORIG
def test_no_shard_replicates(ranks: Ranks, orig: bool) -> None:
    options = {"use_orig_params": orig, "sharding_strategy": ShardingStrategy.NO_SHARD}
    assert ranks(2, check_everything, make_nested, options) == [[(2, 1)]] * 2


def hybrid(given: str, **options: Any) -> FullyShardedDataParallel:
    if given == "mesh":
        options["device_mesh"] = DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("replicate", "shard"))
    else:
        shards, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
        replicas, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        options["process_group"] = (shards, replicas)
    return make_nested(sharding_strategy=ShardingStrategy.HYBRID_SHARD, **options)


def in_hybrid(given: str, orig: bool) -> tuple[Any, ...]:
    model = hybrid(given, use_orig_params=orig)
    check_parts(model, make_adam(model))
    (mesh,) = {(part.mesh_shape, part.mesh_ranks) for part in fsdp1.flat_shards(model)}
    return mesh


@each_value({"given, expected": [("mesh", (0, 3, 1, 2)), ("groups", (0, 1, 2, 3))], "orig": [True, False]})
def test_hybrid_shard_is_a_mesh_of_replicas_and_shards(ranks: Ranks, given: str, expected: Any, orig: bool) -> None:
    assert ranks(4, in_hybrid, given, orig) == [((2, 2), expected)] * 4


def in_part_of_the_world(orig: bool) -> tuple[Any, ...]:
    """Two models over two ranks each, in a mesh whose other dimension is a pipeline's."""
    mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("stage", "shard"))
    model = wrap_fsdp1(make_net(), use_orig_params=orig, process_group=mesh.get_group("shard"))
    for part in fsdp1.flat_shards(model):
        start, stop = held_range(part, dist.get_rank())
        known = make_net().state_dict()[part.fqn].flatten()[start : max(stop, start)]
        assert torch.equal(part.local, known)
    return part.mesh_shape, part.mesh_ranks


@ORIG
def test_ranks_are_global_ones(ranks: Ranks, orig: bool) -> None:
    assert ranks(4, in_part_of_the_world, orig) == [((2,), (0, 2)), ((2,), (1, 3))] * 2


def in_mixed_precision(orig: bool) -> dict[str, torch.dtype]:
    mixed = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    model = make_nested(use_orig_params=orig, mixed_precision=mixed)
    check_parts(model, make_adam(model))
    return {name.rpartition(".")[2]: buffer.dtype for name, buffer in model.named_buffers()}


@each_value({"world": [1, 2], "orig": [True, False]})
def test_mixed_precision_keeps_full_parameters_and_casts_buffers(ranks: Ranks, world: int, orig: bool) -> None:
    """The parameters' dtype is that of the optimizer; buffers are of ``buffer_dtype`` from the first forward on."""
    assert ranks(world, in_mixed_precision, orig) == [{"running": torch.bfloat16}] * world


@contextlib.contextmanager
def pinning() -> Iterator[None]:
    """FSDP1 pins what it offloads, and waits for the stream, which needs an accelerator; a copy is what counts here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
        patch.setattr(torch.cpu.Stream, "synchronize", lambda _: None, raising=False)
        yield


def in_offload(orig: bool, early: bool) -> None:
    with pinning():
        model = make_nested(use_orig_params=orig, cpu_offload=CPUOffload(offload_params=True))
        if early:
            model.check_is_root()  # as many calls do: from here on there is a pinned copy, not yet in use
            with pytest.raises(StateError, match=r"not sharded now"):
                list(fsdp1.flat_shards(model))
            check_writes(model, evaluate=False)
        else:
            check_parts(model, make_adam(model))


@pairwise({"world": [1, 2], "early": [False, True], "orig": [True, False]})
def test_parameters_offloaded_to_the_cpu(ranks: Ranks, world: int, orig: bool, early: bool) -> None:
    ranks(world, in_offload, orig, early)


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body.requires_grad_(requires_grad=False)


def frozen(orig: bool, separate: bool) -> None:
    torch.manual_seed(1)
    model = Frozen()
    if separate:
        model.body = wrap_fsdp1(model.body, use_orig_params=orig)
    model = wrap_fsdp1(model, use_orig_params=orig)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    assert_equal(read_parameters(model), drop_buffers(make_net().state_dict()))
    train_model(model, optimizer)
    assert_equal(read_parameters(model), drop_buffers(gather_state_dict(model)))
    body = {name: tensor for name, tensor in make_net().state_dict().items() if name.startswith("body.")}
    assert_equal({name: tensor for name, tensor in read_parameters(model).items() if name in body}, body)
    known = gather_optimizer_state(model, optimizer)
    trained = {part.fqn for part in fsdp1.flat_shards(model)} - body.keys()
    assert known.keys() == trained
    actual = read_states(model, optimizer, ("exp_avg",))
    assert all(torch.equal(actual[name]["exp_avg"], known[name]["exp_avg"]) for name in trained)


@pytest.mark.parametrize(("orig", "separate"), [(True, True), (True, False), (False, True)])
def test_frozen_parameters(ranks: Ranks, orig: bool, separate: bool) -> None:
    """Frozen ones among trained ones need ``use_orig_params``."""
    ranks(2, frozen, orig, separate)


def tied_names(orig: bool) -> dict[str, tuple[str, ...]]:
    return {part.fqn: part.tied for part in fsdp1.flat_shards(make_nested(use_orig_params=orig)) if part.tied}


@ORIG
def test_tied_weights_are_one_part_under_their_first_name(ranks: Ranks, orig: bool) -> None:
    expected = {
        "embed.weight": ("head.weight", "out.weight"),
        "norm.weight": ("again.weight",),
        "norm.bias": ("again.bias",),
    }
    assert ranks(2, tied_names, orig) == [expected] * 2


def pieces(orig: bool) -> tuple[list[int], list[int]]:
    """Four elements and one over three ranks."""
    model = wrap_fsdp1(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(1, 1, bias=False)), use_orig_params=orig)
    assert_equal(read_parameters(model), gather_state_dict(model))
    parts = list(fsdp1.flat_shards(model))
    with torch.no_grad():
        for part in parts:
            part.local.fill_(7)
    assert all(torch.equal(tensor, torch.full_like(tensor, 7)) for tensor in gather_state_dict(model).values())
    return [part.local.numel() for part in parts], [part.start_in_shard for part in parts if part.local.numel()]


@ORIG
def test_a_rank_without_a_piece_of_a_parameter(ranks: Ranks, orig: bool) -> None:
    # With use_orig_params there is padding for alignment and to a multiple of the ranks.
    assert ranks(3, pieces, orig) == [([2, 0], [0]), ([2, 0], [0]), ([0, 1], [0])]


def tiny(orig: bool) -> list[int]:
    """Three elements over four ranks: the last one's shard is all padding."""
    model = wrap_fsdp1(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, bias=False)), use_orig_params=orig)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 1)).sum().backward()
    optimizer.step()
    assert_equal(read_parameters(model), gather_state_dict(model))
    known = gather_optimizer_state(model, optimizer)
    for fqn, actual in read_states(model, optimizer, ("exp_avg",)).items():
        assert torch.equal(actual["exp_avg"], known[fqn]["exp_avg"])
    return [part.local.numel() for part in fsdp1.flat_shards(model)]


def test_a_rank_whose_shard_is_padding(ranks: Ranks) -> None:
    assert ranks(4, tiny, False) == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]]
    assert ranks(4, tiny, True)[3] == [0, 0, 0]


class Root(nn.Module):
    """A root that is not FSDP1 itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def inside_other_wrappers(orig: bool) -> None:
    model = make_net()
    model.ddp = DistributedDataParallel(nn.Linear(3, 2))
    known = {f"inner.{name}".replace(".module.", ".") for name in model.state_dict() if name != "running"}
    ignored = [model.ddp]
    model.body[0] = checkpoint_wrapper(wrap_fsdp1(model.body[0], use_orig_params=orig))
    model.body = wrap_fsdp1(checkpoint_wrapper(model.body), use_orig_params=orig)
    model.norm = model.again = torch.compile(wrap_fsdp1(model.norm, use_orig_params=orig), backend="eager")
    root = Root(torch.compile(wrap_fsdp1(model, use_orig_params=orig, ignored_modules=ignored), backend="eager"))
    parts = list(fsdp1.flat_shards(root))
    names = [name for part in parts for name in (part.fqn, *part.tied)]
    assert sorted(names) == sorted(known - {"inner.ddp.weight", "inner.ddp.bias"})
    linear = {name for name, module in fsdp1.named_modules(root) if isinstance(module, nn.Linear)}
    assert linear == {"inner.body.0", "inner.body.2", "inner.ddp", "inner.head", "inner.out"}
    assert fsdp1.uses_fsdp1(root)
    assert not fsdp1.uses_fsdp1(model.ddp)


@ORIG
def test_names_are_those_of_the_bare_model_whatever_wraps_it(ranks: Ranks, orig: bool) -> None:
    ranks(2, inside_other_wrappers, orig)


def ignoring(orig: bool) -> None:
    model = make_net()
    model = wrap_fsdp1(model, use_orig_params=orig, ignored_states=[model.scale, *model.norm.parameters()])
    expected = {
        name: tensor
        for name, tensor in drop_buffers(make_net().state_dict()).items()
        if name.startswith(("embed", "body", "head", "out"))
    }
    assert_equal(read_parameters(model), expected)


@ORIG
def test_ignored_parameters_are_no_parts(ranks: Ranks, orig: bool) -> None:
    ranks(2, ignoring, orig)


def loading(orig: bool) -> None:
    """A fresh optimizer, filled: it goes on as the other does, and its padding is zero."""
    model, other = make_nested(use_orig_params=orig), make_nested(use_orig_params=orig)
    trained, fresh = make_adam(model), make_adam(other)
    train_model(model, trained)
    fsdp1.reshard(other)
    for source, target in zip(fsdp1.flat_shards(model), fsdp1.flat_shards(other), strict=True):
        target.local.copy_(source.local)
        if source.parameter not in trained.state:
            assert source.local.numel() == 0
            continue
        home = fresh.state[target.parameter]
        for name, value in trained.state[source.parameter].items():
            given = flat_elements(source, value)
            if given is None:
                home[name] = value.clone()
                continue
            if name not in home:
                home[name] = blank_flat_state(target, value.dtype)
            flat_elements(target, home[name]).copy_(given)
    for ours, theirs in zip(fresh.param_groups[0]["params"], trained.param_groups[0]["params"], strict=True):
        assert fresh.state.get(ours, {}).keys() == trained.state.get(theirs, {}).keys()
        for name, value in fresh.state.get(ours, {}).items():
            assert torch.equal(value, trained.state[theirs][name]), "the padding too"
            assert not value.requires_grad
    train_model(model, trained)
    train_model(other, fresh)
    assert_equal(read_parameters(other), read_parameters(model))


@each_value({"world": [1, 3], "orig": [True, False]})
def test_an_optimizer_without_state_can_be_filled(ranks: Ranks, world: int, orig: bool) -> None:
    ranks(world, loading, orig)


def collectives() -> tuple[int, bool]:
    model = make_nested(use_orig_params=False)
    optimizer = make_adam(model)
    train_model(model, optimizer)
    with CommDebugMode() as ours:
        fsdp1.reshard(model)
        for part in fsdp1.flat_shards(model):
            flat_elements(part, optimizer.state[part.parameter]["exp_avg"])
    with CommDebugMode() as torchs:
        gather_state_dict(model)
    return ours.get_total_counts(), torchs.get_total_counts() > 0


def test_nothing_is_communicated(ranks: Ranks) -> None:
    assert ranks(2, collectives) == [(0, True)] * 2
