"""Tests single components: a model or an optimizer in a file or directory, from any layout into any other.

The oracles are torch and safetensors, which open the files by themselves, and a state that is a function of names.
"""

import copy
import errno
import gc
import json
import os
import time
from contextlib import closing
from itertools import count, product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import rankless
from rankless.colossalai import Booster
from rankless.components import pending_files
from rankless.components.pending_files import PendingFiles
from rankless.errors import (
    CorruptCheckpointError,
    InvalidArgumentError,
    MismatchError,
    NoCheckpointError,
    OptimizerMismatchError,
    RankMismatchError,
    ReplicaMismatchError,
    StorageError,
    TagExistsError,
)
from rankless.formats.detect import open_reader
from rankless.ondisk.hidden_names import HiddenName, parse_hidden_name
from rankless.storage import atomic_rename
from tests.helpers import layouts
from tests.helpers.pending_locks import lock_pending
from tests.helpers.pool import Ranks
from tests.helpers.training import start_run, train_run

WRITERS = [("plain", 1), ("fsdp", 3), ("tp", 2), ("fsdp_tp", 4), ("pp_ddp", 2)]
READERS = [("plain", 1), ("fsdp", 2), ("tp", 4)]


def save(layout: str, folder: str, prefix: str | None = None) -> None:
    run = layouts.fill_run(layouts.LAYOUTS[layout][0]())
    for name in ("m.safetensors", "m.pt"):
        rankless.save_model(run.model, f"{folder}/{name}", prefix=prefix)
    rankless.save_model(run.model, f"{folder}/sharded", shard=True, max_shard_size=1048, prefix=prefix)
    rankless.save_model(
        run.model, f"{folder}/bins", shard=True, max_shard_size=1048, use_safetensors=False, prefix=prefix
    )
    rankless.save_optimizer(run.optimizer, f"{folder}/o.safetensors", model=run.model, prefix=prefix)
    rankless.save_optimizer(
        run.optimizer, f"{folder}/sharded", shard=True, max_shard_size=1048, model=run.model, prefix=prefix
    )


def names(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: layouts.expected_tensor(f"model/{name}", tensor.shape, tensor.dtype)
        for name, tensor in model.state_dict().items()
    }


def equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in actual)


@pytest.mark.parametrize("writer", WRITERS, ids=str)
def test_files_hold_the_whole_model_whoever_wrote_them(ranks: Ranks, tmp_path: Path, writer: tuple[str, int]) -> None:
    ranks(writer[1], save, writer[0], str(tmp_path))
    expected = names(layouts.Net())
    assert equal(load_file(tmp_path / "m.safetensors"), expected)
    assert equal(torch.load(tmp_path / "m.pt", weights_only=True), expected)
    for folder, index, read in (
        ("sharded", "model.safetensors.index.json", load_file),
        ("bins", "pytorch_model.bin.index.json", lambda path: torch.load(path, weights_only=True)),
    ):
        table = json.loads((tmp_path / folder / index).read_text())["weight_map"]
        assert len(set(table.values())) > 2
        actual = {name: read(tmp_path / folder / file)[name] for name, file in table.items()}
        assert equal(actual, expected)
    if writer[0] != "plain":
        save("plain", str(tmp_path / "alone"))
        for file in (tmp_path / "alone").rglob("*.*"):
            if not file.name.startswith("o") or writer[0] != "pp_ddp":  # stages do not know the order of all
                assert file.read_bytes() == (tmp_path / file.relative_to(tmp_path / "alone")).read_bytes(), file


def load(layout: str, folder: str, kind: str, prefix: str | None = None) -> list[str]:
    run = layouts.blank_run(layouts.LAYOUTS[layout][0]())
    model, optimizer = ("m.safetensors", "o.safetensors") if kind == "file" else ("sharded", "sharded")
    model = {"torch file": "m.pt", "bins": "bins"}.get(kind, model)
    restored = rankless.load_model(run.model, f"{folder}/{model}", prefix=prefix)
    assert restored.verified == (kind in {"file", "folder"})
    assert restored.exact == ("model",)
    restored = rankless.load_optimizer(run.optimizer, f"{folder}/{optimizer}", prefix=prefix, model=run.model)
    assert restored.matched_by == {"optimizer": "model"}
    expected = layouts.fill_run(layouts.LAYOUTS[layout][0]())
    theirs = dict(layouts.named_tensors(expected))
    return [
        name
        for name, mine in layouts.named_tensors(run)
        if not torch.equal(layouts.local_tensor(mine), layouts.local_tensor(theirs[name]))
    ]


@pytest.mark.parametrize("reader", READERS, ids=str)
@pytest.mark.parametrize("kind", ["file", "folder", "torch file", "bins"])
def test_any_layout_loads_them(ranks: Ranks, tmp_path: Path, reader: tuple[str, int], kind: str) -> None:
    ranks(3, save, "fsdp", str(tmp_path), "net.")
    assert ranks(reader[1], load, reader[0], str(tmp_path), kind, "net.") == [[]] * reader[1]
    assert all(name.startswith("net.") for name in load_file(tmp_path / "m.safetensors"))


def test_a_torch_file_of_an_optimizer_is_what_torch_loads(tmp_path: Path) -> None:
    run = train_run("plain")
    rankless.save_optimizer(run.optimizer, tmp_path / "o.pt", model=run.model)
    other = start_run("plain")
    other.optimizer.load_state_dict(torch.load(tmp_path / "o.pt", weights_only=True))
    for mine, theirs in zip(run.optimizer.state.values(), other.optimizer.state.values(), strict=True):
        assert equal(mine, theirs)
    again = start_run("plain")
    rankless.load_optimizer(again.optimizer, tmp_path / "o.pt", model=again.model)
    for mine, theirs in zip(run.optimizer.state.values(), again.optimizer.state.values(), strict=True):
        assert equal(mine, theirs)


def test_an_optimizer_without_a_model_goes_by_names_that_torch_keeps_or_by_places(tmp_path: Path) -> None:
    def make(*, named: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
        optimizer = torch.optim.AdamW(model.named_parameters() if named else model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = make(named=False)
    rankless.save_optimizer(optimizer, tmp_path / "places.safetensors")
    rankless.save_optimizer(optimizer, tmp_path / "model.safetensors", model=model)
    rankless.save_optimizer(make(named=True)[1], tmp_path / "names.safetensors")
    with safe_open(tmp_path / "names.safetensors", "pt") as file:
        assert "0.weight/exp_avg" in file.keys()  # noqa: SIM118 - it is no dict
    for file in ("places", "model", "names"):
        for named, given, by in ((False, False, "places"), (True, False, "names"), (False, True, "model")):
            other, fresh = make(named=named)
            fresh.state.clear()
            restored = rankless.load_optimizer(fresh, tmp_path / f"{file}.safetensors", model=other if given else None)
            assert restored.matched_by["optimizer"] == ("places" if file == "places" else by)
            for mine, theirs in zip(optimizer.state.values(), fresh.state.values(), strict=True):
                assert equal(mine, theirs)


def save_unnamed(path: str) -> None:
    run = layouts.fill_run(layouts.LAYOUTS["pp_ddp"][0]())
    rankless.save_optimizer(run.optimizer, path)


def test_ranks_that_hold_other_parameters_in_one_place_are_asked_for_the_model(ranks: Ranks, tmp_path: Path) -> None:
    for error in ranks.outcomes(2, save_unnamed, str(tmp_path / "o.safetensors")):
        assert isinstance(error, RankMismatchError)
        assert "model=" in str(error)
    assert not list(tmp_path.iterdir())


def test_all_that_does_not_match_is_one_error_and_nothing_is_changed(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    rankless.save_model(model, tmp_path / "m", shard=True)
    other = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 2), "d": nn.Linear(2, 2)})
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(MismatchError) as caught:
        rankless.load_model(other, tmp_path / "m")
    for said in ("a.weight: shape [2, 2] in the checkpoint, [3, 2] here", "missing in the checkpoint: d.weight"):
        assert said in str(caught.value)
    assert "only in the checkpoint: c.bias" in str(caught.value)
    assert equal(other.state_dict(), before)
    del other["a"]
    restored = rankless.load_model(other, tmp_path / "m", strict=False)
    assert set(restored.missing) == {"d.weight", "d.bias"}
    assert torch.equal(other["b"].weight, model["b"].weight)


def test_floating_dtypes_are_cast_as_load_state_dict_does(tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    rankless.save_model(model, tmp_path / "m.safetensors")
    other = nn.Linear(3, 4).to(torch.bfloat16)
    assert rankless.load_model(other, tmp_path / "m.safetensors").reconstructed == ("model",)
    assert torch.equal(other.weight, model.weight.to(torch.bfloat16))


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_another_optimizer_is_told_apart(tmp_path: Path, suffix: str) -> None:
    model, path = nn.Linear(3, 2), tmp_path / f"o{suffix}"
    rankless.save_optimizer(adam(model), path, model=model)
    with pytest.raises(OptimizerMismatchError, match="the state of AdamW, the optimizer is SGD"):
        rankless.load_optimizer(torch.optim.SGD(model.parameters()), path, model=model)
    two = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias]}])
    with pytest.raises(OptimizerMismatchError, match="group"):
        rankless.load_optimizer(two, path, model=model)
    with pytest.raises(OptimizerMismatchError, match="'bias', which this optimizer does not train"):
        rankless.load_optimizer(torch.optim.AdamW([model.weight]), path, model=model)
    with pytest.raises(OptimizerMismatchError, match="2 parameters, this one trains 1"):
        rankless.load_optimizer(torch.optim.AdamW([model.weight]), path)


def test_settings_that_a_file_lacks_stay_as_they_are(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    state = adam(model, lr=0.5).state_dict()
    del state["param_groups"][0]["amsgrad"]
    torch.save(state, tmp_path / "o.bin")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    rankless.load_optimizer(optimizer, tmp_path / "o.bin")
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[0]["amsgrad"] is False
    optimizer.step()


def test_a_path_of_the_wrong_kind_is_said_so(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgumentError, match="is a folder, but shard=False writes one file"):
        rankless.save_model(model, tmp_path / "folder")
    with pytest.raises(InvalidArgumentError, match="is a file, but this save writes a folder"):
        rankless.save_model(model, tmp_path / "file", shard=True)
    rankless.save_model(model, tmp_path / "m.safetensors")
    rankless.save_optimizer(adam(model), tmp_path / "o.safetensors")
    with pytest.raises(MismatchError, match="contains model, but no optimizer"):
        rankless.load_optimizer(adam(model), tmp_path / "m.safetensors")
    with pytest.raises(MismatchError, match="contains optimizer, but no model"):
        rankless.load_model(model, tmp_path / "o.safetensors")
    with pytest.raises(NoCheckpointError):
        rankless.load_model(model, tmp_path / "nothing")
    with pytest.raises(InvalidArgumentError, match="a size must be a positive number of bytes"):
        rankless.save_model(model, tmp_path / "s", shard=True, max_shard_size=0)


def test_saving_again_replaces_the_parts_own_files_and_leaves_the_rest(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    rankless.save_model(model, tmp_path / "m", shard=True, max_shard_size=5242)
    rankless.save_optimizer(adam(nn.Linear(3, 2)), tmp_path / "m", shard=True)
    (tmp_path / "m/notes").mkdir()
    (tmp_path / "m/notes/text").write_text("mine")
    assert len(list((tmp_path / "m").glob("model*"))) > 4
    rankless.save_model(nn.Linear(2, 2), tmp_path / "m", shard=True, use_safetensors=False)
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == [
        "notes",
        "optimizer.safetensors",
        "pytorch_model.bin",
    ]
    assert (tmp_path / "m/notes/text").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    rankless.load_model(nn.Linear(2, 2), tmp_path / "m")
    rankless.load_optimizer(adam(nn.Linear(3, 2)), tmp_path / "m")


def test_a_folder_of_the_users_where_a_file_of_the_component_goes_stays(tmp_path: Path) -> None:
    (tmp_path / "m/model.safetensors").mkdir(parents=True)
    (tmp_path / "m/model.safetensors/thesis.txt").write_text("years of work")
    with pytest.raises(TagExistsError, match=r"m/model\.safetensors is in the way"):
        rankless.save_model(nn.Linear(2, 2), tmp_path / "m", shard=True)
    assert (tmp_path / "m/model.safetensors/thesis.txt").read_text() == "years of work"
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_of_the_users_that_is_replaced_during_a_save_is_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    """Also if it has the size and the time of the old one: both were written within one tick of the clock."""
    if not has_links:
        monkeypatch.setattr(Path, "hardlink_to", mock.Mock(side_effect=OSError(errno.EPERM, "no links")))
    rankless.save_model(nn.Linear(2, 2), tmp_path / "m", shard=True)
    notes, exchange = tmp_path / "m/notes.txt", atomic_rename.exchange_directories
    draft = tmp_path / "draft"
    notes.write_text("old")
    draft.write_text("new")
    os.utime(draft, ns=(0, notes.stat().st_mtime_ns))

    def edit_and_exchange(pending: Path, final: Path, displaced: Path) -> None:
        if draft.exists():
            draft.rename(notes)
        exchange(pending, final, displaced)

    monkeypatch.setattr(atomic_rename, "exchange_directories", edit_and_exchange)
    rankless.save_model(nn.Linear(2, 2), tmp_path / "m", shard=True)
    assert notes.read_text() == "new"


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise StorageError(28, "no space is left")

    rankless.save_model(nn.Linear(2, 2), tmp_path / "m.pt")
    rankless.save_model(nn.Linear(2, 2), tmp_path / "m", shard=True)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    scheduler = torch.optim.lr_scheduler.StepLR(adam(nn.Linear(3, 2)), 3)
    for fails in (
        "posix.fsync_directory",
        "posix.sync_tree",
        "atomic_rename.replace_file",
        "atomic_rename.exchange_directories",
        "posix.write_small",
    ):
        monkeypatch.setattr(f"rankless.storage.{fails}", full)
    with pytest.raises(StorageError):
        rankless.save_model(nn.Linear(2, 2), tmp_path / "m.pt")
    with pytest.raises(StorageError):
        rankless.save_model(nn.Linear(2, 2), tmp_path / "m", shard=True)
    with pytest.raises(StorageError):
        rankless.save_lr_scheduler(scheduler, tmp_path / "s")
    rankless.save_model(nn.Linear(2, 2), tmp_path / "m", shard=True, async_save=True)
    with pytest.raises(StorageError):
        rankless.finalize()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "m.pt"]


DEAD = HiddenName("m", "1" * 16, "2" * 16, "partial")


def weight(path: Path) -> float:
    model = nn.Linear(1, 1, bias=False)
    rankless.load_model(model, path)
    return float(model.weight.detach())


def save_weight(path: Path, value: float) -> None:
    rankless.save_model({"weight": torch.full((1, 1), value)}, path, shard=True)


def test_the_next_save_of_a_part_removes_all_that_dead_ones_of_it_left_and_nothing_else(tmp_path: Path) -> None:
    for tag, state in product(("m", "n"), ("partial", "replaced", "removed")):
        (tmp_path / DEAD._replace(tag=tag, state=state).name).mkdir()  # type: ignore[arg-type]
    living = tmp_path / DEAD._replace(id="3" * 16).name
    living.mkdir()
    with closing(lock_pending(living)):
        save_weight(tmp_path / "m", 1.0)
        left = {folder.name for folder in tmp_path.iterdir() if folder.is_dir()} - {"m"}
    assert {(item.tag, item.id[0]) for item in map(parse_hidden_name, left) if item} == {("n", "2"), ("m", "3")}
    assert len(left) == 4


def test_what_a_dead_save_of_a_part_has_put_aside_outlives_saves_that_fail(tmp_path: Path) -> None:
    """Also where its name cannot be given back at the time: the dead save's folder tells that it is wanted."""
    save_weight(tmp_path / "m", 1.0)
    (tmp_path / DEAD.name).mkdir()
    (tmp_path / "m").rename(tmp_path / DEAD.with_state("replaced").name)
    refused = StorageError(errno.EIO, "input/output error")
    with (
        mock.patch("rankless.run.displaced_checkpoints.rename_noreplace", side_effect=refused),
        mock.patch("rankless.run.pending_dir.atomic_rename.rename_noreplace", side_effect=refused),
        pytest.raises(StorageError),
    ):
        save_weight(tmp_path / "m", 2.0)
    assert weight(tmp_path / "m") == 1.0


def test_a_part_that_has_lost_its_name_to_a_save_that_failed_gets_it_back(tmp_path: Path) -> None:
    """Where names cannot be exchanged, and the first of two renames cannot be taken back."""
    save_weight(tmp_path / "m", 1.0)
    refused = OSError(errno.EIO, "input/output error")
    rename = Path.rename

    def rename_aside(path: Path, target: Path) -> Path:
        if target.name == "m":
            raise refused
        return rename(path, target)

    with (
        mock.patch.object(atomic_rename, "_renameat2", return_value=False),
        mock.patch.object(atomic_rename, "_rename_new", side_effect=refused),
        mock.patch.object(Path, "rename", rename_aside),
        pytest.raises(StorageError),
    ):
        save_weight(tmp_path / "m", 2.0)
    assert not (tmp_path / "m").exists()
    assert weight(tmp_path / "m") == 1.0


def test_a_link_to_a_folder_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    rankless.save_model(nn.Linear(2, 2), tmp_path / "link", shard=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real/model.safetensors").exists()


def test_a_loop_of_links_is_named(tmp_path: Path) -> None:
    (tmp_path / "m").symlink_to("m")
    with pytest.raises((InvalidArgumentError, StorageError), match=str(tmp_path / "m")):
        rankless.save_model(nn.Linear(2, 2), tmp_path / "m", shard=True)
    assert (tmp_path / "m").is_symlink()


def test_a_damaged_byte_is_found(tmp_path: Path) -> None:
    model, path = nn.Linear(64, 64), tmp_path / "m.safetensors"
    rankless.save_model(model, path)
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CorruptCheckpointError, match=r"m\.safetensors"):
        rankless.load_model(model, path)


def test_in_the_background_all_may_change_at_once_and_a_failure_is_raised(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    expected = copy.deepcopy(model.state_dict())
    handle = rankless.save_model(model, tmp_path / "m.safetensors", async_save=True)
    with torch.no_grad():
        model.weight.zero_()
    assert handle.wait() == tmp_path / "m.safetensors"
    assert equal(load_file(tmp_path / "m.safetensors"), expected)
    (tmp_path / "inside").mkdir()
    rankless.save_model(model, tmp_path / "inside/m.pt", async_save=True)
    rankless.finalize()
    assert equal(torch.load(tmp_path / "inside/m.pt"), model.state_dict())


@pytest.mark.parametrize("booster", [False, True])
def test_a_load_waits_for_the_save_that_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, booster: bool
) -> None:
    old, new = nn.Linear(2, 2), nn.Linear(2, 2)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    rankless.save_model(old, tmp_path / "link", shard=True)
    publish = PendingFiles.publish

    def slow(*arguments: Any) -> None:
        time.sleep(0.3)
        publish(*arguments)

    monkeypatch.setattr(PendingFiles, "publish", slow)
    rankless.save_model(new, tmp_path / "link", shard=True, async_save=True)
    actual = nn.Linear(2, 2)
    if booster:
        Booster().load_model(actual, tmp_path / "link")
    else:
        rankless.load_model(actual, tmp_path / "link")
    assert equal(actual.state_dict(), new.state_dict())


def test_a_part_loaded_in_inference_mode_can_be_trained(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    rankless.save_model(model, tmp_path / "m.safetensors")
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with torch.inference_mode():
        rankless.load_model(model, tmp_path / "m.safetensors")
    model(torch.ones(1, 2, requires_grad=True)).sum().backward()


def diverged(path: str) -> None:
    model = nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, torch.distributed.get_rank())
    rankless.save_model(model, path)


def test_garbage_is_collected_afterwards(tmp_path: Path) -> None:
    """As with whole states: passes over torch's heap cost more than they find."""
    model = nn.Linear(3, 2)
    seen = []

    def watched(path: Path, *rest: Any) -> Any:
        seen.append(gc.isenabled())
        return open_reader(path, *rest)

    def shown(*given: Any) -> Any:
        seen.append(gc.isenabled())
        return PendingFiles(*given)

    with (
        mock.patch("rankless.load.load_operation.open_reader", watched),
        mock.patch("rankless.components.folder_output.PendingFiles", shown),
    ):
        rankless.save_model(model, tmp_path / "m.pt")
        assert gc.isenabled()
        rankless.load_model(model, tmp_path / "m.pt")
    assert gc.isenabled()
    assert seen == [False, False]


def test_replicas_that_differ_are_an_error_of_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    for error in ranks.outcomes(2, diverged, str(tmp_path / "m.pt")):
        assert isinstance(error, ReplicaMismatchError)
        assert "'weight'" in str(error)
    assert not list(tmp_path.iterdir())


def refused(path: str) -> None:
    rankless.save_model(nn.Linear(2, 2), path)


def test_what_the_disk_refuses_is_an_error_of_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for error in ranks.outcomes(2, refused, str(tmp_path / "file/m.pt")):
        assert isinstance(error, StorageError)


def schedule(path: str) -> Any:
    run = start_run("plain")
    for _ in range(3):
        run.scheduler.step()
    rankless.save_lr_scheduler(run.scheduler, path)
    other = start_run("plain")
    rankless.load_lr_scheduler(other.scheduler, path)
    return other.scheduler.state_dict() == run.scheduler.state_dict()


@pytest.mark.parametrize("name", ["s", "s.pt"])
def test_a_scheduler_comes_back(ranks: Ranks, tmp_path: Path, name: str) -> None:
    assert ranks(2, schedule, str(tmp_path / name)) == [True, True]
    if name == "s.pt":
        run = start_run("plain")
        run.scheduler.load_state_dict(torch.load(tmp_path / name, weights_only=True))
    else:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
        with pytest.raises(MismatchError, match="this one is StepLR"):
            rankless.load_lr_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 3), tmp_path / name)
        raw = bytearray((tmp_path / name).read_bytes())
        raw[raw.index(b"last_epoch") + 12] ^= 1
        (tmp_path / name).write_bytes(raw)
        with pytest.raises(CorruptCheckpointError):
            rankless.load_lr_scheduler(start_run("plain").scheduler, tmp_path / name)


@pytest.mark.parametrize("name", ["scheduler", "scheduler.pt"])
def test_a_scheduler_is_saved_again(tmp_path: Path, name: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
        rankless.save_lr_scheduler(scheduler, tmp_path / name)
    loaded = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    rankless.load_lr_scheduler(loaded, tmp_path / name)
    assert loaded.last_epoch == 3


def test_links_that_lead_nowhere_and_pipes_of_a_user_stay_in_a_folder_that_is_saved_anew(tmp_path: Path) -> None:
    rankless.save_model(nn.Linear(3, 2), tmp_path / "m", shard=True)
    (tmp_path / "m/link").symlink_to(tmp_path / "missing")
    os.mkfifo(tmp_path / "m/pipe")
    rankless.save_model(nn.Linear(3, 2), tmp_path / "m", shard=True)
    assert {path.name for path in (tmp_path / "m").iterdir()} == {"model.safetensors", "link", "pipe"}


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ""])
def test_names_that_are_no_utf_8_are_saved_and_loaded(tmp_path: Path, suffix: str) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    path = folder / (os.fsdecode(b"\xff") + suffix)
    saved, loaded = nn.Linear(3, 2), nn.Linear(3, 2)
    rankless.save_model(saved, path, shard=not suffix)
    rankless.load_model(loaded, path)
    assert torch.equal(saved.weight, loaded.weight)
    rankless.save_checkpoint(folder, "a", saved)
    rankless.load_checkpoint(folder, model=nn.Linear(3, 2))


def test_a_folder_that_another_job_replaces_while_it_is_looked_at_is_looked_at_again(tmp_path: Path) -> None:
    rankless.save_model(nn.Linear(3, 2), tmp_path / "m", shard=True)
    original, calls = pending_files.files_named_by, count()

    def replaced_once(folder: Path, names: Any) -> set[str]:
        if next(calls) == 0:
            raise StorageError(errno.ENOENT, f"could not inspect {folder / 'model.safetensors'}")
        return original(folder, names)

    model = nn.Linear(3, 2)
    with mock.patch.object(pending_files, "files_named_by", replaced_once):
        rankless.save_model(model, tmp_path / "m", shard=True)
    assert torch.equal(load_file(tmp_path / "m/model.safetensors")["weight"], model.weight)
