"""Tests of ``stats=True``: statistics are kept with a checkpoint, are never another one's, and never fail a save."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import rankless
from rankless.cli import stats
from rankless.errors import InvalidArgumentError, StorageError
from rankless.inspection import background_statistics, checkpoint_statistics, kept_statistics
from rankless.inspection.checkpoint_statistics import CheckpointStatistics
from tests.helpers.commands import invoke, invoke_json
from tests.helpers.run_directories import list_names

#: The hidden file.
NAME = ".statistics"


def save(run: Path, tag: str, value: float = 1.0, **options: Any) -> Path:
    rankless.save_checkpoint(run, tag, {"w": torch.full((3,), value)}, rng=False, stats=True, **options)
    return run / tag


def save_and_wait(run: Path) -> None:
    save(run, "a")
    rankless.finalize()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Statistics are computed, but are not returned before this event."""
    released = threading.Event()
    measure = checkpoint_statistics.measure_checkpoint

    def measure_slowly(*args: Any) -> CheckpointStatistics:
        result = measure(*args)
        released.wait(20)
        return result

    monkeypatch.setattr(checkpoint_statistics, "measure_checkpoint", measure_slowly)
    return released


@pytest.mark.parametrize("options", [{}, {"async_save": True}, {"async_save": True, "staging": "overlapped"}])
class TestKept:
    def test_they_are_those_that_reading_gives(self, tmp_path: Path, options: dict[str, Any]) -> None:
        path = save(tmp_path, "a", **options)
        rankless.finalize()
        kept = rankless.read_statistics(path)
        assert kept is not None
        assert kept == rankless.compute_statistics(path)
        assert kept == rankless.read_statistics(tmp_path)

    def test_two_saves_in_a_row(self, tmp_path: Path, options: dict[str, Any]) -> None:
        paths = [save(tmp_path, tag, value, **options) for tag, value in (("a", 1.0), ("b", 2.0))]
        rankless.finalize()
        means = [kept.tensors["model/w"].mean for kept in map(rankless.read_statistics, paths) if kept]
        assert means == [1.0, 2.0]

    def test_the_file_is_not_listed_and_nothing_minds_it(self, tmp_path: Path, options: dict[str, Any]) -> None:
        path = save(tmp_path, "a", **options)
        rankless.finalize()
        assert (path / NAME).is_file()
        assert NAME not in (path / "manifest.json").read_text()
        report = invoke_json("verify", tmp_path)["checkpoints"][0]
        assert (report["status"], report["notes"]) == ("verified", [])
        rankless.convert(tmp_path, tmp_path.parent / "out", to="native")
        assert not (tmp_path.parent / "out" / NAME).exists()
        shutil.rmtree(tmp_path.parent / "out")
        assert rankless.load_checkpoint(tmp_path, model={"w": torch.zeros(3)}) is None
        rankless.save_checkpoint(tmp_path, "b", {"w": torch.ones(3)}, keep=1)
        assert list_names(tmp_path) == ["b"]


def test_the_command_shows_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "a")
    rankless.finalize()
    expected = rankless.compute_statistics(tmp_path).tensors["model/w"]
    monkeypatch.setattr(stats, "measure_checkpoint", None)
    (entry,) = invoke_json("stats", tmp_path)["tensors"]
    assert (entry["mean"], entry["norm"]) == (expected.mean, expected.norm)


def test_a_checkpointer_keeps_them(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    with rankless.Checkpointer(tmp_path, model=model, save_every=1, stats=True) as checkpointer:
        checkpointer.step(1)
    rankless.finalize()
    kept = rankless.read_statistics(tmp_path / "step_1")
    assert kept is not None
    assert kept.tensors.keys() == {"model/weight", "model/bias"}


def test_a_copy_of_a_checkpoint_has_them_too(tmp_path: Path) -> None:
    path = save(tmp_path / "run", "a")
    rankless.finalize()
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    kept = rankless.read_statistics(copy)
    assert kept is not None
    assert kept.path == copy


class TestIgnored:
    def test_without_a_file_there_are_none(self, tmp_path: Path) -> None:
        rankless.save_checkpoint(tmp_path, "a", {"w": torch.ones(3)})
        assert rankless.read_statistics(tmp_path) is None
        rankless.convert(tmp_path, tmp_path / "x.pt", to="torch")
        assert rankless.read_statistics(tmp_path / "x.pt") is None

    def test_those_of_another_checkpoint(self, tmp_path: Path) -> None:
        stale = save(tmp_path, "a", 1.0) / NAME
        rankless.finalize()
        data = stale.read_bytes()
        rankless.save_checkpoint(tmp_path, "a", {"w": torch.full((3,), 2.0)}, overwrite=True)
        assert rankless.read_statistics(tmp_path) is None
        stale.write_bytes(data)
        assert rankless.read_statistics(tmp_path) is None
        assert invoke_json("stats", tmp_path)["tensors"][0]["mean"] == 2.0

    @pytest.mark.parametrize("damage", ["flip", "cut", "empty", "link", "folder", "text"])
    def test_a_corrupt_file_is_ignored_with_a_warning(self, tmp_path: Path, damage: str) -> None:
        file = save(tmp_path, "a") / NAME
        rankless.finalize()
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        contents = {"flip": bytes(data), "cut": file.read_bytes()[:-3], "empty": b"", "text": b"not statistics"}
        file.unlink()
        if damage in contents:
            file.write_bytes(contents[damage])
        elif damage == "link":
            file.symlink_to(tmp_path / "a/manifest.json")
        else:
            file.mkdir()
            assert rankless.read_statistics(tmp_path) is None
            return
        with pytest.warns(UserWarning, match="statistics that are kept with"):
            assert rankless.read_statistics(tmp_path) is None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert invoke_json("stats", tmp_path)["tensors"][0]["mean"] == 1.0

    def test_a_file_with_other_tensors_is_ignored(self, tmp_path: Path) -> None:
        path = save(tmp_path, "a")
        rankless.finalize()
        kept = rankless.read_statistics(path)
        assert kept is not None
        inspected = kept_statistics.inspect_path(path)
        other = CheckpointStatistics(path, {"model/x": kept.tensors["model/w"]})
        kept_statistics.write_statistics(inspected, other)
        with pytest.warns(UserWarning, match="does not fit"):
            assert rankless.read_statistics(path) is None


class TestFailures:
    def test_a_failure_is_a_warning_and_the_next_save_has_statistics(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
    ) -> None:
        with monkeypatch.context() as context:
            context.setattr(checkpoint_statistics, "measure_checkpoint", fail)
            path = save(tmp_path, "a")
            rankless.finalize()
        assert [str(warning.message) for warning in recwarn] == [
            f"{path} is saved, but without statistics: [Errno 5] the disk is broken"
        ]
        assert invoke("verify", path).exit_code == 0
        assert rankless.read_statistics(path) is None
        save(tmp_path, "b")
        rankless.finalize()
        assert rankless.read_statistics(tmp_path / "b") is not None

    def test_also_if_warnings_are_errors(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checkpoint_statistics, "measure_checkpoint", fail)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            save(tmp_path, "a")
            save(tmp_path, "b")
            rankless.finalize()
        assert rankless.has_checkpoint(tmp_path)

    def test_a_file_that_cannot_be_written_is_a_warning(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("rankless.storage.store.PosixStore.replace_small", fail)
        with pytest.warns(UserWarning, match="without statistics"):
            save_and_wait(tmp_path)

    @pytest.mark.parametrize("value", [1, "yes", None])
    def test_another_value_is_refused_before_anything_is_saved(self, tmp_path: Path, value: Any) -> None:
        with pytest.raises(InvalidArgumentError, match="stats must be True or False"):
            rankless.save_checkpoint(tmp_path, "a", {"w": torch.ones(3)}, stats=value)
        assert not rankless.has_checkpoint(tmp_path)


def fail(*args: Any) -> Any:
    raise StorageError(5, "the disk is broken")


class TestMeanwhile:
    def test_a_checkpoint_that_is_removed_is_skipped(
        self, tmp_path: Path, slow: threading.Event, recwarn: pytest.WarningsRecorder
    ) -> None:
        path = save(tmp_path, "a")
        rankless.save_checkpoint(tmp_path, "b", {"w": torch.ones(3)}, keep=1)
        slow.set()
        rankless.finalize()
        assert not path.exists()
        assert list_names(tmp_path) == ["b"]
        assert not list(recwarn)

    def test_one_that_is_replaced_keeps_none_of_the_old_one(self, tmp_path: Path, slow: threading.Event) -> None:
        path = save(tmp_path, "a")
        time.sleep(0.3)  # until the old one was read
        rankless.save_checkpoint(tmp_path, "a", {"w": torch.full((3,), 2.0)}, overwrite=True)
        slow.set()
        rankless.finalize()
        assert not (path / NAME).exists()

    def test_no_save_waits_for_statistics(self, tmp_path: Path, slow: threading.Event) -> None:
        for number in range(3):
            save(tmp_path, f"s{number}")
        assert [info.tag for info in rankless.list_checkpoints(tmp_path)] == ["s0", "s1", "s2"]
        assert rankless.read_statistics(tmp_path / "s2") is None
        slow.set()
        rankless.finalize()
        assert all(rankless.read_statistics(tmp_path / f"s{number}") for number in range(3))

    def test_nothing_is_read_while_a_save_is_in_progress(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        measured: list[bool] = []
        measure = checkpoint_statistics.measure_checkpoint

        def note(*args: Any) -> CheckpointStatistics:
            measured.append(background_statistics.background_saves.is_saving())
            return measure(*args)

        monkeypatch.setattr(checkpoint_statistics, "measure_checkpoint", note)
        ended = threading.Event()

        def listen(event: rankless.Event) -> None:
            if isinstance(event, rankless.Saved):
                time.sleep(0.3)  # the save is committed, but not over
                assert not measured
                ended.set()

        save(tmp_path, "a", async_save=True, on_event=listen)
        rankless.finalize()
        assert ended.is_set()
        assert measured == [False]


SCRIPT = """
import sys, time, torch, rankless
from rankless.inspection import background_statistics, checkpoint_statistics
run, seconds, exit_seconds = sys.argv[1:]
measure = checkpoint_statistics.measure_checkpoint

def measure_slowly(inspected, keys, done):
    print("measuring", flush=True)
    for _ in range(int(float(seconds) * 100)):
        time.sleep(0.01)
        done(0)
    return measure(inspected, keys, done)

checkpoint_statistics.measure_checkpoint = measure_slowly
background_statistics._EXIT_SECONDS = float(exit_seconds)
rankless.save_checkpoint(run, "a", {"w": torch.ones(3)}, async_save=True, stats=True)
"""


def start(run: Path, seconds: float, exit_seconds: float = 1.0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, str(run), str(seconds), str(exit_seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


class TestEndOfTheProcess:
    def test_it_waits_for_short_computations(self, tmp_path: Path) -> None:
        process = start(tmp_path, 0.3, 60.0)
        assert process.communicate()[1] == ""
        assert process.returncode == 0
        assert rankless.read_statistics(tmp_path) is not None

    def test_it_does_not_wait_for_long_ones(self, tmp_path: Path) -> None:
        process = start(tmp_path, 600)
        assert process.communicate(timeout=60)[1] == ""
        assert process.returncode == 0
        assert rankless.read_statistics(tmp_path) is None
        assert invoke("verify", tmp_path).exit_code == 0

    def test_a_kill_leaves_a_complete_checkpoint(self, tmp_path: Path) -> None:
        process = start(tmp_path, 600)
        assert process.stdout is not None
        assert process.stdout.readline() == "measuring\n"
        process.send_signal(signal.SIGKILL)
        process.communicate()
        (tmp_path / "a" / f"{NAME}.{'0' * 16}").write_bytes(b"a draft")  # as a kill during the write leaves it
        assert invoke_json("verify", tmp_path)["checkpoints"][0]["notes"] == []
        assert rankless.read_statistics(tmp_path) is None

    def test_a_forked_process_computes_nothing(self, tmp_path: Path, slow: threading.Event) -> None:
        save(tmp_path, "a")
        child = os.fork()
        if not child:
            background_statistics.background_statistics.wait(5)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        slow.set()
        rankless.finalize()
        assert rankless.read_statistics(tmp_path) is not None
