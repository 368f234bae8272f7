"""Tests copies of the training state between running ranks. The oracle is the state by names, or a save and a load."""

from __future__ import annotations

import builtins
import copy
import math
import os
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import rankless
from rankless import CopyResult
from rankless.engine.io import copy_exchange
from rankless.errors import (
    InvalidArgumentError,
    MismatchError,
    OptimizerMismatchError,
    RankFailedError,
    RankMismatchError,
    ReplicaMismatchError,
    StateError,
)
from tests.helpers.examples import examples
from tests.helpers.fsdp1 import gather_optimizer_state, gather_state_dict, make_nested, make_net, train_model
from tests.helpers.layouts import (
    LAYOUTS,
    LayoutRun,
    Net,
    blank_run,
    fill_run,
    local_tensor,
    make_run,
    named_tensors,
    shard_fsdp2,
)
from tests.helpers.pairwise import first_of
from tests.helpers.pool import Ranks
from tests.helpers.stateful import Counter
from tests.helpers.sub_layouts import SUB_LAYOUTS, make_sub_run
from tests.helpers.training import assert_equal, gather_run, start_run, train_run


def assert_filled(run: LayoutRun, oracle: LayoutRun) -> None:
    actual, expected = dict(named_tensors(run)), dict(named_tensors(oracle))
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert tensor.dtype == expected[name].dtype, name
        assert getattr(tensor, "placements", None) == getattr(expected[name], "placements", None), name
        assert torch.equal(local_tensor(tensor), local_tensor(expected[name])), name


def rejoin(layout: str, newcomers: Sequence[int]) -> CopyResult:
    """Some ranks come back into a job in which the others have the state."""
    run, oracle = LAYOUTS[layout][0](), fill_run(LAYOUTS[layout][0]())
    sources = [rank for rank in range(dist.get_world_size()) if rank not in newcomers]
    run = blank_run(run) if dist.get_rank() in newcomers else fill_run(run)
    tensors = {name: (id(tensor), local_tensor(tensor).data_ptr()) for name, tensor in run.parts[0].named_parameters()}
    result = rankless.copy_state(run.model, run.optimizer, sources=sources)
    assert_filled(run, oracle)
    assert tensors == {
        name: (id(tensor), local_tensor(tensor).data_ptr()) for name, tensor in run.parts[0].named_parameters()
    }
    return result


@first_of(
    5,
    ("layout", "size", "newcomers"),
    [
        ("plain", 2, [0]),
        ("ddp", 4, [0, 3]),
        ("hsdp", 4, [2]),
        ("pp_ddp", 4, [0, 2]),
        ("compiled", 2, [1]),
        ("ddp", 4, [2]),
        ("hsdp", 4, [0, 3]),
        ("hsdp_tp", 8, [1, 2, 4]),
        ("pp_ddp", 4, [3]),
    ],
)
def test_a_rank_that_comes_back_gets_the_state_of_the_others(
    ranks: Ranks, layout: str, size: int, newcomers: list[int]
) -> None:
    results = ranks(size, rejoin, layout, newcomers)
    for rank, result in enumerate(results):
        assert result.sources == tuple(other for other in range(size) if other not in newcomers)
        if rank in newcomers:
            assert {"model", "optimizer", "rng"} == {*result.exact}
            assert result.received_bytes > 0
            assert (result.sent_bytes, result.reconstructed, result.missing, result.unexpected) == (0, (), (), ())
        else:
            assert result == CopyResult(sources=result.sources, sent_bytes=result.sent_bytes)


def rejoin_large() -> tuple[CopyResult, int]:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3.0 if dist.get_rank() != 2 else 0.0)
    result = rankless.copy_state(DistributedDataParallel(model, init_sync=False), sources=[0, 1, 3])
    assert all(bool((parameter == 3).all()) for parameter in model.parameters())
    return result, sum(parameter.nbytes for parameter in model.parameters())


def test_all_sources_send_an_equal_share(ranks: Ranks) -> None:
    results = ranks(4, rejoin_large)
    total = results[0][1]
    assert results[2][0].received_bytes == total
    for rank in (0, 1, 3):
        assert abs(results[rank][0].sent_bytes - total / 3) < 64


def reshard(before: str, old_ranks: Sequence[int], after: str, new_ranks: Sequence[int]) -> tuple[CopyResult, int]:
    """The state moves from a layout over some ranks into one over other ranks. Return how much this rank lacked."""
    old, new = make_sub_run(before, old_ranks), make_sub_run(after, new_ranks)
    oracle, old_oracle = make_sub_run(after, new_ranks), make_sub_run(before, old_ranks)
    source = None
    if old is not None:
        source = {"model": fill_run(old).model, "optimizer": old.optimizer}
    if new is not None:
        result = rankless.copy_state(blank_run(new).model, new.optimizer, source=source, rng=False)
        assert_filled(new, fill_run(oracle))
    else:
        result = rankless.copy_state(source=source)
    if old is not None:
        assert_filled(old, fill_run(old_oracle))
    return result, lacking_bytes(old, new)


def lacking_bytes(old: LayoutRun | None, new: LayoutRun | None) -> int:
    """How many bytes of the new tensors this rank does not hold in the old ones, by torch's own division."""
    had = dict(named_tensors(old)) if old else {}
    return sum(
        len(held_elements(tensor) - (held_elements(had[name]) if name in had else set())) * tensor.dtype.itemsize
        for name, tensor in (named_tensors(new) if new else ())
    )


def held_elements(tensor: torch.Tensor) -> set[int]:
    elements = torch.arange(math.prod(tensor.shape)).view(tensor.shape)
    if isinstance(tensor, DTensor):
        elements = distribute_tensor(elements, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
    return set(elements.flatten().tolist())


CHANGES = [
    ("fsdp", [2, 3], "tp", [0, 1]),
    ("fsdp_tp", [0, 1, 2, 3], "fsdp", [0, 1, 3]),
    ("plain", [1], "hsdp", [0, 1, 2, 3]),
    ("fsdp", [0, 1], "fsdp", [0, 1, 2, 3]),
    ("fsdp", [0, 1, 2, 3], "fsdp", [0, 1, 2]),
    ("tp", [0, 1, 2, 3], "tp", [1, 2, 3]),
    ("tp", [0, 1], "fsdp_tp", [0, 1, 2, 3]),
    ("fsdp_tp", [0, 1, 2, 3], "plain", [2]),
    ("hsdp", [0, 1, 2, 3], "fsdp_tp", [0, 1, 2, 3]),
]


def check_moved(results: Sequence[tuple[CopyResult, int]]) -> None:
    sent = sum(result.sent_bytes for result, _ in results)
    assert sent == sum(result.received_bytes for result, _ in results)
    # The buffer, of 8 bytes, is that of the lowest source on all ranks.
    assert sent <= 1.2 * sum(lacking for _, lacking in results) + 8 * len(results)


@first_of(4, "change", CHANGES, ids=str)
def test_the_state_moves_to_another_number_of_ranks_in_another_layout(ranks: Ranks, change: tuple[Any, ...]) -> None:
    check_moved(ranks(4, reshard, *change))


# torch's groups have their ranks in ascending order, whatever the order in a mesh.
members = st.sets(st.integers(0, 3), min_size=1).map(sorted)


@given(st.sampled_from(SUB_LAYOUTS), members, st.sampled_from(SUB_LAYOUTS), members)
@settings(max_examples=examples(25, least=6))
def test_any_layout_moves_into_any_other(
    ranks: Ranks, before: str, old_ranks: list[int], after: str, new_ranks: list[int]
) -> None:
    check_moved(ranks(4, reshard, before, old_ranks, after, new_ranks))


def everything_of_a_run(path: str) -> None:
    """Scheduler, stateful objects, loaders and param groups, next to what a save and a load of the same give."""
    run = train_run("fsdp")
    old_loader = rankless.ResumableLoader(list(range(40)), batch_size=2)
    batches = iter(old_loader)
    next(batches)
    parts = {"stateful": {"counter": Counter(5)}, "dataloader": old_loader}
    content = {"step": 7, "table": torch.arange(3)}
    rankless.save_checkpoint(path, "s", run.model, run.optimizer, run.scheduler, content, **parts)
    outcomes = []
    for copies in (True, False):
        new = start_run("ddp", seed=3)
        new_parts = {
            "stateful": {"counter": Counter()},
            "dataloader": rankless.ResumableLoader(list(range(40)), batch_size=2),
        }
        if copies:
            source = {"model": run.model, "optimizer": run.optimizer, "scheduler": run.scheduler, **parts}
            result: Any = rankless.copy_state(
                new.model, new.optimizer, new.scheduler, source=source, user_content=content, **new_parts
            )
            assert {*result.exact} == {"model", "optimizer", "scheduler", "stateful", "user_content"}
            assert result.reconstructed == ("dataloader",)
        else:
            result = rankless.restore(path, "s", new.model, new.optimizer, new.scheduler, **new_parts, rng=False)
        groups = [{key: value for key, value in g.items() if key != "params"} for g in new.optimizer.param_groups]
        values = groups, new.scheduler.state_dict(), new_parts["stateful"]["counter"].count
        outcomes.append((gather_run(new), repr(values), new_parts["dataloader"].state_dict(), result.user_content))
    assert_equal(outcomes[0][0], outcomes[1][0])
    assert outcomes[0][1:3] == outcomes[1][1:3]
    for _, _, _, content_here in outcomes:
        assert content_here["step"] == 7
        assert torch.equal(content_here["table"], torch.arange(3))


def copy_what_differs() -> tuple[CopyResult, int]:
    """Both ranks are sources, with another count each, and both receive."""
    counter = Counter(0)
    source = {"model": nn.Linear(2, 2, bias=False), "stateful": {"counter": Counter(5 + dist.get_rank())}}
    nn.init.ones_(source["model"].weight)
    model = nn.Linear(2, 2, bias=False)
    result = rankless.copy_state(model, source=source, stateful={"counter": counter}, user_content={"same": 1})
    return result, counter.count


def test_what_differs_between_the_sources_is_that_of_the_first_and_not_exact(ranks: Ranks) -> None:
    for result, count in ranks(2, copy_what_differs):
        assert count == 5
        assert result.exact == ("model", "user_content")
        assert result.reconstructed == ("stateful",)


def test_a_copy_gives_what_a_save_and_a_load_give(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, everything_of_a_run, str(tmp_path))


def draw_numbers() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))  # noqa: NPY002


def continue_random(alike: bool) -> tuple[tuple[float, ...], tuple[str, ...]]:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1 if alike and dist.get_rank() < 2 else 100 + dist.get_rank())
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(1)
        model.bias.fill_(1)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1 if alike and dist.get_rank() < 2 else 100 + dist.get_rank())
    result = rankless.copy_state(model, sources=[0, 1], rng=True)
    return draw_numbers(), result.reconstructed


def test_random_numbers_are_those_of_the_sources_if_these_have_the_same(ranks: Ranks) -> None:
    drawn = ranks(3, continue_random, True)
    assert drawn[0] == drawn[1] == drawn[2]


def test_random_numbers_are_derived_if_the_sources_have_different_ones(ranks: Ranks) -> None:
    first, second, third = ranks(3, continue_random, False)
    assert len({first[0], second[0], third[0]}) == 3
    assert third[1] == ("rng",)
    assert ranks(3, continue_random, False) == [first, second, third]
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(101)
    assert second[0] == draw_numbers(), "a source goes on with its own numbers"


def touch_no_file(folder: str) -> list[str]:
    os.chdir(folder)
    opened: list[str] = []

    def recording(module: Any, name: str) -> Any:
        original = getattr(module, name)

        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(path, (str, bytes, os.PathLike)):
                opened.append(os.fsdecode(path))
            return original(path, *arguments, **options)

        return mock.patch.object(module, name, call)

    rejoin("ddp", [1])  # imports modules, and sets up what the first use needs
    with recording(os, "open"), recording(builtins, "open"), recording(os, "mkdir"):
        rejoin("ddp", [1])
    return opened


def test_no_file_is_opened(ranks: Ranks, tmp_path: Path) -> None:
    for opened in ranks(2, touch_no_file, str(tmp_path)):
        assert [path for path in opened if not path.startswith(("/proc/", "/sys/"))] == []
    assert not list(tmp_path.iterdir())


def change_tensor(run: LayoutRun, change: str) -> None:
    with torch.no_grad():
        if change == "weight":
            run.model.module.embed.weight[1, 2] += 1e-6
        elif change == "state":
            run.optimizer.state[run.model.module.embed.weight]["exp_avg"][0] += 1
        elif change == "step":
            run.optimizer.state[run.model.module.embed.weight]["step"] += 1


def diverged(change: str) -> str:
    run = fill_run(LAYOUTS["ddp"][0]())
    if dist.get_rank() == 1:
        change_tensor(run, change)
    if dist.get_rank() == 2:
        blank_run(run)
    try:
        rankless.copy_state(run.model, run.optimizer, sources=[0, 1])
    except ReplicaMismatchError as error:
        if dist.get_rank() == 2:
            assert all(bool((tensor == 7).all()) for _, tensor in named_tensors(run))
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("weight", "model tensor 'embed.weight'"),
        ("state", "optimizer tensor 'embed.weight/exp_avg'"),
        ("step", "optimizer tensor 'embed.weight/step'"),
    ],
)
def test_sources_that_differ_are_an_error_that_names_tensor_and_ranks(ranks: Ranks, change: str, name: str) -> None:
    for message in ranks(3, diverged, change):
        assert name in message
        assert "rank 0 and rank 1 differ" in message
        assert message.endswith("Nothing was copied")


class Other(nn.Module):
    def __init__(self, width: int = 4, dtype: torch.dtype = torch.float32, *, extra: bool = False) -> None:
        super().__init__()
        self.a = nn.Linear(3, width, dtype=dtype)
        if extra:
            self.b = nn.Linear(2, 2)


def copy_into_other(receiver: dict[str, Any], source: dict[str, Any], options: dict[str, Any]) -> str:
    """Copy rank 0's model into that of rank 1, which stays as it is."""
    model = Other(**(receiver if dist.get_rank() == 1 else source))
    before = copy.deepcopy(model.state_dict())
    try:
        result = rankless.copy_state(model, sources=[0], **options)
    except MismatchError as error:
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name])
        return str(error)
    return repr((result.missing, result.unexpected))


@pytest.mark.parametrize(
    ("receiver", "source", "parts"),
    [
        ({"extra": True}, {}, ["missing in the source: b.weight", "missing in the source: b.bias"]),
        ({}, {"extra": True}, ["only in the source: b.weight"]),
        ({"width": 5}, {}, ["a.weight: shape [4, 3] in the source, [5, 3] here"]),
        ({"dtype": torch.float64}, {}, ["a.bias: dtype F32 in the source, F64 here"]),
    ],
)
def test_a_mismatch_is_one_error_on_all_ranks_and_changes_nothing(
    ranks: Ranks, receiver: dict[str, Any], source: dict[str, Any], parts: list[str]
) -> None:
    messages = ranks(2, copy_into_other, receiver, source, {})
    assert messages[0] == messages[1]
    for part in ("the state of rank 0 does not match", "rank 1 of 2", *parts):
        assert part in messages[0]
    assert "checkpoint" not in messages[0]


def test_names_may_differ_if_the_copy_is_not_strict(ranks: Ranks) -> None:
    assert ranks(2, copy_into_other, {}, {"extra": True}, {"strict": False})[1] == "((), ('b.weight', 'b.bias'))"
    with pytest.warns(match="copied the state of rank 0, but not all.*\n  missing in the source: b.weight"):
        result = rankless.copy_state(Other(extra=True), source={"model": Other()}, strict=False)
    assert result.missing == ("b.weight", "b.bias")


def test_one_process_copies_from_one_model_to_another_one() -> None:
    old, new = Other(dtype=torch.float64), Other()
    result = rankless.copy_state(new, source={"model": old}, cast_dtype=True)
    assert result.reconstructed == ("model",)
    assert result.local_bytes == sum(parameter.nbytes for parameter in old.parameters())
    for name, tensor in new.state_dict().items():
        assert torch.equal(tensor, old.state_dict()[name].float())


def test_a_model_on_the_meta_device_gets_memory() -> None:
    with torch.device("meta"):
        new = Other()
    old = Other()
    rankless.copy_state(new, source={"model": old})
    for name, tensor in new.state_dict().items():
        assert torch.equal(tensor, old.state_dict()[name])


def copy_into_other_optimizer() -> None:
    model = Other()
    kind = torch.optim.SGD if dist.get_rank() else torch.optim.AdamW
    rankless.copy_state(model, kind(model.parameters(), lr=0.1), sources=[0])


def test_another_optimizer_is_an_error(ranks: Ranks) -> None:
    for error in ranks.outcomes(2, copy_into_other_optimizer):
        assert isinstance(error, OptimizerMismatchError)
        assert "the source holds the state of torch.optim.adamw.AdamW" in str(error) or "AdamW" in str(error)
        assert "checkpoint" not in str(error)


def lose_a_shard() -> None:
    run = LAYOUTS["fsdp"][0]()
    run = blank_run(run) if dist.get_rank() == 2 else fill_run(run)
    rankless.copy_state(run.model, run.optimizer, sources=[0, 1, 3])


def test_a_shard_that_no_source_has_is_an_error_that_names_tensor_and_rank(ranks: Ranks) -> None:
    for error in ranks.outcomes(4, lose_a_shard):
        assert isinstance(error, StateError)
        assert re.search(
            r"rank 2 needs a shard of model tensor '.*' that no source rank holds: it was on rank 2", str(error)
        )


def renumber() -> None:
    """Rank 1 is lost: the others make a process group without it, in which rank 2 is rank 1."""
    run = fill_run(LAYOUTS["hsdp"][0]())
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    if rank == 1:
        dist.init_process_group("gloo", store=dist.PrefixStore("lost", store), rank=0, world_size=1)
        return
    number = [0, 2, 3].index(rank)
    dist.init_process_group("gloo", store=dist.PrefixStore("survivors", store), rank=number, world_size=3)
    # torch finds a mesh that equals one of a former process group in its caches; the name makes this one another.
    mesh = DeviceMesh("cpu", [0, 1, 2], mesh_dim_names=("survivors",))
    new, oracle = (make_run(shard_fsdp2(Net(), mesh)) for _ in range(2))
    blank_run(new)
    rankless.copy_state(new.model, new.optimizer, source={"model": run.model, "optimizer": run.optimizer})
    assert_filled(new, fill_run(oracle))
    with pytest.raises(StateError, match="make them after the process group"):
        rankless.copy_state(run.model, source={"model": new.model})


def test_survivors_with_new_numbers_are_known_by_their_places_in_the_meshes(ranks: Ranks) -> None:
    ranks(4, renumber)


def copy_fsdp1() -> None:
    """From FSDP1 into each rank's whole model, and back into FSDP1."""
    model = make_nested(use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train_model(model, optimizer)
    whole, other = make_net(), make_nested(use_orig_params=True)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in (whole, other)]
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    rankless.copy_state(whole, optimizers[0], source={"model": model, "optimizer": optimizer})
    rankless.copy_state(other, optimizers[1], source={"model": whole, "optimizer": optimizers[0]})
    gathered = gather_state_dict(model)
    assert_equal(dict(whole.state_dict()), gathered)
    assert_equal(gather_state_dict(other), gathered)
    assert repr(gather_optimizer_state(other, optimizers[1])) == repr(gather_optimizer_state(model, optimizer))


def test_flat_parameters_are_copied(ranks: Ranks) -> None:
    ranks(3, copy_fsdp1)


def copy_in_a_group() -> tuple[int, ...] | None:
    """Ranks 1 to 3 are 0 to 2 in a process group of their own."""
    group = dist.new_group([1, 2, 3])
    model = nn.Linear(3, 3)
    if dist.get_rank() == 0:
        return None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(5.0 if dist.get_rank() != 3 else 1.0)
    result = rankless.copy_state(model, sources=[0, 1], process_group=group)
    assert all(bool((parameter == 5).all()) for parameter in model.parameters())
    return result.sources


def test_the_ranks_are_those_of_the_process_group(ranks: Ranks) -> None:
    assert ranks(4, copy_in_a_group) == [None, (0, 1), (0, 1), (0, 1)]


def test_a_target_may_not_be_over_the_array_that_a_source_is_over() -> None:
    """Two storages of torch, with different first bytes, and one array of NumPy below both."""
    array = np.arange(15, dtype=np.float32)
    target, source = torch.from_numpy(array[:10]), torch.from_numpy(array[5:])
    with pytest.raises(InvalidArgumentError, match="model tensor 'a' shares its memory with a tensor of the source"):
        rankless.copy_state({"a": target}, source={"model": {"a": source}})
    assert np.array_equal(array, np.arange(15, dtype=np.float32))


class Tied(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        if tied:
            self.b.weight = self.a.weight


@pytest.mark.parametrize("tied", [(True, False), (True, True)])
def test_tied_weights_may_be_separate_here(tied: tuple[bool, bool]) -> None:
    old, new = Tied(tied=tied[0]), Tied(tied=tied[1])
    rankless.copy_state(new, source={"model": old})
    assert torch.equal(new.a.weight, old.a.weight)
    assert torch.equal(new.b.weight, old.a.weight)


def make_untied(change: float) -> tuple[Tied, torch.optim.Optimizer]:
    """Two weights of one value, trained alike. The last element of the second weight's moments changes."""
    old = Tied(tied=False)
    old.b.weight.data.copy_(old.a.weight)
    optimizer = torch.optim.Adam(old.parameters())
    for parameter in old.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.state[old.b.weight]["exp_avg"][-1, -1] += change
    return old, optimizer


def test_a_tensor_that_a_copy_would_drop_is_named() -> None:
    old, new = Tied(tied=False), Tied(tied=True)
    before = new.a.weight.detach().clone()
    with pytest.raises(
        MismatchError, match=r"b\.weight: the same tensor as a\.weight here, and another one in the source"
    ):
        rankless.copy_state(new, source={"model": old})
    assert torch.equal(new.a.weight, before)
    result = rankless.copy_state(new, source={"model": old}, strict=False)
    assert (result.exact, result.unexpected) == ((), ("b.weight",))
    assert torch.equal(new.b.weight, old.a.weight)


def test_a_state_of_an_optimizer_that_a_copy_would_drop_is_named() -> None:
    old, optimizer = make_untied(change=1)
    new = Tied(tied=True)
    with pytest.raises(MismatchError, match=r"b\.weight/exp_avg: the same tensor as a\.weight/exp_avg here"):
        rankless.copy_state(
            new, torch.optim.Adam(new.parameters()), source={"model": old, "optimizer": optimizer}, rng=False
        )


def test_equal_tensors_and_states_of_them_are_copied_into_one() -> None:
    old, optimizer = make_untied(change=0)
    new = Tied(tied=True)
    copied = torch.optim.Adam(new.parameters())
    result = rankless.copy_state(new, copied, source={"model": old, "optimizer": optimizer}, rng=False)
    assert result.exact == ("model", "optimizer")
    assert torch.equal(new.b.weight, old.b.weight)
    assert torch.equal(copied.state[new.a.weight]["exp_avg"], optimizer.state[old.b.weight]["exp_avg"])


def copy_shards_into_tied(kind: str) -> Any:
    """Copy two weights into a model in which they are one: shards of them, or one of them from each rank."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    first, second = torch.arange(16.0).view(4, 4), torch.arange(16.0).view(4, 4)
    if kind == "differ":
        second[-1, -1] = 0
    parts = {"a.weight": first, "b.weight": second}
    if kind == "stages":
        parts = dict([[*parts.items()][rank]])
    else:
        dims = {"a.weight": 0, "b.weight": 1 if kind == "other shards" else 0}
        parts = {
            name: distribute_tensor(part, mesh, [Shard(dims[name])], src_data_rank=None) for name, part in parts.items()
        }
    new = Tied(tied=True)
    try:
        result = rankless.copy_state(new, source={"model": parts})
    except MismatchError as error:
        return str(error).splitlines()[1]
    assert torch.equal(new.b.weight, second)
    return result.exact


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("shards", ("model",)),
        ("stages", ("model",)),
        ("differ", "another one in the source, which would be dropped"),
        ("other shards", "sharded in another way in the source, so that it may differ, which would be dropped"),
    ],
)
def test_tensors_are_compared_on_the_ranks_that_have_them(ranks: Ranks, kind: str, expected: Any) -> None:
    for outcome in ranks(2, copy_shards_into_tied, kind):
        assert expected in outcome if isinstance(expected, str) else outcome == expected


def split_alike(alike: bool) -> None:
    mesh = init_device_mesh("cpu", (2,))
    shared = torch.arange(16.0).view(4, 4)
    old = Tied(tied=True)
    with torch.no_grad():
        old.a.weight.copy_(shared)
    new = Tied(tied=False)
    for module, dim in ((new.a, 0), (new.b, 0 if alike else 1)):
        module.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(dim)], src_data_rank=None))
    rankless.copy_state(new, source={"model": old})
    for module in (new.a, new.b):
        assert torch.equal(module.weight.full_tensor(), shared)


def test_separate_weights_that_were_tied_must_be_sharded_alike(ranks: Ranks) -> None:
    ranks(2, split_alike, True)
    for error in ranks.outcomes(2, split_alike, False):
        assert isinstance(error, StateError)
        assert "tie them, or shard them alike" in str(error)


def call_wrongly(case: str) -> None:
    model, rank = Other(), dist.get_rank()
    if case == "no source":
        rankless.copy_state(model)
    elif case == "both":
        rankless.copy_state(model, source={"model": Other()}, sources=[0])
    elif case == "other ranks":
        rankless.copy_state(model, sources=[rank])
    elif case == "number":
        rankless.copy_state(model, sources=1)
    elif case == "one rank":
        rankless.copy_state(source=Other() if rank else {"model": model}, timeout=10)
    elif case == "outside":
        rankless.copy_state(model, sources=[0, 2])
    elif case == "key":
        rankless.copy_state(model, source={"weights": Other()})
    elif case == "components":
        optimizer = torch.optim.SGD(model.parameters()) if rank else None
        rankless.copy_state(source={"model": model, "optimizer": optimizer} if rank else {"model": model})
    elif case == "same objects":
        rankless.copy_state(model, source={"model": model})


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("no source", InvalidArgumentError, "no rank is a source"),
        ("both", InvalidArgumentError, "not both"),
        ("other ranks", RankMismatchError, "ranks disagree about sources: rank 0 has ['0'], rank 1 has ['1']"),
        ("number", InvalidArgumentError, "sources must be a list of ranks, such as [0, 1]; got 1"),
        ("one rank", InvalidArgumentError, "source must be a dict of objects"),
        ("outside", InvalidArgumentError, "ranks of the process group, 0 to 1; got 2"),
        ("key", InvalidArgumentError, "got the key 'weights'"),
        ("components", RankMismatchError, "what the sources give: rank 0 passes model, rank 1 model, optimizer"),
        ("same objects", InvalidArgumentError, "model tensor 'a.weight' shares its memory"),
    ],
)
def test_wrong_calls_are_one_error_on_all_ranks(ranks: Ranks, case: str, kind: type[Exception], message: str) -> None:
    for error in ranks.outcomes(2, call_wrongly, case):
        assert isinstance(error, kind)
        assert message in str(error)


def copy_from_iterator(value: int) -> int:
    rankless.copy_state({"a": (tensor := torch.tensor(value + dist.get_rank()))}, sources=iter([1]))
    return int(tensor)


def test_sources_may_be_an_iterator(ranks: Ranks) -> None:
    assert ranks(2, copy_from_iterator, 5) == [6, 6]


def test_a_source_that_is_no_dict_is_an_error() -> None:
    with pytest.raises(InvalidArgumentError, match="Ranks are passed as sources="):
        rankless.copy_state(Other(), source=[0, 1])


def fail_midway() -> str:
    run = LAYOUTS["ddp"][0]()
    run = blank_run(run) if dist.get_rank() == 1 else fill_run(run)
    fails = {"side_effect": OSError("a test")} if dist.get_rank() == 0 else {"wraps": copy_exchange.gather_pieces}
    with mock.patch.object(copy_exchange, "gather_pieces", **fails), pytest.raises(RankFailedError) as caught:
        rankless.copy_state(run.model, run.optimizer, sources=[0, 2], timeout=10)
    return str(caught.value)


def test_a_rank_that_fails_midway_is_one_error_that_says_what_may_be_partly_filled(ranks: Ranks) -> None:
    messages = set(ranks(3, fail_midway))
    assert len(messages) == 1
    message = messages.pop()
    assert "rank 0 of 3, copying: OSError: a test" in message
    assert "may be partly filled: do not use them" in message
    assert "Those of the sources are unchanged" in message


def grow_memory() -> float:
    """The growth of this rank's memory, in MiB, while it gets 256 MiB in columns of what it had in rows."""
    width, mesh = 4096, init_device_mesh("cpu", (dist.get_world_size(),))
    grid = torch.arange(width**2, dtype=torch.float32).view(width, width)
    old = {f"w{i}": distribute_tensor(grid + i, mesh, [Shard(0)], src_data_rank=None) for i in range(4)}
    new = {name: distribute_tensor(torch.zeros(width, width), mesh, [Shard(1)], src_data_rank=None) for name in old}
    rankless.copy_state({"w": torch.zeros(2)}, source={"model": {"w": torch.ones(2)}})
    Path("/proc/self/clear_refs").write_text("5")
    before = read_status("VmRSS")
    rankless.copy_state(new, source={"model": old})
    grown = read_status("VmHWM") - before
    for i, tensor in enumerate(new.values()):
        expected = distribute_tensor(grid + i, mesh, [Shard(1)], src_data_rank=None)
        assert torch.equal(tensor.to_local(), expected.to_local())
    return grown


def read_status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def test_the_memory_of_a_copy_is_bounded(ranks: Ranks) -> None:
    assert max(ranks(2, grow_memory)) < 64
