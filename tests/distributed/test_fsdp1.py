"""Tests FSDP1's flat parameters against torch's gathered full state dicts and the model before wrapping."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import StateError, UnsupportedTensorError
from holdfast.state.model import fsdp1
from holdfast.state.model.fsdp1 import FlatShard
from tests.helpers.pool import Ranks
from tests.helpers.torch_limits import TAKES_OVER_ON_ONE_RANK

CPU = torch.device("cpu")
ORIG = pytest.mark.parametrize("orig", [True, False], ids=["orig", "flat"])


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


def net() -> Net:
    torch.manual_seed(1)
    return Net()


def wrap(module: nn.Module, **options: Any) -> FullyShardedDataParallel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one rank does not shard; NO_SHARD is deprecated
        return FullyShardedDataParallel(module, device_id=CPU, **options)


def nested(**options: Any) -> FullyShardedDataParallel:
    model = net()
    model.body[0] = wrap(model.body[0], **options)
    model.body = wrap(model.body, **options)
    return wrap(model, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for number in range(steps):
        tokens = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(number))
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """What torch gathers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def full_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    # With its default, to offload, torch returns the last state of a parameter for all of them where all is on the CPU.
    separate = FullOptimStateDictConfig(offload_to_cpu=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with FullyShardedDataParallel.state_dict_type(
            model, StateDictType.FULL_STATE_DICT, optim_state_dict_config=separate
        ):
            return FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]


def run_of(part: FlatShard, rank: int) -> tuple[int, int]:
    """What the description says that a rank holds."""
    at = part.mesh_ranks.index(rank) % part.mesh_shape[-1]
    numel = math.prod(part.shape)
    return max(at * part.length - part.offset, 0), min((at + 1) * part.length - part.offset, numel)


def gathered(described: list[tuple[FlatShard, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tensors put together from the parts of all ranks, each where its own rank's description of it says."""
    mine = {p.fqn: (p.shape, p.offset, p.length, p.mesh_shape, p.mesh_ranks, p.tied, p.dtype) for p, _ in described}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, [local for _, local in described]))
    result = {}
    for number, (part, local) in enumerate(described):
        whole = torch.full((math.prod(part.shape),), math.nan, dtype=local.dtype)
        for rank, (theirs, parts) in enumerate(everyone):
            assert theirs == mine, "one description, equal on all ranks"
            start, stop = run_of(part, rank)
            assert parts[number].shape == (max(stop - start, 0),)
            if start < stop:
                known = whole[start:stop]
                assert torch.equal(known[~known.isnan()], parts[number][~known.isnan()]), "replicas are equal"
                whole[start:stop] = parts[number]
        result[part.fqn] = whole.view(part.shape)
    return result


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters as the parts tell them, under all their names."""
    parts = list(fsdp1.flat_shards(model))
    whole = gathered([(part, part.local) for part in parts])
    return whole | {name: whole[part.fqn] for part in parts for name in part.tied}


def states(model: nn.Module, optimizer: torch.optim.Optimizer, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
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
                described.append((part, fsdp1.flat_elements(part, state)))
        for fqn, tensor in gathered(described).items():
            result.setdefault(fqn, {})[name] = tensor
    return result


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name


def without_buffers(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if name.rpartition(".")[2] != "running"}


def check(model: nn.Module, optimizer: torch.optim.Optimizer, *, fresh: bool = True) -> None:
    """Parameters before and after training, optimizer states, and writing: all as torch sees them."""
    if fresh:
        assert_equal(parameters(model), without_buffers(net().state_dict()))
    train(model, optimizer)
    assert_equal(parameters(model), without_buffers(full_state(model)))
    assert not torch.equal(parameters(model)["scale"], net().scale)
    known = full_optimizer(model, optimizer)
    found = states(model, optimizer, ("exp_avg", "exp_avg_sq"))
    for fqn, tensors in found.items():
        assert all(torch.equal(tensor, known[fqn][name]) for name, tensor in tensors.items()), fqn
    assert known.keys() == found.keys()
    check_writing(model)


def check_writing(model: nn.Module, *, evaluate: bool = True) -> None:
    """Numbers written through the parts are what the next forward uses, and what torch gathers."""
    tokens = torch.arange(10).view(2, 5)
    if evaluate:
        model(tokens)  # what it leaves gathered is not what is then written
    fsdp1.reshard(model)
    for part in fsdp1.flat_shards(model):
        start, stop = run_of(part, dist.get_rank())
        part.local.copy_(torch.arange(start, max(stop, start)) / 64 + len(part.fqn))
        assert part.parameter.requires_grad
    expected = net()
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            parameter.copy_((torch.arange(parameter.numel()) / 64 + len(name)).view(parameter.shape))
    with torch.no_grad():
        assert torch.allclose(model(tokens).float(), expected(tokens), rtol=1e-2)
    assert_equal(without_buffers(full_state(model)), without_buffers(expected.state_dict()))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def everything(build: Callable[..., FullyShardedDataParallel], options: dict[str, Any]) -> list[tuple[int, ...]]:
    model = build(**options)
    check(model, adam(model))
    return sorted({part.mesh_shape for part in fsdp1.flat_shards(model)})


def single(**options: Any) -> FullyShardedDataParallel:
    return wrap(net(), **options)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("build", [single, nested])
@ORIG
def test_parts_of_all_ranks_make_up_what_torch_gathers(ranks: Ranks, world: int, build: Any, orig: bool) -> None:
    mesh = (1, 1) if world == 1 else (world,)  # one rank does not shard
    assert ranks(world, everything, build, {"use_orig_params": orig}) == [[mesh]] * world


@ORIG
def test_shard_grad_op(ranks: Ranks, orig: bool) -> None:
    ranks(2, everything, nested, {"use_orig_params": orig, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP})


@ORIG
def test_no_shard_replicates(ranks: Ranks, orig: bool) -> None:
    options = {"use_orig_params": orig, "sharding_strategy": ShardingStrategy.NO_SHARD}
    assert ranks(2, everything, nested, options) == [[(2, 1)]] * 2


def hybrid(given: str, **options: Any) -> FullyShardedDataParallel:
    if given == "mesh":
        options["device_mesh"] = DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("replicate", "shard"))
    else:
        shards, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
        replicas, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        options["process_group"] = (shards, replicas)
    return nested(sharding_strategy=ShardingStrategy.HYBRID_SHARD, **options)


def in_hybrid(given: str, orig: bool) -> tuple[Any, ...]:
    model = hybrid(given, use_orig_params=orig)
    check(model, adam(model))
    (mesh,) = {(part.mesh_shape, part.mesh_ranks) for part in fsdp1.flat_shards(model)}
    return mesh


@pytest.mark.parametrize(("given", "expected"), [("mesh", (0, 3, 1, 2)), ("groups", (0, 1, 2, 3))])
@ORIG
def test_hybrid_shard_is_a_mesh_of_replicas_and_shards(ranks: Ranks, given: str, expected: Any, orig: bool) -> None:
    assert ranks(4, in_hybrid, given, orig) == [((2, 2), expected)] * 4


def in_irregular_groups() -> None:
    shards, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    replicas, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    model = wrap(net(), sharding_strategy=ShardingStrategy.HYBRID_SHARD, process_group=(shards, replicas))
    with pytest.raises(UnsupportedTensorError, match="do not form a mesh"):
        list(fsdp1.flat_shards(model))


def test_groups_from_which_no_mesh_can_be_told_are_refused(ranks: Ranks) -> None:
    ranks(4, in_irregular_groups)


def in_part_of_the_world(orig: bool) -> tuple[Any, ...]:
    """Two models over two ranks each, in a mesh whose other dimension is a pipeline's."""
    mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("stage", "shard"))
    model = wrap(net(), use_orig_params=orig, process_group=mesh.get_group("shard"))
    for part in fsdp1.flat_shards(model):
        start, stop = run_of(part, dist.get_rank())
        known = net().state_dict()[part.fqn].flatten()[start : max(stop, start)]
        assert torch.equal(part.local, known)
    return part.mesh_shape, part.mesh_ranks


@ORIG
def test_ranks_are_global_ones(ranks: Ranks, orig: bool) -> None:
    assert ranks(4, in_part_of_the_world, orig) == [((2,), (0, 2)), ((2,), (1, 3))] * 2


def in_mixed_precision(orig: bool) -> dict[str, torch.dtype]:
    mixed = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    model = nested(use_orig_params=orig, mixed_precision=mixed)
    check(model, adam(model))
    return {name.rpartition(".")[2]: buffer.dtype for name, buffer in model.named_buffers()}


@ORIG
@pytest.mark.parametrize("world", [1, 2])
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
        model = nested(use_orig_params=orig, cpu_offload=CPUOffload(offload_params=True))
        if early:
            model.check_is_root()  # as many calls do: from here on there is a pinned copy, not yet in use
            with pytest.raises(StateError, match=r"not sharded now"):
                list(fsdp1.flat_shards(model))
            check_writing(model, evaluate=False)
        else:
            check(model, adam(model))


@ORIG
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("world", [1, 2])
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
        model.body = wrap(model.body, use_orig_params=orig)
    model = wrap(model, use_orig_params=orig)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    assert_equal(parameters(model), without_buffers(net().state_dict()))
    train(model, optimizer)
    assert_equal(parameters(model), without_buffers(full_state(model)))
    body = {name: tensor for name, tensor in net().state_dict().items() if name.startswith("body.")}
    assert_equal({name: tensor for name, tensor in parameters(model).items() if name in body}, body)
    known = full_optimizer(model, optimizer)
    trained = {part.fqn for part in fsdp1.flat_shards(model)} - body.keys()
    assert known.keys() == trained
    found = states(model, optimizer, ("exp_avg",))
    assert all(torch.equal(found[name]["exp_avg"], known[name]["exp_avg"]) for name in trained)


@pytest.mark.parametrize(("orig", "separate"), [(True, True), (True, False), (False, True)])
def test_frozen_parameters(ranks: Ranks, orig: bool, separate: bool) -> None:
    """Frozen ones among trained ones need ``use_orig_params``."""
    ranks(2, frozen, orig, separate)


def tied_names(orig: bool) -> dict[str, tuple[str, ...]]:
    return {part.fqn: part.tied for part in fsdp1.flat_shards(nested(use_orig_params=orig)) if part.tied}


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
    model = wrap(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(1, 1, bias=False)), use_orig_params=orig)
    assert_equal(parameters(model), full_state(model))
    parts = list(fsdp1.flat_shards(model))
    with torch.no_grad():
        for part in parts:
            part.local.fill_(7)
    assert all(torch.equal(tensor, torch.full_like(tensor, 7)) for tensor in full_state(model).values())
    return [part.local.numel() for part in parts], [part.start_in_shard for part in parts if part.local.numel()]


@ORIG
def test_a_rank_without_a_piece_of_a_parameter(ranks: Ranks, orig: bool) -> None:
    # With use_orig_params there is padding for alignment and to a multiple of the ranks.
    assert ranks(3, pieces, orig) == [([2, 0], [0]), ([2, 0], [0]), ([0, 1], [0])]


def tiny(orig: bool) -> list[int]:
    """Three elements over four ranks: the last one's shard is all padding."""
    model = wrap(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, bias=False)), use_orig_params=orig)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 1)).sum().backward()
    optimizer.step()
    assert_equal(parameters(model), full_state(model))
    known = full_optimizer(model, optimizer)
    for fqn, found in states(model, optimizer, ("exp_avg",)).items():
        assert torch.equal(found["exp_avg"], known[fqn]["exp_avg"])
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
    model = net()
    model.ddp = DistributedDataParallel(nn.Linear(3, 2))
    known = {f"inner.{name}".replace(".module.", ".") for name in model.state_dict() if name != "running"}
    ignored = [model.ddp]
    model.body[0] = checkpoint_wrapper(wrap(model.body[0], use_orig_params=orig))
    model.body = wrap(checkpoint_wrapper(model.body), use_orig_params=orig)
    model.norm = model.again = torch.compile(wrap(model.norm, use_orig_params=orig), backend="eager")
    root = Root(torch.compile(wrap(model, use_orig_params=orig, ignored_modules=ignored), backend="eager"))
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
    model = net()
    model = wrap(model, use_orig_params=orig, ignored_states=[model.scale, *model.norm.parameters()])
    expected = {
        name: tensor
        for name, tensor in without_buffers(net().state_dict()).items()
        if name.startswith(("embed", "body", "head", "out"))
    }
    assert_equal(parameters(model), expected)


@ORIG
def test_ignored_parameters_are_no_parts(ranks: Ranks, orig: bool) -> None:
    ranks(2, ignoring, orig)


def loading(orig: bool) -> None:
    """A fresh optimizer, filled: it goes on as the other does, and its padding is zero."""
    model, other = nested(use_orig_params=orig), nested(use_orig_params=orig)
    trained, fresh = adam(model), adam(other)
    train(model, trained)
    fsdp1.reshard(other)
    for source, target in zip(fsdp1.flat_shards(model), fsdp1.flat_shards(other), strict=True):
        target.local.copy_(source.local)
        if source.parameter not in trained.state:
            assert source.local.numel() == 0
            continue
        home = fresh.state[target.parameter]
        for name, value in trained.state[source.parameter].items():
            given = fsdp1.flat_elements(source, value)
            if given is None:
                home[name] = value.clone()
                continue
            if name not in home:
                home[name] = fsdp1.blank_flat_state(target, value.dtype)
            fsdp1.flat_elements(target, home[name]).copy_(given)
    for ours, theirs in zip(fresh.param_groups[0]["params"], trained.param_groups[0]["params"], strict=True):
        assert fresh.state.get(ours, {}).keys() == trained.state.get(theirs, {}).keys()
        for name, value in fresh.state.get(ours, {}).items():
            assert torch.equal(value, trained.state[theirs][name]), "the padding too"
            assert not value.requires_grad
    train(model, trained)
    train(other, fresh)
    assert_equal(parameters(other), parameters(model))


@ORIG
@pytest.mark.parametrize("world", [1, 3])
def test_an_optimizer_without_state_can_be_filled(ranks: Ranks, world: int, orig: bool) -> None:
    ranks(world, loading, orig)


def collectives() -> tuple[int, bool]:
    model = nested(use_orig_params=False)
    optimizer = adam(model)
    train(model, optimizer)
    with CommDebugMode() as ours:
        fsdp1.reshard(model)
        for part in fsdp1.flat_shards(model):
            fsdp1.flat_elements(part, optimizer.state[part.parameter]["exp_avg"])
    with CommDebugMode() as torchs:
        full_state(model)
    return ours.get_total_counts(), torchs.get_total_counts() > 0


def test_nothing_is_communicated(ranks: Ranks) -> None:
    assert ranks(2, collectives) == [(0, True)] * 2


def factored() -> None:
    model = wrap(nn.Linear(6, 5), use_orig_params=True)
    (part, _) = fsdp1.flat_shards(model)
    assert fsdp1.flat_elements(part, torch.tensor(3.0)) is None
    with pytest.raises(UnsupportedTensorError, match="'weight' has shape"):
        fsdp1.flat_elements(part, torch.zeros(1))


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
    model = nested(use_orig_params=orig, sharding_strategy=strategy)
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
    train(model, adam(model))  # and it goes on
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
    model = wrap(nn.Linear(6, 5), use_orig_params=True)
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
    return [unsupported(wrap(one.to(memory_format=torch.channels_last))) for one in convolutions]


def unsupported(model: nn.Module) -> bool:
    try:
        assert_equal(parameters(model), full_state(model))
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
    model = wrap(model, device_mesh=mesh["data"], use_orig_params=True)
    try:
        list(fsdp1.flat_shards(model))
    except UnsupportedTensorError as error:
        assert "'weight' is a DTensor" in str(error)
    else:
        raise AssertionError("a part of a DTensor is not a part of the parameter")


def test_dtensors_inside_are_refused(ranks: Ranks) -> None:
    ranks(4, over_tensor_parallel)
