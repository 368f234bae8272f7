"""Cases that a review found, each of which went wrong once."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.engine.checks import Checks
from holdfast.engine.commit import Draft
from holdfast.errors import (
    DamagedError,
    InvalidArgumentError,
    MismatchError,
    RankFailedError,
    RankTimeoutError,
    StateError,
    StorageError,
)
from holdfast.formats.native import NativeReader
from holdfast.layout.blocks import Fragment
from tests.pool import Ranks

MODEL = {"w": torch.arange(10.0)}


def save_and_swap(path: str) -> torch.Tensor:
    """Save, become the other rank of a new group, save again; what the second checkpoint holds."""
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    for number, own in enumerate((rank, 1 - rank)):
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.PrefixStore(f"g{number}", store), rank=own, world_size=2)
        model = nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.arange(16.0).view(4, 4))
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
        holdfast.save_checkpoint(path, f"s{number}", model)
    return holdfast.open(f"{path}/s1")["model/weight"]


def test_a_process_that_became_another_rank_plans_anew(ranks: Ranks, tmp_path: Path) -> None:
    for saved in ranks(2, save_and_swap, str(tmp_path)):
        assert torch.equal(saved, torch.arange(16.0).view(4, 4))


class Scaled(nn.Linear):
    """A layer with extra state that is a tensor."""

    amax = torch.zeros(3)

    def get_extra_state(self) -> torch.Tensor:
        return self.amax

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.amax = state


class Outer(nn.Module):
    def __init__(self, *, ddp: bool) -> None:
        super().__init__()
        self.sub = DistributedDataParallel(nn.Sequential(Scaled(2, 2))) if ddp else nn.Sequential(Scaled(2, 2))


def layer(model: Outer) -> Scaled:
    return next(module for module in model.modules() if isinstance(module, Scaled))


def extra_state_under_ddp(path: str) -> torch.Tensor:
    model = Outer(ddp=True)
    holdfast.load_checkpoint(path, model=model)
    return layer(model).amax


def test_extra_state_that_is_a_tensor_comes_back_also_inside_a_wrapped_part(ranks: Ranks, tmp_path: Path) -> None:
    model = Outer(ddp=False)
    layer(model).amax = torch.tensor([1.0, 2.0, 3.0])
    holdfast.save_checkpoint(tmp_path, "s", model)
    assert ranks(2, extra_state_under_ddp, str(tmp_path))[1].tolist() == [1.0, 2.0, 3.0]


def test_a_tensor_that_a_hook_makes_up_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_state_dict_post_hook(lambda _, state, *__: state.update({"made_up": torch.ones(1)}))
    with pytest.raises(StateError, match="made_up"):
        holdfast.save_checkpoint(tmp_path, "s", model)


def test_optimizer_state_of_no_parameter_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["global_step"] = 7
    with pytest.raises(StateError, match="global_step"):
        holdfast.save_checkpoint(tmp_path, "s", model, optimizer)


def test_ranks_that_read_one_range_differently_are_damage(tmp_path: Path) -> None:
    holdfast.save_checkpoint(tmp_path, "s", MODEL)
    reader = NativeReader(tmp_path / "s")
    checks = Checks(reader, [("model", "w")])
    with pytest.raises(DamagedError, match="'w'"):
        checks.check_shared({0: [Fragment(0, 20, 1), Fragment(0, 20, 2), Fragment(20, 40, 3)]})


def fail_alone_first(path: str) -> str:
    size = "5 bogus" if dist.get_rank() == 1 else "5GB"
    with pytest.raises(InvalidArgumentError, match="rank 1 of 2"):
        holdfast.save_checkpoint(path, "s", MODEL, max_shard_size=size)
    return holdfast.save_checkpoint(path, "s", MODEL, timeout=5).wait().tag


def test_an_argument_wrong_on_one_rank_does_not_part_the_ranks(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, fail_alone_first, str(tmp_path)) == ["s", "s"]


def slow_work(path: str) -> str:
    patch = pytest.MonkeyPatch()
    patch.setattr("holdfast.moving.write_pieces", _slow_write)
    try:
        return holdfast.save_checkpoint(path, "s", MODEL, timeout=1).wait().tag
    finally:
        patch.undo()


def _slow_write(*arguments: Any) -> Any:
    from holdfast.engine.write import write_pieces

    time.sleep(2 + 0.2 * dist.get_rank())
    return write_pieces(*arguments)


def slow_commit(path: str) -> str:
    patch = pytest.MonkeyPatch()
    publish = Draft.publish
    patch.setattr(Draft, "publish", lambda *arguments: (time.sleep(1.5), publish(*arguments))[1])
    try:
        return holdfast.save_checkpoint(path, "s", MODEL, timeout=2).wait().tag
    finally:
        patch.undo()


@pytest.mark.parametrize("call", [slow_work, slow_commit])
def test_the_timeout_is_for_waiting_not_for_work(ranks: Ranks, tmp_path: Path, call: Any) -> None:
    assert ranks(2, call, str(tmp_path)) == ["s", "s"]


def interrupted(path: str) -> float:
    started = time.monotonic()
    patch = pytest.MonkeyPatch()
    if dist.get_rank() == 0:
        patch.setattr("holdfast.agreement.capture", _interrupt)
    try:
        with pytest.raises(KeyboardInterrupt if dist.get_rank() == 0 else RankFailedError):
            holdfast.save_checkpoint(path, "s", MODEL, timeout=30)
    finally:
        patch.undo()
    return time.monotonic() - started


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_on_rank_0_does_not_leave_the_others_waiting(ranks: Ranks, tmp_path: Path) -> None:
    assert max(ranks(2, interrupted, str(tmp_path))) < 15


def odd_message(path: str) -> None:
    patch = pytest.MonkeyPatch()
    if dist.get_rank() == 1:
        patch.setattr("holdfast.agreement.capture", _fail_oddly)
    try:
        holdfast.save_checkpoint(path, "s", MODEL, timeout=30)
    finally:
        patch.undo()


def _fail_oddly(*_: Any) -> None:
    raise OSError("no such file: caf\udce9")


def test_an_error_with_a_name_of_broken_characters_reaches_all(ranks: Ranks, tmp_path: Path) -> None:
    errors = ranks.outcomes(2, odd_message, str(tmp_path))
    assert {type(error) for error in errors} == {RankFailedError}
    assert all("rank 1 of 2" in str(error) and r"caf\udce9" in str(error) for error in errors)


def subgroup(path: str) -> str:
    group = dist.new_group([0, 1])
    try:
        return holdfast.save_checkpoint(path, "s", MODEL, process_group=group, timeout=20).wait().tag
    except InvalidArgumentError as error:
        return str(error)


def test_only_members_of_a_group_save(ranks: Ranks, tmp_path: Path) -> None:
    first, second, third = ranks(3, subgroup, str(tmp_path))
    assert (first, second) == ("s", "s")
    assert "not in the process group" in third


def test_a_layer_of_another_size_is_blamed_not_its_optimizer_state(tmp_path: Path) -> None:
    def make(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(3, width))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    holdfast.save_checkpoint(tmp_path, "s", *make(4))
    model, optimizer = make(5)
    with pytest.raises(MismatchError, match=r"(?s)0\.weight: shape \[4, 3\].*0\.bias: shape \[4\]"):
        holdfast.load_checkpoint(tmp_path, model=model, optimizer=optimizer)


def test_another_scheduler_is_found_before_anything_is_changed(tmp_path: Path) -> None:
    schedules = torch.optim.lr_scheduler

    def make(links: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if links == 1:
            return model, optimizer, schedules.StepLR(optimizer, 2)
        chain = [schedules.ConstantLR(optimizer) for _ in range(links)]
        return model, optimizer, schedules.SequentialLR(optimizer, chain, milestones=list(range(1, links)))

    model, optimizer, scheduler = make(3)
    holdfast.save_checkpoint(tmp_path, "s", model, optimizer, scheduler)
    misfits = [(2, "a chain of 3 in the checkpoint, of 2 here"), (1, "of SequentialLR, this one is StepLR")]
    for links, words in misfits:
        model, optimizer, scheduler = make(links)
        before = model.weight.clone()
        with pytest.raises(MismatchError, match=words):
            holdfast.load_checkpoint(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler)
        assert torch.equal(model.weight, before)


def test_a_default_device_does_not_matter(tmp_path: Path) -> None:
    holdfast.save_checkpoint(tmp_path, "s", MODEL, user_content={"t": torch.ones(2)})
    torch.set_default_device("meta")
    try:
        model = {"w": torch.zeros(10, device="cpu")}
        content = holdfast.load_checkpoint(tmp_path, model=model)
        found = holdfast.open(tmp_path)["model/w"]
    finally:
        torch.set_default_device(None)
    assert content["t"].tolist() == [1.0, 1.0]
    assert torch.equal(found, MODEL["w"])


def test_state_loaded_in_inference_mode_can_be_trained(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    holdfast.save_checkpoint(tmp_path, "s", model, optimizer)
    model, optimizer = make()
    with torch.inference_mode():
        holdfast.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_a_model_with_a_config_of_its_own_is_saved(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.config = {"lock": threading.Lock()}  # type: ignore[assignment]
    holdfast.save_checkpoint(tmp_path, "s", model)
    assert not (tmp_path / "s/model/config.json").exists()


def test_a_draft_that_could_not_be_opened_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise StorageError(28, "no space")

    monkeypatch.setattr("holdfast.engine.commit.local.allocate", full)
    with pytest.raises(StorageError):
        holdfast.save_checkpoint(tmp_path, "s", MODEL)
    assert not list(tmp_path.iterdir())


def test_another_generator_of_numpy_is_kept(tmp_path: Path) -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        model = nn.Linear(1, 1)
        holdfast.save_checkpoint(tmp_path, "s", model)
        expected = np.random.random(3).tolist()  # noqa: NPY002
        holdfast.load_checkpoint(tmp_path, model=model, rng=True)
        assert np.random.random(3).tolist() == expected  # noqa: NPY002
    finally:
        np.random.set_bit_generator(before)


def stopped(path: str) -> float:
    """Ranks 0 and 2 wait for rank 1, which never comes."""
    started = time.monotonic()
    if dist.get_rank() != 1:
        with pytest.raises(RankTimeoutError, match="rank 1 did not come"):
            holdfast.save_checkpoint(path, "s", MODEL, timeout=1)
    else:
        time.sleep(3.5)
    return time.monotonic() - started


def test_every_rank_names_the_one_that_is_missing_in_time(ranks: Ranks, tmp_path: Path) -> None:
    first, _, third = ranks(3, stopped, str(tmp_path))
    assert max(first, third) < 1 + 2
