"""Several ranks that a launcher started, but that have no process group: each believes that it is alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rankless
from rankless.errors import InvalidArgumentError

Save = Callable[..., Any]


def save_run(path: Path, model: torch.nn.Module, **group: Any) -> None:
    rankless.save_checkpoint(path, "a", model, **group)


def save_asynchronously(path: Path, model: torch.nn.Module, **group: Any) -> None:
    rankless.save_checkpoint(path, "a", model, async_save=True, **group).wait()


def save_with_checkpointer(path: Path, model: torch.nn.Module, **group: Any) -> None:
    with rankless.Checkpointer(path, model=model, save_every=1, signals=(), **group) as checkpointer:
        checkpointer.step(1)


def save_file(path: Path, model: torch.nn.Module, **group: Any) -> None:
    rankless.save_model(model, path, **group)


def save_optimizer_file(path: Path, model: torch.nn.Module, **group: Any) -> None:
    rankless.save_optimizer(torch.optim.AdamW(model.parameters()), path, model=model, **group)


def save_scheduler_file(path: Path, model: torch.nn.Module, **group: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rankless.save_lr_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1), path, **group)


SAVES = [
    save_run,
    save_asynchronously,
    save_with_checkpointer,
    save_file,
    save_optimizer_file,
    save_scheduler_file,
]
each_save = pytest.mark.parametrize("save", SAVES, ids=lambda save: save.__name__)


@each_save
def test_a_save_of_one_of_several_ranks_without_a_group_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Save
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InvalidArgumentError, match=r'one of 4 ranks.*init_process_group\(\).*process_group="self"'):
        save(tmp_path / "saved", torch.nn.Linear(2, 2))
    assert not list(tmp_path.rglob("*.safetensors"))


@each_save
@pytest.mark.parametrize(("world_size", "group"), [("4", {"process_group": "self"}), ("1", {}), ("", {})])
def test_a_process_that_is_alone_or_says_so_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Save, world_size: str, group: dict[str, Any]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world_size)
    save(tmp_path / "saved", torch.nn.Linear(2, 2), **group)
    assert (tmp_path / "saved").exists()


def test_loads_go_on_without_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, loaded = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    save_run(tmp_path / "run", model)
    save_file(tmp_path / "file.safetensors", model)
    monkeypatch.setenv("WORLD_SIZE", "4")
    rankless.load_checkpoint(tmp_path / "run", model=loaded)
    assert torch.equal(loaded.weight, model.weight)
    rankless.load_model(loaded, tmp_path / "file.safetensors")
    assert torch.equal(rankless.open(tmp_path / "run")["model/weight"], model.weight)
    assert [info.tag for info in rankless.list_checkpoints(tmp_path / "run")] == ["a"]


def test_another_text_than_self_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match='process_group must be a ProcessGroup of torch, "self" or None'):
        save_run(tmp_path, torch.nn.Linear(2, 2), process_group="alone")
