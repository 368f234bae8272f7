"""Several ranks that a launcher started, but that have no process group: each believes that it is alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

import rankless
from rankless import nxd
from rankless.colossalai import Booster
from rankless.dcp import FileSystemWriter
from rankless.errors import InvalidArgumentError, TagExistsError
from rankless.lightning.atomic_output import atomic_output
from rankless.run.ownership import Replaceable
from rankless.run.unpublished_output import hold_output

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


def save_as_nxd(path: Path, model: torch.nn.Module) -> None:
    nxd.save_checkpoint(path, "a", model)


def save_with_booster(path: Path, model: torch.nn.Module) -> None:
    Booster().save_model(model, path, shard=True)


def save_with_dcp(path: Path, model: torch.nn.Module, **writer: Any) -> None:
    dcp.save(model.state_dict(), storage_writer=FileSystemWriter(path, **writer), no_dist=True)


def save_with_lightning(path: Path, model: torch.nn.Module) -> None:
    with atomic_output(path, Replaceable(("lightning",), "a checkpoint of Lightning")) as output:
        torch.save(model.state_dict(), output)


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


@pytest.mark.parametrize(
    "save", [save_as_nxd, save_with_booster, save_with_dcp, save_with_lightning], ids=lambda save: save.__name__
)
def test_saves_by_the_calls_of_other_systems_are_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Save
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises((InvalidArgumentError, CheckpointException), match="one of 4 ranks"):
        save(tmp_path / "saved", torch.nn.Linear(2, 2))
    assert not any(tmp_path.iterdir())
    monkeypatch.delenv("WORLD_SIZE")
    save(tmp_path / "saved", torch.nn.Linear(2, 2))
    assert (tmp_path / "saved").exists()


def test_a_dcp_save_that_replaces_nothing_is_allowed_on_one_of_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    save_with_dcp(tmp_path / "saved", torch.nn.Linear(2, 2), overwrite=False)
    with pytest.raises(CheckpointException, match="there is a checkpoint at"):
        save_with_dcp(tmp_path / "saved", torch.nn.Linear(2, 2), overwrite=False)


def convert_it(source: Path, output: Path, **listener: Any) -> None:
    rankless.convert(source, output, to="safetensors", **listener)


def export_it(source: Path, output: Path, **listener: Any) -> None:
    config = source / "config.json"
    config.write_text("{}")
    rankless.export_model(source, output, config=config, **listener)


@pytest.mark.parametrize("write", [convert_it, export_it], ids=lambda write: write.__name__)
def test_one_of_the_ranks_converts_and_another_that_wants_the_same_output_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Save
) -> None:
    save_run(tmp_path / "run", torch.nn.Linear(2, 2))
    monkeypatch.setenv("WORLD_SIZE", "4")
    refused: list[str] = []

    def write_again(_: Any) -> None:
        with pytest.raises(TagExistsError) as error:
            write(tmp_path / "run", tmp_path / "out")
        refused.append(str(error.value))

    write(tmp_path / "run", tmp_path / "out", on_event=write_again)
    assert all(re.search(r"is writing .*out now: .* one of 4 ranks .*Let one rank", text) for text in refused)
    assert refused
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}


def test_a_path_of_a_merge_is_held_too(tmp_path: Path) -> None:
    with (
        hold_output(tmp_path / "out"),
        pytest.raises(TagExistsError, match=r"is writing .*out now: choose another path, or wait"),
    ):
        rankless.merge_adapters(tmp_path / "run", tmp_path / "out")
    assert not any(tmp_path.iterdir())


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
