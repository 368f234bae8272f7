"""What people tried, and was refused, or accepted without a use: they can go on."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader

import rankless
from rankless.errors import (
    FormatError,
    InvalidArgumentError,
    MismatchError,
    NoCheckpointError,
    OptimizerMismatchError,
    StorageError,
)
from rankless.run import lookup
from tests.helpers.fake_s3 import BUCKET, FakeS3, store_at


class Pair(nn.Module):
    """Two layers, which may share their weight."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        if tied:
            self.b.weight = self.a.weight


def train(model: nn.Module) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_a_weight_that_was_tied_when_it_was_saved_is_named(tmp_path: Path) -> None:
    model = Pair(tied=True)
    rankless.save_checkpoint(tmp_path, "a", model, train(model))
    other = Pair(tied=False)
    with pytest.raises(OptimizerMismatchError, match=r"'b\.weight' was one tensor with 'a\.weight' when it was saved"):
        rankless.restore(tmp_path, model=other, optimizer=torch.optim.AdamW(other.parameters()))


def test_the_state_dict_of_an_optimizer_next_to_its_model_is_loaded_by_number(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))
    optimizer = train(model)
    for number, parameter in enumerate(model.parameters()):
        optimizer.state[parameter]["exp_avg"].fill_(number)
    rankless.save_checkpoint(tmp_path, "a", model=model, optimizer=optimizer.state_dict())
    other = torch.optim.AdamW(model.parameters())
    restored = rankless.restore(tmp_path, model=model, optimizer=other)
    assert "optimizer" in restored.exact
    assert [other.state[p]["exp_avg"].unique().item() for p in model.parameters()] == list(range(12))


def test_a_missing_optimizer_may_be_allowed_by_name(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    rankless.save_checkpoint(tmp_path, "a", model)
    with pytest.raises(MismatchError, match=r"allow_missing=\('optimizer',\)"):
        rankless.restore(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters()))
    rankless.restore(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters()), allow_missing=("optimizer",))


def test_groups_that_differ_name_the_way_on(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    rankless.save_checkpoint(tmp_path, "a", model, torch.optim.SGD(model.parameters(), lr=0.5))
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    with pytest.raises(OptimizerMismatchError, match="pass strict=False: groups that were divided in another way"):
        rankless.restore(tmp_path, model=model, optimizer=torch.optim.SGD(groups, lr=0.25))


def test_the_names_of_a_file_of_which_no_tensor_can_be_read_are_an_error(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tensor = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
        torch.save({"w": tensor}, tmp_path / "x.pt")
    finally:
        dist.destroy_process_group()
    checkpoint = rankless.open(tmp_path / "x.pt")
    with pytest.raises(FormatError, match="DTensor"):
        checkpoint.keys()


def test_a_model_without_any_tensor_of_the_checkpoint_is_named(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "a", nn.Sequential(nn.Linear(3, 3)))
    model = nn.ModuleDict({"net": nn.Linear(3, 3)})
    with pytest.warns(
        UserWarning, match=r"NOTHING is loaded.*'net\.bias' is here, and '0\.bias' there.*rename PATTERN"
    ):
        rankless.load_checkpoint(tmp_path, model=model, strict=False)
    with pytest.raises(MismatchError, match=r"rename PATTERN=NEW"):
        rankless.load_checkpoint(tmp_path, model=model)
    rankless.load_checkpoint(tmp_path, model=model, edit=[r"rename ^0=net"])


def test_mistakes_of_a_first_day_say_what_to_do(tmp_path: Path) -> None:
    @dataclass
    class Config:
        rate: float = 0.1

    model = nn.Linear(3, 3)
    optimizer = train(model)
    rankless.save_checkpoint(tmp_path / "run", "step_1", model, optimizer, step=1)
    torch.save({"model": model.state_dict()}, tmp_path / "model.pt")
    mistakes: list[tuple[str, Callable[[], object]]] = [
        ("create AdamW, or leave out", lambda: restore(tmp_path / "run", model, torch.optim.SGD(model.parameters()))),
        ("pass another path", lambda: restore(tmp_path / "run", nn.Linear(4, 4))),
        ("dataclasses.asdict", lambda: save(tmp_path / "b", model, user_content={"config": Config()})),
        ("ResumableLoader", lambda: save(tmp_path / "b", model, dataloader=DataLoader([1, 2]))),
        ("another one uses the same run directory", lambda: save(tmp_path / "run", model)),
        ("init_from", lambda: rankless.Checkpointer(tmp_path / "model.pt", model=model, save_every=1).resume()),
        ("did you mean 'keep'", lambda: rankless.Checkpointer(tmp_path, model=model, keep_last=3)),
        ("StreamLoader", lambda: rankless.ResumableLoader(iter([1]), batch_size=1)),
        ("call resume()", lambda: rankless.Checkpointer(tmp_path / "run", model=model, save_every=1).step(2)),
    ]
    for advice, mistake in mistakes:
        with pytest.raises((rankless.errors.RanklessError, TypeError), match=re.escape(advice)):
            mistake()


def save(path: Path, model: nn.Module, **options: Any) -> None:
    rankless.save_checkpoint(path, "step_1", model, **options)


def restore(path: Path, *objects: Any) -> None:
    rankless.restore(path, None, *objects)


def save_two_steps(run: Path) -> None:
    for step in (1, 2):
        rankless.save_checkpoint(run, f"step_{step}", {"w": torch.ones(2)}, step=step)


def open_missing(path: Path) -> str:
    with pytest.raises(NoCheckpointError) as raised:
        rankless.open(path)
    return str(raised.value)


@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_a_mistyped_tag_names_the_tags_of_the_run(tmp_path: Path, place: str) -> None:
    with FakeS3().served() as url:
        run = tmp_path / "run" if place == "folder" else store_at(url).path(f"{BUCKET}/run")
        save_two_steps(run)
        assert open_missing(run / "step_3") == f"there is no {run}/step_3; in {run} there are step_1, step_2"
        assert open_missing(run.parent / "rum") == f"there is no {run.parent}/rum"


def test_a_run_that_cannot_be_listed_hides_no_missing_path(tmp_path: Path) -> None:
    save_two_steps(tmp_path)
    error = StorageError(errno.EACCES, "no access")
    with (
        mock.patch.object(lookup, "cached_checkpoints", side_effect=error),
        pytest.raises(NoCheckpointError, match=r"^there is no .*step_3$"),
    ):
        lookup.open_at(tmp_path / "step_3")


def test_the_path_of_a_checkpoint_and_its_tag_again_name_what_to_leave_out(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    rankless.save_checkpoint(tmp_path, "a", model=model)
    with pytest.raises(NoCheckpointError, match=r"a is a checkpoint itself, and has no 'a': leave out the tag"):
        rankless.load_checkpoint(tmp_path / "a", "a", model=model)


@pytest.mark.parametrize("path", ["~/runs", Path("~/runs"), "~"])
def test_a_tilde_is_not_taken_for_a_folder_of_this_name(
    path: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"does not expand '~' in ~.*: pass os\.path\.expanduser\('~"):
        rankless.save_checkpoint(path, "a", model=nn.Linear(2, 2))
    assert not list(tmp_path.iterdir())


def test_an_option_of_another_call_names_this_call(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(InvalidArgumentError, match=r"no argument 'strict': it is an option of a load, such as resume"):
        rankless.Checkpointer(tmp_path, model=model, strict=False)  # type: ignore[call-arg]
    with pytest.raises(InvalidArgumentError, match=r"no argument 'max_shard_size': it is an option of a save"):
        rankless.load_checkpoint(tmp_path, model=model, max_shard_size=1)  # type: ignore[call-arg]


def test_a_mistyped_verb_of_an_edit_is_corrected(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path / "run", "a", model=nn.Linear(2, 2))
    with pytest.raises(
        InvalidArgumentError, match=r"no edit has the verb 'resize_vocab': did you mean 'resize-vocab'\?"
    ):
        rankless.edit(tmp_path / "run", tmp_path / "out", ["resize_vocab 2"])
