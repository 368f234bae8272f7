"""Tests that bugs seen in NxD 0.18 do not occur in rankless.

Further ones are next to their subjects. The converter (``test_nxd_zero.py``): master weights destroyed in place, no
check that files belong together, stale files, context-parallel ranks that overwrote each other. The formats
(``test_nxd_reader.py``): no info, references in lists never restored, its own converter's output, the newest by a
file's time, incomplete checkpoints loaded by name. The calls (``test_nxd_calls.py``): buffers and frozen parameters
lost, other numbers of data-parallel ranks, plain optimizers.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import rankless
from rankless import nxd
from rankless.cli.main import app
from rankless.errors import FormatError, InvalidArgumentError, StateError
from rankless.nxd.offline_zero_conversion import ZeroRequest, convert_zero_checkpoints
from tests.helpers.nxd_files import (
    extract_golden,
    load_rank_file,
    rank_file_name,
    read_files,
    save_rank_file,
    shard_zero_states,
)
from tests.helpers.nxd_training import FailingScheduler, Net, equal_models, make_training, train_step, write_nxd

# Its calls: what happens in the background, and what is taken for complete.


def test_an_asynchronous_save_is_complete_without_another_call(tmp_path: Path) -> None:
    """There the marker is written at the next save, or at the end of the process, which may never come."""
    nxd.save_checkpoint(tmp_path, "a", Net(0), async_save=True)
    deadline = time.monotonic() + 60
    while not nxd.has_checkpoint(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    nxd.finalize_checkpoint()


def test_what_changes_after_the_call_is_not_saved(tmp_path: Path) -> None:
    """There tensors on the CPU, such as AdamW's steps, and user content are kept by reference."""
    model, optimizer, _ = make_training(0)
    train_step(model, optimizer, 1)
    content = {"step": 1, "seen": [1]}
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    nxd.save_checkpoint(tmp_path, "a", model, optimizer, user_content=content, async_save=True)
    for number in (2, 3, 4):
        train_step(model, optimizer, number)
    content["seen"].append(2)  # type: ignore[attr-defined]
    nxd.finalize_checkpoint()
    other, its, _ = make_training(1)
    assert nxd.load_checkpoint(tmp_path, model=other, optimizer=its) == {"step": 1, "seen": [1]}
    assert all(torch.equal(tensor, before[key]) for key, tensor in other.state_dict().items())
    assert {int(state["step"]) for state in its.state.values()} == {1}


def test_a_save_that_fails_is_never_taken_for_complete(tmp_path: Path) -> None:
    """There the exit of the process marks it as done."""
    code = (
        "import torch, sys\nfrom rankless import nxd\n"
        "from tests.helpers.nxd_training import FailingScheduler\n"
        "nxd.save_checkpoint(sys.argv[1], 'good', torch.nn.Linear(2, 2), async_save=True)\n"
        "scheduler = FailingScheduler()\n"
        "nxd.save_checkpoint(sys.argv[1], 'bad', torch.nn.Linear(2, 2), scheduler=scheduler, async_save=True)\n"
    )
    completed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "no state" in completed.stderr
    assert [info.tag for info in rankless.list_checkpoints(tmp_path)] == ["good"]


def test_saves_go_where_they_were_asked_to_although_another_folder_is_next(tmp_path: Path) -> None:
    """There the marker of the first goes into the folder of the second."""
    for folder in ("one", "two", "one"):
        nxd.save_checkpoint(tmp_path / folder, f"a{time.monotonic_ns()}", Net(0), async_save=True)
    nxd.finalize_checkpoint()
    assert [len(rankless.list_checkpoints(tmp_path / folder)) for folder in ("one", "two")] == [2, 1]


def test_each_call_says_for_itself_whether_it_is_asynchronous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the first call in the process decides for all."""
    asked: list[bool] = []
    original = rankless.api.save_checkpoint

    def noted(*args: Any, **more: Any) -> Any:
        handle = original(*args, **more)
        asked.append(more["async_save"])
        return handle

    monkeypatch.setattr(rankless.api, "save_checkpoint", noted)
    for number, wanted in enumerate((False, True, False)):
        nxd.save_checkpoint(tmp_path, f"a{number}", Net(0), async_save=wanted)
        assert wanted or nxd.has_checkpoint(tmp_path)
    nxd.finalize_checkpoint()
    assert asked == [False, True, False]


def test_a_tag_that_would_never_be_found_again_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="slash"):
        nxd.save_checkpoint(tmp_path, "a/b", Net(0))


def test_keeping_none_is_refused_and_the_last_is_never_removed(tmp_path: Path) -> None:
    nxd.save_checkpoint(tmp_path, "a", Net(0))
    with pytest.raises(ValueError, match="one checkpoint is always kept"):
        nxd.save_checkpoint(tmp_path, "b", Net(0), num_kept_ckpts=0)
    assert nxd.has_checkpoint(tmp_path)


def test_a_failed_overwrite_leaves_what_was_there(tmp_path: Path) -> None:
    """There the old marker stays, and beside it files of both."""
    model = Net(0)
    nxd.save_checkpoint(tmp_path, "a", model)
    before = read_files(tmp_path / "a")
    with pytest.raises(StateError, match=r"FailingScheduler .*no state"):
        nxd.save_checkpoint(tmp_path, "a", Net(1), scheduler=FailingScheduler())
    assert read_files(tmp_path / "a") == before


def test_the_latest_is_not_told_by_the_time_of_a_file(tmp_path: Path) -> None:
    for number in (10, 20):
        nxd.save_checkpoint(tmp_path, f"step_{number}", Net(number))
    for file in (tmp_path / "step_10").rglob("*"):
        os.utime(file, (2e9, 2e9))
    model = Net(0)
    nxd.load_checkpoint(tmp_path, model=model)
    assert equal_models(model, Net(20))


# Silent wrong training.


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_a_resumed_zero_run_goes_on_from_the_saved_weights(tmp_path: Path, dp: int) -> None:
    """There the optimizer is loaded before the model, and its next step puts the initial weights back."""
    model, optimizer, _ = make_training(0)
    for number in (1, 2):
        train_step(model, optimizer, number)
    write_nxd(tmp_path / "step_2", model, optimizer, dp=dp)
    other, its, _ = make_training(7)
    nxd.load_checkpoint(tmp_path, model=other, optimizer=its)
    for number in (3, 4):
        train_step(model, optimizer, number)
        train_step(other, its, number)
    assert equal_models(other, model)


def test_the_file_decides_where_weights_come_from(tmp_path: Path) -> None:
    """There the optimizer at hand does: without master weights in the file the model stays as it was made."""
    model, optimizer, _ = make_training(0)
    train_step(model, optimizer, 1)
    for masters in (False, True):
        write_nxd(tmp_path / f"step_{int(masters)}", model, optimizer, masters=masters)
        other, its, _ = make_training(3)
        nxd.load_checkpoint(tmp_path, f"step_{int(masters)}", other, its)
        assert equal_models(other, model)


# Its converter.


def pair(folder: Path, states: dict[str, Any], **more: Any) -> Path:
    """A checkpoint of two ranks, with one parameter that has these states, and one that has none."""
    parameters = {0: torch.randn(5, 2), 1: torch.randn(3)}
    for rank, tree in enumerate(shard_zero_states(parameters, {0: states}, 2, **more)):
        save_rank_file(folder / "optim" / rank_file_name(rank), tree)
    return folder


@pytest.mark.parametrize(
    "states",
    [
        {},
        {"step": torch.tensor(3.0), "mu_product": torch.tensor(0.9), "exp_avg": torch.ones(5, 2)},
        {"exp_avg_sq_row": torch.ones(5), "step": 3},
    ],
    ids=["SGD without momentum", "NAdam's other scalar", "a factor of rows"],
)
def test_states_that_make_it_crash_are_converted(tmp_path: Path, states: dict[str, Any]) -> None:
    source = pair(tmp_path / "a", states, groups=[{"lr": torch.tensor(0.5), "params": [0, 1]}])
    at = convert_zero_checkpoints(ZeroRequest(source, tmp_path / "b", 3))
    at = convert_zero_checkpoints(ZeroRequest(at, tmp_path / "c", None))
    at = convert_zero_checkpoints(ZeroRequest(at, tmp_path / "d", 2))
    assert read_files(at / "optim") == read_files(source / "optim")
    assert torch.equal(
        load_rank_file(tmp_path / "b" / "optim" / rank_file_name(2))["param_groups"][0]["lr"], torch.tensor(0.5)
    )


def test_what_it_cannot_convert_is_told_by_an_error_that_says_why(tmp_path: Path) -> None:
    save_rank_file(tmp_path / "plain" / "optim" / rank_file_name(), {"state": {}, "param_groups": []})
    save_rank_file(tmp_path / "experts" / "optim" / rank_file_name(ep=0), {"state": {}, "param_groups": []})
    (tmp_path / "dcp" / "optim").mkdir(parents=True)
    (tmp_path / "dcp" / "optim" / ".metadata").write_bytes(b"")
    for kind, message in (("plain", "no base_state"), ("experts", "expert-parallel"), ("dcp", "use_zero1_dcp")):
        with pytest.raises(FormatError, match=message):
            convert_zero_checkpoints(ZeroRequest(tmp_path / kind, tmp_path / "out", 2))
        assert not (tmp_path / "out").exists()


ASKED = [
    (["--convert_to_sharded"], 2, "needs --dp_size"),
    ([], 2, "either --convert_to_full or --convert_to_sharded"),
    (["--convert_to_full", "--convert_to_sharded", "--dp_size", "2"], 2, "either"),
    (["--convert_to_full", "--what_is_this", "1"], 2, "No such option"),
    (["--convert_to_full", "--num_workers", "4"], 0, "out"),
    (["--convert_to_sharded", "--dp_size", "0"], 2, "--dp_size"),
]


@pytest.mark.parametrize(("flags", "code", "message"), ASKED)
def test_its_flags_are_looked_at_before_anything_is_done(
    tmp_path: Path, flags: list[str], code: int, message: str
) -> None:
    source = extract_golden(tmp_path) / "z1_xser1"
    before = read_files(source)
    where = ["--input_dir", str(source), "--output_dir", str(tmp_path / "out")]
    actual = CliRunner().invoke(app, ["nxd-convert-zero-checkpoints", *where, *flags])
    assert actual.exit_code == code
    assert message in actual.output + actual.stderr
    assert (tmp_path / "out").exists() == (code == 0)
    assert read_files(source) == before
    command = [sys.executable, "-m", "rankless.nxd.convert_zero_checkpoints", *where, *flags]
    if not code:
        again = subprocess.run(command, capture_output=True, text=True, check=False)
        assert again.returncode == 2  # there is an output now
        assert "already" in again.stderr
        assert "Traceback" not in again.stderr
