"""Tests conversions between all formats: the libraries that own the formats read the same tensors and values."""

import errno
import os
import re
import subprocess
import sys
import time
import zipfile
from contextlib import closing
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM, Signals
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import rankless
from campaigns.common.fork_server import CONTEXT
from rankless.cli.main import app
from rankless.errors import (
    CheckpointReplacedError,
    CorruptCheckpointError,
    InvalidArgumentError,
    RankFailedError,
    StorageError,
    TagExistsError,
)
from rankless.run.cleanup import clean_up
from rankless.storage import atomic_rename, posix
from tests.helpers.conversions import MEASURE_CONVERSION, save_training, tensors_to_lists
from tests.helpers.file_contents import read_state_files
from tests.helpers.interruptions import change_at_call
from tests.helpers.pending_locks import lock_pending
from tests.helpers.pool import Ranks
from tests.helpers.training import assert_equal, gather_run, start_run, train_run


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_training(tmp_path)


def test_native_to_native_is_the_same_bytes(saved: Path, tmp_path: Path) -> None:
    """But for the manifest, which is of another checkpoint."""
    rankless.convert(saved, tmp_path / "other/t", to="native")
    assert read_state_files(tmp_path / "other/t") == read_state_files(saved)
    (info,) = rankless.list_checkpoints(tmp_path / "other")
    assert (info.tag, info.step) == ("t", 3)
    assert (tmp_path / "other/t/ranks.json").read_bytes() == (saved / "ranks.json").read_bytes()


def test_a_torch_file_is_what_torch_users_have(saved: Path, tmp_path: Path) -> None:
    rankless.convert(saved, tmp_path / "all.pt", to="torch")
    loaded = torch.load(tmp_path / "all.pt", weights_only=True, mmap=True)
    run = start_run("plain", seed=1)
    run.model.load_state_dict(loaded["model"])
    run.optimizer.load_state_dict(loaded["optimizer"])
    run.scheduler.load_state_dict(loaded["scheduler"])
    expected = train_run("plain")
    assert_equal(gather_run(run), gather_run(expected))
    torch.manual_seed(0)
    losses = [run.step(n) for n in (3, 4)]
    torch.manual_seed(0)
    assert losses == [expected.step(n) for n in (3, 4)]
    assert loaded["user_content"]["step"] == 3
    assert torch.equal(loaded["user_content"]["table"], torch.arange(40_000.0))
    assert torch.equal(loaded["user_content"]["nested"][0]["array"], torch.arange(5))
    assert loaded["model"]["head.weight"].data_ptr() == loaded["model"]["embed.weight"].data_ptr()


def test_a_torch_file_does_not_tell_what_it_was_called_before(saved: Path, tmp_path: Path) -> None:
    rankless.convert(saved, tmp_path / "all.pt", to="torch")
    with zipfile.ZipFile(tmp_path / "all.pt") as found:
        assert {name.partition("/")[0] for name in found.namelist()} == {"archive"}


def test_a_model_alone_is_its_state_dict(saved: Path, tmp_path: Path) -> None:
    rankless.convert(saved, tmp_path / "model.pt", to="torch", model_only=True)
    model = start_run("plain", seed=1).model
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert torch.equal(model.embed.weight, train_run("plain").model.embed.weight)


def test_a_hugging_face_folder(saved: Path, tmp_path: Path) -> None:
    rankless.convert(saved, tmp_path / "hf", to="hf", max_shard_size=300)
    names = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert names[-1] == "model.safetensors.index.json"
    assert len(names) > 2
    result: dict[str, torch.Tensor] = {}
    for name in names[:-1]:
        result |= load_file(tmp_path / "hf" / name)
    expected = train_run("plain").model.state_dict()
    assert result.keys() == expected.keys() - {"head.weight"}
    assert all(torch.equal(result[name], expected[name]) for name in result)


@pytest.mark.parametrize("way", [["torch"], ["lightning"], ["torch", "native"], ["lightning", "torch", "native"]])
def test_there_and_back_a_run_goes_on_as_before(saved: Path, tmp_path: Path, way: list[str]) -> None:
    at = saved
    for number, to in enumerate(way):
        at = rankless.convert(at, tmp_path / f"{number}.ckpt", to=to)
    run = start_run("plain", seed=1)
    expected = train_run("plain")
    scheduler = run.scheduler if "lightning" not in way else None
    rankless.load_checkpoint(at, model=run.model, optimizer=run.optimizer, scheduler=scheduler)
    assert_equal(gather_run(run), gather_run(expected))
    if scheduler is not None:
        assert scheduler.state_dict() == expected.scheduler.state_dict()


#: What a user may have saved: names that are taken, and what is no dict.
CONTENTS = [
    {"step": 3, "tensor": torch.arange(3)},
    {"user_content": {"user_content": 5}},
    {"user_content": 1, "stateful": 2},
    {"stateful": {"scaler": {"scale": 3.0}}},
    {"model": "gpt", "scheduler": "cosine"},
    [1, "two", {"three": 3.0}],
    5,
]


@pytest.mark.parametrize("content", CONTENTS, ids=str)
@pytest.mark.parametrize("to", ["torch", "dcp", "colossalai"])
def test_there_and_back_users_find_their_own_values(tmp_path: Path, to: str, content: Any) -> None:
    rankless.save_checkpoint(tmp_path / "run", "s", nn.Linear(2, 2), user_content=content)
    rankless.convert(tmp_path / "run/s", tmp_path / "there", to=to)
    rankless.convert(tmp_path / "there", tmp_path / "back", to="native")
    for name in ("there", "back"):
        restored = rankless.restore(tmp_path / name, model=nn.Linear(2, 2)).user_content
        assert tensors_to_lists(restored) == tensors_to_lists(content)


def test_there_and_back_objects_with_a_state_find_it(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    rankless.save_checkpoint(tmp_path / "run", "s", nn.Linear(2, 2), user_content={"a": 1}, stateful={"scaler": scaler})
    rankless.convert(tmp_path / "run/s", tmp_path / "all.pt", to="torch")
    assert torch.load(tmp_path / "all.pt", weights_only=True)["stateful"]["scaler"]["scale"] == 8.0
    other = torch.amp.GradScaler("cpu")
    result = rankless.restore(tmp_path / "all.pt", model=nn.Linear(2, 2), stateful={"scaler": other})
    assert other.get_scale() == 8.0
    assert result.user_content == {"a": 1}


def test_what_torch_has_saved_becomes_ours(tmp_path: Path) -> None:
    run = train_run("plain")
    state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(), "epoch": 7}
    torch.save(state, tmp_path / "theirs.pt")
    rankless.convert(tmp_path / "theirs.pt", tmp_path / "ours", to="native")
    other = start_run("plain", seed=1)
    content = rankless.load_checkpoint(tmp_path / "ours", model=other.model, optimizer=other.optimizer)
    assert content == {"epoch": 7}
    assert_equal(gather_run(other), gather_run(run))


def test_lightning_opens_what_is_made_for_it(saved: Path, tmp_path: Path) -> None:
    from lightning.pytorch import LightningModule

    class Wrapper(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = train_run("plain", steps=0).model

    rankless.convert(saved, tmp_path / "a.ckpt", to="lightning", rename=lambda name: f"net.{name}")
    actual = Wrapper.load_from_checkpoint(tmp_path / "a.ckpt", map_location="cpu")
    assert torch.equal(actual.net.embed.weight, train_run("plain").model.embed.weight)
    assert len(torch.load(tmp_path / "a.ckpt", weights_only=True)["optimizer_states"]) == 1


def test_filters_renames_and_a_dtype(saved: Path, tmp_path: Path) -> None:
    rankless.convert(
        saved,
        tmp_path / "out",
        to="native",
        include=["body.*", "norm.*"],
        exclude="*.bias",
        rename={r"^body\.(\d)": r"layers.\1"},
        dtype="bfloat16",
    )
    checkpoint = rankless.open(tmp_path / "out")
    model = train_run("plain").model.state_dict()
    names = {"model/layers.0.weight": "body.0.weight", "model/layers.2.weight": "body.2.weight"}
    names["model/norm.weight"] = "norm.weight"
    assert {name for name in checkpoint if name.startswith("model/")} == set(names)
    for name, theirs in names.items():
        assert torch.equal(checkpoint[name], model[theirs].bfloat16()), name
    assert checkpoint["optimizer/layers.0.weight/exp_avg"].dtype == torch.float32
    groups = checkpoint.values["optimizer"]["groups"]
    assert sorted(name for group in groups for name in group["params"]) == sorted(
        name.removeprefix("model/") for name in names
    )


def test_two_names_that_meet_are_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="would both be named"):
        rankless.convert(saved, tmp_path / "out", to="torch", rename=lambda _: "same")
    with pytest.raises(InvalidArgumentError, match="no tensor of"):
        rankless.convert(saved, tmp_path / "out", to="native", include="nobody", model_only=True)


def test_the_source_is_never_written_to(saved: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    for dst in (saved, saved / "inside", saved.parent):
        with pytest.raises((InvalidArgumentError, TagExistsError)):
            rankless.convert(saved, dst, to="native")
    (tmp_path / "there").mkdir()
    with pytest.raises(TagExistsError):
        rankless.convert(saved, tmp_path / "there", to="torch")
    with pytest.raises(InvalidArgumentError, match="to must be one of"):
        rankless.convert(saved, tmp_path / "x", to="onnx")
    assert {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()} == before


def test_a_training_goes_on_from_files_that_name_no_step_if_it_is_passed(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    arguments = ["convert", str(tmp_path / "x.pt"), str(tmp_path / "run/step_700"), "--to", "native", "--step", "700"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert rankless.open(tmp_path / "run").step == 700
    other = nn.Linear(4, 4)
    resumed = torch.optim.AdamW(other.parameters())
    with rankless.Checkpointer(tmp_path / "run", model=other, optimizer=resumed, signals=()) as checkpointer:
        assert checkpointer.resume() == 700
        assert torch.equal(other.weight, model.weight)
        checkpointer.step(701)
    assert [info.tag for info in rankless.list_checkpoints(tmp_path / "run")] == ["step_700", "step_701"]


@pytest.mark.parametrize("step", [-1, 2.5, float("nan"), float("inf"), True])
def test_a_step_from_which_no_training_goes_on_is_refused(saved: Path, tmp_path: Path, step: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="step must be an integer of at least 0"):
        rankless.convert(saved, tmp_path / "out", to="native", step=step)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["hf", "safetensors", "torch", "dcp", "colossalai"])
def test_a_step_is_refused_by_formats_without_a_place_for_it(saved: Path, tmp_path: Path, to: str) -> None:
    with pytest.raises(InvalidArgumentError, match="has no place for a training step"):
        rankless.convert(saved, tmp_path / "out", to=to, step=5)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("to", "file"), [("lightning", "a.ckpt"), ("lightning-folder", "a.ckpt/meta.pt")])
def test_lightning_gets_the_training_step(saved: Path, tmp_path: Path, to: str, file: str) -> None:
    rankless.convert(saved, tmp_path / "a.ckpt", to=to)
    assert torch.load(tmp_path / file, weights_only=False)["global_step"] == 3
    rankless.convert(tmp_path / "a.ckpt", tmp_path / "back/t", to="native")
    assert rankless.list_checkpoints(tmp_path / "back")[0].step == 3


@pytest.mark.parametrize("to", ["native", "hf", "torch", "lightning", "colossalai"])
def test_damage_in_the_source_is_found_and_nothing_is_left(saved: Path, tmp_path: Path, to: str) -> None:
    file = saved / "model/model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CorruptCheckpointError, match=r"model tensor .* is corrupt"):
        rankless.convert(saved, tmp_path / "out", to=to, dtype="float16")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_what_was_written_is_read_back(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rankless.conversion import folder_output

    write = folder_output.write_file_ranges

    def lossy(files: Any, *rest: Any, **options: Any) -> Any:
        actual = write(files, *rest, **options)
        with Path(files[0]).open("r+b") as file:
            file.seek(-5, 2)
            byte = file.read(1)
            file.seek(-5, 2)
            file.write(bytes([byte[0] ^ 4]))
        return actual

    monkeypatch.setattr(folder_output, "write_file_ranges", lossy)
    with pytest.raises(CorruptCheckpointError, match="not what was written"):
        rankless.convert(saved, tmp_path / "out", to="native")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


#: All formats but NxD's, whose files are planned otherwise.
WRITTEN = [
    *("native", "hf", "safetensors", "torch", "lightning", "dcp", "lightning-folder", "colossalai"),
    "deepspeed-universal",
]


@pytest.mark.parametrize("to", [*WRITTEN, "nxd"])
def test_a_draft_is_held_until_it_has_its_name(saved: Path, tmp_path: Path, to: str) -> None:
    """So that nobody takes it for what a dead conversion left."""
    publish = atomic_rename.rename_noreplace

    def look_and_publish(*paths: Path) -> None:
        (draft,) = tmp_path.glob(".*.partial")
        assert clean_up(tmp_path) == []
        with pytest.raises(BlockingIOError):
            lock_pending(draft)
        publish(*paths)

    with mock.patch.object(atomic_rename, "rename_noreplace", side_effect=look_and_publish) as published:
        rankless.convert(saved, tmp_path / "out", to=to, model_only=to == "nxd")
    assert published.call_count == 1
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}


@pytest.mark.parametrize("to", WRITTEN)
def test_what_is_read_back_cannot_be_taken_for_a_dead_draft(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    from rankless.conversion import pipeline

    read = pipeline.read_file_ranges

    def looked(*arguments: Any) -> Any:
        (draft,) = tmp_path.glob(".*.partial")
        with pytest.raises(BlockingIOError):
            lock_pending(draft)
        return read(*arguments)

    monkeypatch.setattr(pipeline, "read_file_ranges", looked)
    rankless.convert(saved, tmp_path / "out", to=to)


def die_converting(src: str, dst: str, to: str) -> None:
    def die(*_: Any) -> None:
        os.kill(os.getpid(), SIGKILL)

    with (
        mock.patch("rankless.conversion.pipeline.read_file_ranges", side_effect=die),
        mock.patch("rankless.nxd.writer.torch_files._finish_file", side_effect=die),
    ):
        rankless.convert(src, dst, to=to)


@pytest.mark.parametrize("to", WRITTEN)
def test_what_a_killed_conversion_has_left_is_cleaned_up(saved: Path, tmp_path: Path, to: str) -> None:
    process = CONTEXT.Process(target=die_converting, args=(str(saved), str(tmp_path / "out"), to))
    process.start()
    process.join()
    assert process.exitcode == -SIGKILL
    assert len(list(tmp_path.glob(".out.*.partial"))) == 1
    clean_up(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


@pytest.mark.parametrize("to", [*WRITTEN, "nxd"])
def test_the_next_conversion_to_the_same_name_removes_what_a_killed_one_has_left(
    saved: Path, tmp_path: Path, to: str
) -> None:
    process = CONTEXT.Process(target=die_converting, args=(str(saved), str(tmp_path / "out"), to))
    process.start()
    process.join()
    (left,) = tmp_path.glob(".out.*.partial")
    others = [tmp_path / f".{tag}.fedcba9876543210.0123456789abcdef.partial" for tag in ("out", "other")]
    for folder in others:
        folder.mkdir()
    with closing(lock_pending(others[0])):  # a conversion that is still under way
        rankless.convert(saved, tmp_path / "out", to=to, model_only=to != "deepspeed-universal")
    assert {path.name for path in tmp_path.glob(".*.partial")} == {folder.name for folder in others}
    assert left not in others


@pytest.mark.parametrize("to", ["hf", "native", "nxd"])
def test_nothing_is_written_into_a_checkpoint_that_is_complete(saved: Path, tmp_path: Path, to: str) -> None:
    """Not into another one than the one that is converted, either."""
    run = saved.parent
    rankless.save_checkpoint(run, "later", {"w": torch.zeros(1)})
    before = read_state_files(run)
    for final in (saved / "x", saved / "model/x", saved / "new/x"):
        with pytest.raises(InvalidArgumentError, match=f"is inside the checkpoint {saved}: choose"):
            rankless.convert(run, final, to=to, model_only=True)
    assert read_state_files(run) == before
    (tmp_path / "manifest.json").write_text('{"name": "of a web page"}')
    rankless.convert(run, tmp_path / "beside", to=to, model_only=True)


#: Runs a command that writes each part of a tensor slowly.
SLOWLY = """
import signal
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, which may have started the tests, ignores it
import time
from rankless.cli.entry import main
from rankless.nxd.writer import torch_files
from rankless.engine.io import write
def slowly(quick):
    def work(*arguments):
        time.sleep(0.3)
        return quick(*arguments)
    return work
write._write_chunk, torch_files._write_range = slowly(write._write_chunk), slowly(torch_files._write_range)
main()
"""


@pytest.mark.parametrize(
    ("to", "number"),
    [
        *(("native", number) for number in (SIGINT, SIGTERM, SIGHUP)),
        ("dcp", SIGINT),
        ("lightning", SIGTERM),
        ("nxd", SIGHUP),
    ],
)
def test_a_signal_in_the_middle_leaves_nothing(tmp_path: Path, to: str, number: Signals) -> None:
    model = {f"w{n}": torch.zeros(2**20) for n in range(24)}
    rankless.save_checkpoint(tmp_path, "a", model, rng=False)
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", SLOWLY, "convert", str(tmp_path / "a"), str(tmp_path / "out/new"), "--to", to]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]:
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(0.3)
        process.send_signal(number)
        _, said = process.communicate()
    assert process.returncode == 128 + number
    assert said == ("error: interrupted\n" if number == SIGINT else "")
    assert list((tmp_path / "out").iterdir()) == []


def convert_together(src: str, dst: str, to: str) -> None:
    rankless.convert(src, dst, to=to, max_shard_size=500)


@pytest.mark.parametrize("to", ["native", "hf", "torch", "colossalai"])
def test_ranks_share_the_work_and_the_result_is_the_same(ranks: Ranks, saved: Path, tmp_path: Path, to: str) -> None:
    ranks(3, convert_together, str(saved), str(tmp_path / "three"), to)
    convert_together(str(saved), str(tmp_path / "one"), to)
    if to == "torch":
        item, three = (torch.load(tmp_path / name, weights_only=True)["model"] for name in ("one", "three"))
        assert all(torch.equal(item[name], three[name]) for name in item)
    else:
        assert read_state_files(tmp_path / "one") == read_state_files(tmp_path / "three")


def fail_on_the_last_rank(src: str, dst: str, to: str) -> None:
    def rename(name: str) -> str:
        if dist.get_rank() == 1:
            raise KeyError(name)
        return name

    rankless.convert(src, dst, to=to, rename=rename, timeout=20)


@pytest.mark.parametrize("to", ["native", "torch"])
def test_what_one_rank_fails_at_all_raise_at_once(ranks: Ranks, saved: Path, tmp_path: Path, to: str) -> None:
    for error in ranks.outcomes(2, fail_on_the_last_rank, str(saved), str(tmp_path / "out"), to):
        assert isinstance(error, RankFailedError)
        assert "rank 1 of 2, reading the metadata: KeyError" in str(error)


@pytest.mark.parametrize("to", ["native", "dcp", "nxd"])
@pytest.mark.parametrize("when", ["reading the metadata", "converting"])
def test_a_source_that_is_replaced_meanwhile_is_gone_and_not_damaged(
    saved: Path, tmp_path: Path, to: str, when: str
) -> None:
    def replace() -> None:
        save_training(tmp_path, 2.0)

    where = (
        "rankless.conversion.pipeline.carry_values"
        if when == "reading the metadata"
        else "rankless.run.owned_lock.FileLock"
    )
    with change_at_call(where, replace), pytest.raises(CheckpointReplacedError, match="was replaced or removed"):
        rankless.convert(saved, tmp_path / "out", to=to, model_only=to == "nxd")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_a_regular_expression_that_is_none_is_named(saved: Path, tmp_path: Path) -> None:
    for pattern, text in (("(", "x"), ("norm", r"\2"), ("norm", r"\g<name>")):
        with pytest.raises(InvalidArgumentError, match=re.escape(repr(pattern))):
            rankless.convert(saved, tmp_path / "out", to="native", rename={pattern: text})
    done = CliRunner().invoke(app, ["convert", str(saved), str(tmp_path / "out"), "--to", "hf", "--rename", "(=x"])
    assert done.exit_code == 2
    assert "rename must map regular expressions" in " ".join(done.stderr.split())


def by_number(folder: Path) -> Path:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "a.pt")
    return folder / "a.pt"


@pytest.mark.parametrize("to", ["nxd", "lightning-folder"])
def test_parameters_without_names_are_refused_where_names_are_needed(tmp_path: Path, to: str) -> None:
    with pytest.raises(InvalidArgumentError, match="only numbers for the optimizer"):
        rankless.convert(by_number(tmp_path), tmp_path / "out", to=to)
    assert {path.name for path in tmp_path.iterdir()} == {"a.pt"}


def test_a_disk_that_fills_up_at_the_last_file_of_nxd_is_told_as_such(saved: Path, tmp_path: Path) -> None:
    def full(path: Path, _: bytes) -> None:
        raise StorageError(errno.ENOSPC, f"could not write {path}: no space left on device")

    with (
        mock.patch.object(posix, "write_small", full),
        pytest.raises(StorageError, match=r"could not write .*scheduler.pt"),
    ):
        rankless.convert(saved, tmp_path / "out", to="nxd")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_a_single_safetensors_file_is_a_source(tmp_path: Path) -> None:
    save_file({"w": torch.arange(6.0).view(2, 3)}, tmp_path / "w.safetensors")
    rankless.convert(tmp_path / "w.safetensors", tmp_path / "w.pt", to="torch")
    assert torch.equal(torch.load(tmp_path / "w.pt", weights_only=True)["w"], torch.arange(6.0).view(2, 3))


@pytest.mark.parametrize("to", ["native", "torch", "colossalai"])
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path, to: str) -> None:
    torch.save({"w": torch.zeros(10)}, tmp_path / "small")
    torch.save({f"w{n}": torch.zeros(100 * 2**18) for n in range(3)}, tmp_path / "big")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE_CONVERSION, str(tmp_path), to], check=True, capture_output=True, text=True
    )
    assert int(done.stdout) < 64 * 2**20


def test_one_safetensors_file(saved: Path, tmp_path: Path) -> None:
    rankless.convert(saved, tmp_path / "one.safetensors", to="safetensors", max_shard_size=100)
    loaded = load_file(tmp_path / "one.safetensors")
    assert torch.equal(loaded["embed.weight"], train_run("plain").model.embed.weight)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "one.safetensors"}


@pytest.mark.parametrize("name", ["one", "one.pt", "one.bin", "one.ckpt", "pytorch_model.bin"])
def test_a_safetensors_file_is_read_whatever_it_is_called(saved: Path, tmp_path: Path, name: str) -> None:
    rankless.convert(saved, tmp_path / name, to="safetensors")
    checkpoint = rankless.open(tmp_path / name)
    assert torch.equal(checkpoint["model/embed.weight"], train_run("plain").model.embed.weight)


@pytest.mark.parametrize("to", ["torch", "lightning"])
def test_no_other_file_is_called_one(saved: Path, tmp_path: Path, to: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"one.safetensors would be read as .* such as \.pt"):
        rankless.convert(saved, tmp_path / "one.safetensors", to=to)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *map(str, arguments)], capture_output=True, text=True, check=False, cwd="/"
    )


def test_the_commands(saved: Path, tmp_path: Path) -> None:
    done = command("rankless", "convert", saved, tmp_path / "hf", "--to", "hf", "--dtype", "bfloat16", "--json")
    assert done.returncode == 0, done.stderr
    assert '"to": "hf"' in done.stdout
    assert load_file(tmp_path / "hf/model.safetensors")["norm.weight"].dtype == torch.bfloat16
    again = command("rankless", "convert", saved, tmp_path / "hf", "--to", "hf")
    assert again.returncode == 2
    assert "already" in again.stderr
    assert "Traceback" not in again.stderr
    done = command("rankless.lightning.consolidate_checkpoint", saved)
    assert done.returncode == 0, done.stderr
    assert "embed.weight" in torch.load(f"{saved}.consolidated", weights_only=True)["state_dict"]
    again = command("rankless.lightning.consolidate_checkpoint", saved)
    assert again.returncode == 2
    assert "Traceback" not in again.stderr
    done = command("rankless", "consolidate", saved, "--output", tmp_path / "m.pt", "--model-only")
    assert done.returncode == 0, done.stderr
    assert "embed.weight" in torch.load(tmp_path / "m.pt", weights_only=True)


class Scale:
    """An object with a state."""

    def state_dict(self) -> dict[str, float]:
        return {"scale": 2.0}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Is not called."""


@pytest.mark.parametrize("target", ["lightning", "lightning-folder", "colossalai"])
def test_nothing_is_left_out_of_an_export_silently(tmp_path: Path, target: str) -> None:
    """Objects have no place there: a warning names them. Optimizers by name have none either: they are refused."""
    model = nn.ModuleDict({"gen": nn.Linear(2, 2), "disc": nn.Linear(2, 2)})
    optimizers = {name: torch.optim.AdamW(part.parameters()) for name, part in model.items()}
    run, objects = tmp_path / "run", {"scaler": Scale()}
    rankless.save_checkpoint(run, "one", model, torch.optim.AdamW(model.parameters()), stateful=objects)
    rankless.save_checkpoint(run, "two", model, optimizers, stateful=objects)
    with pytest.warns(UserWarning, match="has no place for the stateful objects 'scaler': they are left out"):
        rankless.convert(run / "one", tmp_path / "one.ckpt", to=target)
    with pytest.raises(InvalidArgumentError, match="but the source has optimizer/disc, optimizer/gen"):
        rankless.convert(run / "two", tmp_path / "two.ckpt", to=target)
    assert not (tmp_path / "two.ckpt").exists()
