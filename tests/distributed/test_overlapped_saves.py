"""Tests overlapped saves: copied during the next forward and backward, with the state at the call, bit for bit."""

import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import rankless
from rankless.engine.io import staging, torn_snapshot
from rankless.errors import InvalidArgumentError, RankMismatchError, TornSnapshotError
from tests.helpers.pairwise import first_of
from tests.helpers.pool import Ranks
from tests.helpers.run_directories import list_names
from tests.helpers.training import clean_name, full_tensor, wrap_model


def slow(seconds: float = 0.3) -> Any:
    """The copy that is left for later takes its time."""
    complete = staging.StagedTensors.copy_deferred

    def wait(*arguments: Any) -> None:
        time.sleep(seconds)
        complete(*arguments)

    return mock.patch.object(staging.StagedTensors, "copy_deferred", wait)


def make(layout: str, kind: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(8, 33), nn.BatchNorm1d(33), nn.Linear(33, 4))
    holder = nn.Module()
    holder.body = body
    model = wrap_model(holder, layout)
    return model, getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def expected(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """What the files must hold, by torch's own means."""
    actual = {f"model/{clean_name(name)}": full_tensor(tensor) for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for state, value in optimizer.state[parameter].items():
            actual[f"optimizer/{clean_name(name)}/{state}"] = full_tensor(value)
    return actual


def save_and_step(path: str, layout: str, kind: str, options: dict[str, Any], times: int) -> None:
    model, optimizer = make(layout, kind, **options)
    content = {"n": [0]}
    step(model, optimizer)
    for number in range(times):
        before = expected(model, optimizer)
        rankless.save_checkpoint(
            path, f"s{number}", model, optimizer, None, content, async_save=True, staging="overlapped"
        )
        content["n"][0] += 1
        for buffer in model.buffers():
            buffer.add_(1)
        step(model, optimizer)
        rankless.finalize()
        checkpoint = rankless.open(f"{path}/s{number}")
        assert checkpoint.values["user_content"] == {"n": [number]}
        assert set(checkpoint.keys()) >= before.keys()
        for name, tensor in before.items():
            assert torch.equal(checkpoint[name], tensor), name


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}, {"amsgrad": True}])
def test_a_step_waits_for_the_copy(tmp_path: Path, options: dict[str, Any]) -> None:
    with slow(0.05):
        save_and_step(str(tmp_path), "plain", "AdamW", options, 3)


@first_of(1, ("layout", "n", "times"), [("ddp", 2, 5), ("ddp", 2, 20), ("fsdp", 2, 20), ("fsdp", 3, 20)])
def test_a_step_of_distributed_parameters_waits_too(
    ranks: Ranks, tmp_path: Path, layout: str, n: int, times: int
) -> None:
    for number, options in enumerate([{"fused": True}, {"foreach": True}]):
        ranks(n, save_and_step, str(tmp_path / str(number)), layout, "AdamW", options, times)


def test_an_optimizer_over_the_same_parameters_waits_as_well(tmp_path: Path) -> None:
    model, optimizer = make("plain", "AdamW")
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    before = expected(model, optimizer)
    with slow():
        rankless.save_checkpoint(tmp_path, "s", model, optimizer, async_save=True, staging="overlapped")
        step(model, other)
    rankless.finalize()
    checkpoint = rankless.open(tmp_path / "s")
    assert all(torch.equal(checkpoint[name], tensor) for name, tensor in before.items())


def test_a_compiled_step_waits(tmp_path: Path) -> None:
    model, optimizer = make("plain", "AdamW")
    compiled = torch.compile(optimizer.step, backend="eager")
    step(model, optimizer)
    compiled()
    before = expected(model, optimizer)
    with slow():
        rankless.save_checkpoint(tmp_path, "s", model, optimizer, async_save=True, staging="overlapped")
        compiled()
    rankless.finalize()
    checkpoint = rankless.open(tmp_path / "s")
    assert all(torch.equal(checkpoint[name], tensor) for name, tensor in before.items())


def test_forward_and_backward_do_not_wait(tmp_path: Path) -> None:
    model, optimizer = make("plain", "AdamW")
    copied, allowed = threading.Event(), threading.Event()
    copy_deferred = staging.StagedTensors.copy_deferred

    def wait(*arguments: Any) -> None:
        allowed.wait(60)
        copy_deferred(*arguments)
        copied.set()

    with mock.patch.object(staging.StagedTensors, "copy_deferred", wait):
        rankless.save_checkpoint(tmp_path, "s", model, optimizer, async_save=True, staging="overlapped")
        model.body(torch.ones(4, 8)).sum().backward()
        assert not copied.is_set()
        allowed.set()
        optimizer.step()
        assert copied.is_set()
    rankless.finalize()


def test_what_no_optimizer_owns_is_copied_at_the_call(tmp_path: Path) -> None:
    """Buffers, frozen parameters, an average of the parameters, a whole model where its optimizer is not passed."""
    model, optimizer = make("plain", "AdamW")
    average = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    step(model, optimizer)
    both = {"net": model, "average": average}
    before = expected(model, optimizer)
    mean = average["body.0.weight"].clone()
    with slow():
        rankless.save_checkpoint(tmp_path, "s", both, {"net": optimizer}, async_save=True, staging="overlapped")
        average["body.0.weight"].fill_(9)
        model.body[1].running_mean.fill_(9)
        rankless.finalize()
        rankless.save_checkpoint(tmp_path, "t", model, async_save=True, staging="overlapped")
        with torch.no_grad():
            model.body[0].weight.fill_(9)
        rankless.finalize()
    actual, other = rankless.open(tmp_path / "s"), rankless.open(tmp_path / "t")
    assert torch.equal(actual["model/average/body.0.weight"], mean)
    assert torch.equal(actual["model/net/body.1.running_mean"], before["model/body.1.running_mean"])
    assert torch.equal(other["model/body.0.weight"], before["model/body.0.weight"])


@pytest.mark.parametrize("moment", ["before the copy", "after the copy"])
def test_a_change_behind_our_back_fails_the_save(tmp_path: Path, moment: str) -> None:
    model, optimizer = make("plain", "AdamW")
    rankless.save_checkpoint(tmp_path, "old", model, optimizer)
    changed = threading.Event()

    def change() -> None:
        model.body[2].weight.data[0, 0] += 1
        changed.set()

    in_threads, module = staging.run_in_threads, staging if moment == "before the copy" else torn_snapshot

    def later(*arguments: Any) -> Any:
        assert changed.wait(10)
        return in_threads(*arguments)

    complete = staging.StagedTensors.copy_deferred

    def held(*arguments: Any) -> None:
        with mock.patch.object(module, "run_in_threads", later):
            complete(*arguments)

    with mock.patch.object(staging.StagedTensors, "copy_deferred", held):
        handle = rankless.save_checkpoint(
            tmp_path,
            "s",
            model,
            optimizer,
            async_save=True,
            staging="overlapped",
            staging_check="full",
            incremental=False,
        )
        change()
        with pytest.raises(TornSnapshotError, match=r"changed while it was copied.*eager"):
            handle.wait()
    with pytest.raises(TornSnapshotError):
        rankless.finalize()
    assert list_names(tmp_path) == ["old"]
    step(model, optimizer)
    rankless.save_checkpoint(tmp_path, "next", model, optimizer, async_save=True, staging="overlapped")
    rankless.finalize()


def test_samples_find_changes_within_a_few_saves(tmp_path: Path) -> None:
    """Twelve chunks each time, others in turn."""
    parameter = nn.Parameter(torch.zeros(40 * 2**20))  # 40 chunks of 4 MiB
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    result = []
    with slow(0.1):
        for number in range(4):
            rankless.save_checkpoint(
                tmp_path, "s", {"w": parameter}, optimizer, async_save=True, staging="overlapped", overwrite=True
            )
            parameter.data[5 * 2**20] += 1  # in chunk 5
            try:
                rankless.finalize()
            except TornSnapshotError:
                result.append(number)
                break
    assert result


def test_a_load_waits_for_the_copy(tmp_path: Path) -> None:
    model, optimizer = make("plain", "AdamW")
    rankless.save_checkpoint(tmp_path, "old", model, optimizer)
    step(model, optimizer)
    before = expected(model, optimizer)
    with slow():
        rankless.save_checkpoint(tmp_path, "s", model, optimizer, async_save=True, staging="overlapped")
        rankless.load_checkpoint(tmp_path, "old", model, optimizer)
    rankless.finalize()
    checkpoint = rankless.open(tmp_path / "s")
    assert all(torch.equal(checkpoint[name], tensor) for name, tensor in before.items())


def load_whole_model(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    rankless.load_model(model, folder / "old/model")


def load_other_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    rankless.load_optimizer(optimizer, folder / "optimizer", model=model)


def load_by_other_settings(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    rankless.load_checkpoint(folder, "old", model, optimizer, timeout=60.0)


def load_by_another_checkpointer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    rankless.RunDirectory(folder).load("old", model, optimizer)


@pytest.mark.parametrize(
    "load", [load_whole_model, load_other_optimizer, load_by_other_settings, load_by_another_checkpointer]
)
@pytest.mark.parametrize("saved_by", ["function", "checkpointer"])
def test_every_load_of_the_process_waits_for_the_copy(tmp_path: Path, load: Any, saved_by: str) -> None:
    model, optimizer = make("plain", "AdamW")
    step(model, optimizer)
    rankless.save_checkpoint(tmp_path, "old", model, optimizer)
    rankless.save_optimizer(optimizer, tmp_path / "optimizer", shard=True, model=model)
    step(model, optimizer)
    before = expected(model, optimizer)
    save = rankless.RunDirectory(tmp_path / "new").save
    if saved_by == "function":
        save = lambda *arguments, **options: rankless.save_checkpoint(tmp_path / "new", *arguments, **options)  # noqa: E731
    with slow():
        save("s", model, optimizer, async_save=True, staging="overlapped")
        load(model, optimizer, tmp_path)
    rankless.finalize()
    checkpoint = rankless.open(tmp_path / "new" / "s")
    assert all(torch.equal(checkpoint[name], tensor) for name, tensor in before.items())


def test_a_step_waits_for_the_copies_of_all_saves_of_the_process(tmp_path: Path) -> None:
    models = [make("plain", "AdamW") for _ in range(3)]
    for model, optimizer in models:
        step(model, optimizer)
    before = [expected(*each) for each in models]
    with slow():
        for number, (model, optimizer) in enumerate(models):
            run = rankless.RunDirectory(tmp_path / str(number))
            run.save("s", model, optimizer, async_save=True, staging="overlapped")
        for model, optimizer in models:
            step(model, optimizer)
    rankless.finalize()
    for number, tensors in enumerate(before):
        checkpoint = rankless.open(tmp_path / str(number))
        assert all(torch.equal(checkpoint[name], tensor) for name, tensor in tensors.items())


def test_the_hook_goes_with_the_save(tmp_path: Path) -> None:
    known = dict(_global_optimizer_pre_hooks)
    model, optimizer = make("plain", "AdamW")
    rankless.save_checkpoint(tmp_path, "a", model, optimizer, async_save=True)
    assert dict(_global_optimizer_pre_hooks) == known
    rankless.save_checkpoint(tmp_path, "b", model, optimizer, async_save=True, staging="overlapped")
    assert len(_global_optimizer_pre_hooks) == len(known) + 1
    rankless.finalize()
    assert dict(_global_optimizer_pre_hooks) == known


def test_a_step_goes_on_where_the_copy_failed(tmp_path: Path) -> None:
    model, optimizer = make("plain", "AdamW")
    with mock.patch.object(staging, "_copy_chunk", side_effect=MemoryError("no room")):
        # The buffers are copied at the call, which fails; what is left for later is let go of.
        with pytest.raises(MemoryError):
            rankless.save_checkpoint(tmp_path, "s", model, optimizer, async_save=True, staging="overlapped")
        step(model, optimizer)
    with mock.patch.object(staging.StagedTensors, "copy_deferred", side_effect=MemoryError("no room")):
        handle = rankless.save_checkpoint(tmp_path, "s", model, optimizer, async_save=True, staging="overlapped")
        step(model, optimizer)
        with pytest.raises(MemoryError):
            handle.wait()
    with pytest.raises(MemoryError):
        rankless.finalize()
    assert not list_names(tmp_path)


def test_what_is_no_way_of_staging_is_refused(tmp_path: Path) -> None:
    for options in ({"staging": "later"}, {"staging": ""}, {"staging_check": "some"}):
        for async_save in (True, False):
            with pytest.raises(InvalidArgumentError, match=f"{next(iter(options))} must be one of"):
                rankless.save_checkpoint(tmp_path, "s", {"w": torch.ones(1)}, async_save=async_save, **options)
    with pytest.raises(InvalidArgumentError, match="staging must be one of eager, overlapped; got 'foo'"):
        rankless.RunDirectory(tmp_path, staging="foo")
    assert not list_names(tmp_path)


def different_ways(path: str) -> str:
    import torch.distributed as dist

    how = {} if dist.get_rank() else {"async_save": True, "staging": "overlapped"}
    with pytest.raises(RankMismatchError) as raised:
        rankless.save_checkpoint(path, "s", {"w": torch.ones(1)}, **how)
    return str(raised.value)


def test_ranks_must_save_in_the_same_way(ranks: Ranks, tmp_path: Path) -> None:
    (message,) = set(ranks(2, different_ways, str(tmp_path)))
    assert "async_save and staging" in message
