"""Tests a run's directory over time: retention, replacement, leftovers of dead saves, and a full disk."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import holdfast
import holdfast.errors
from holdfast import KeepBest, KeepEvery, KeepLast, KeepNewerThan, KeepTags, api
from holdfast.errors import HoldfastError, InvalidArgumentError, StorageError, TagExistsError
from holdfast.ondisk.hidden_names import HiddenName, parse_hidden_name
from holdfast.run.scan import CheckpointInfo
from holdfast.storage import directories
from tests.helpers.pool import Ranks

DEAD = HiddenName("step_9", "0" * 16, "1" * 16, "partial")


def save(path: Path, step: int, **options: Any) -> None:
    holdfast.save_checkpoint(path, f"step_{step}", {"w": torch.full((4,), float(step))}, step=step, **options)


def tags(path: Path) -> list[str]:
    return [info.tag for info in holdfast.list_checkpoints(path)]


def hidden(path: Path) -> list[str]:
    return [entry.name for entry in path.iterdir() if entry.name.startswith(".")]


def test_the_newest_so_many_are_kept(tmp_path: Path) -> None:
    for step in range(5):
        save(tmp_path, step, num_kept_ckpts=2)
    assert tags(tmp_path) == ["step_3", "step_4"]
    assert not hidden(tmp_path)


def test_policies_keep_what_either_keeps(tmp_path: Path) -> None:
    losses = [3.0, 1.0, 2.0, float("nan"), 5.0, 4.0]
    keep = KeepLast(1) | KeepEvery(4) | KeepBest("loss", 1) | KeepTags("step_2")
    for step, loss in enumerate(losses):
        save(tmp_path, step, metrics={"loss": loss}, keep=keep)
    assert tags(tmp_path) == ["step_0", "step_1", "step_2", "step_4", "step_5"]


def test_the_best_may_be_the_highest_and_the_young_are_kept(tmp_path: Path) -> None:
    for step, score in enumerate([1, 9, 5, 7, 2]):
        save(tmp_path, step, metrics={"score": score}, keep=KeepBest("score", 2, mode="max"))
    assert tags(tmp_path) == ["step_1", "step_3", "step_4"]  # the newest always
    save(tmp_path, 5, keep=KeepNewerThan(hours=1))
    assert tags(tmp_path) == ["step_1", "step_3", "step_4", "step_5"]
    with mock.patch("holdfast.run.cleanup.time.time", return_value=4e9):
        save(tmp_path, 6, keep=KeepNewerThan(days=2))
    assert tags(tmp_path) == ["step_6"]


@pytest.mark.parametrize(
    "options",
    [
        {"num_kept_ckpts": 0},
        {"num_kept_ckpts": -1},
        {"num_kept_ckpts": 2, "keep": KeepLast(2)},
        {"keep": "five"},
        {"keep": KeepEvery(10), "step": None},
        {"keep": KeepLast(1) | KeepBest("loss"), "metrics": {"other": 1.0}},
    ],
)
def test_what_makes_no_sense_is_a_value_error_and_nothing_is_written(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".+") as raised:
        holdfast.save_checkpoint(tmp_path, "s", {"w": torch.ones(1)}, **{"step": 1, **options})
    assert isinstance(raised.value, InvalidArgumentError)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("every", "steps", "kept"),
    [
        (0.1, [0.2, 0.25, 0.3, 0.7, 0.75], [0.2, 0.3, 0.7]),
        (0.1, [0.1 + 0.1 + 0.1, sum([0.1] * 1_000_000), 100_000.05], [0.1 + 0.1 + 0.1, sum([0.1] * 1_000_000)]),
        (2.5, [0.0, 2.5, 4, 5, 7.4999], [0.0, 2.5, 5]),
        (3, [10**15, 10**15 + 2, float("inf")], [10**15 + 2]),
        (1e-9, [1.0000000005, 2], [2]),
    ],
)
def test_every_so_many_steps_may_be_fractions(every: float, steps: list[float], kept: list[float]) -> None:
    """0.3 % 0.1 is 0.09999999999999998, and 0.3 is a multiple of 0.1 to whoever wrote it."""
    infos = [CheckpointInfo(str(step), Path(), id=str(step), step=step) for step in steps]
    assert KeepEvery(every).select_kept(infos, 0.0) == {str(step) for step in kept}


@pytest.mark.parametrize("make", [lambda: KeepLast(2.5), lambda: KeepBest("a", 1.5)])  # type: ignore[arg-type]
def test_half_a_checkpoint_cannot_be_kept(make: Any) -> None:
    """It would fail in each save, after the commit, and nothing would ever be removed."""
    with pytest.raises(InvalidArgumentError, match="whole number"):
        make()


@pytest.mark.parametrize("make", [lambda: KeepLast(0), lambda: KeepBest("a", 0), KeepTags, lambda: KeepEvery(-1)])
def test_policies_that_keep_nothing_cannot_be_made(make: Any) -> None:
    with pytest.raises(ValueError, match=r"number above 0|tags to keep"):
        make()


def test_damaged_ones_do_not_count_and_other_runs_are_left_alone(tmp_path: Path) -> None:
    for step in range(3):
        save(tmp_path, step)
    (tmp_path / "step_2/manifest.json").write_text("{}")
    other = tmp_path / "other"
    save(other, 7)
    (other / "step_7").rename(tmp_path / "elsewhere")
    save(tmp_path, 3, num_kept_ckpts=2)
    assert set(tags(tmp_path)) == {"step_2", "step_1", "step_3", "elsewhere"}


def test_nothing_goes_before_the_new_one_is_there(tmp_path: Path) -> None:
    save(tmp_path, 0, num_kept_ckpts=1)
    with (
        mock.patch("holdfast.engine.io.commit.StagingDirectory.publish", side_effect=StorageError(5, "no")),
        pytest.raises(StorageError),
    ):
        save(tmp_path, 1, num_kept_ckpts=1)
    assert tags(tmp_path) == ["step_0"]


def test_an_old_one_that_cannot_be_removed_is_a_warning(tmp_path: Path) -> None:
    save(tmp_path, 0)
    with (
        mock.patch("holdfast.run.cleanup.remove_tree", side_effect=StorageError(13, "not yours")),
        pytest.warns(UserWarning, match="is saved, but an old one could not be removed"),
    ):
        save(tmp_path, 1, num_kept_ckpts=1)
    assert tags(tmp_path) == ["step_1"]
    assert [parse_hidden_name(name).state for name in hidden(tmp_path)] == ["removed"]
    save(tmp_path, 2)
    assert not hidden(tmp_path)


def test_a_checkpoint_is_replaced_and_then_the_latest(tmp_path: Path, exchanging: None) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    with pytest.raises(TagExistsError, match="overwrite=True"):
        save(tmp_path, 1)
    holdfast.save_checkpoint(tmp_path, "step_1", {"w": torch.full((4,), 9.0)}, overwrite=True)
    assert tags(tmp_path) == ["step_2", "step_1"]
    assert float(holdfast.open(tmp_path)["model/w"][0]) == 9.0
    assert not hidden(tmp_path)
    holdfast.save_checkpoint(tmp_path, "new", {"w": torch.ones(1)}, overwrite=True)


def test_a_replacement_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with (
        mock.patch("holdfast.engine.io.commit.directories.exchange_directories", side_effect=StorageError(5, "no")),
        pytest.raises(StorageError),
    ):
        holdfast.save_checkpoint(tmp_path, "step_1", {"w": torch.ones(1)}, overwrite=True)
    assert float(holdfast.open(tmp_path)["model/w"][0]) == 1.0
    assert not hidden(tmp_path)


def test_one_that_was_to_be_replaced_when_the_power_went_gets_its_name_back(tmp_path: Path) -> None:
    """Where names cannot be exchanged, there is a moment in which neither has it."""
    save(tmp_path, 1)
    (info,) = holdfast.list_checkpoints(tmp_path)
    aside = tmp_path / HiddenName("step_1", info.run, "2" * 16, "replaced").name
    other = tmp_path / HiddenName("step_1", info.run, "2" * 16, "partial").name
    other.mkdir()
    (tmp_path / "step_1").rename(aside)
    save(tmp_path, 2)
    assert tags(tmp_path) == ["step_1", "step_2"]
    assert {item.run for item in holdfast.list_checkpoints(tmp_path)} == {info.run}
    other.mkdir()
    (tmp_path / "step_1").rename(aside)
    holdfast.load_checkpoint(tmp_path, "step_1", model={"w": torch.zeros(4)})


def put_aside(path: Path) -> Path:
    """A folder as it is between the two renames of an overwrite. Returns the one that waits for the name."""
    (info,) = holdfast.list_checkpoints(path)
    waiting = HiddenName(info.tag, info.run, "2" * 16, "partial")
    (path / waiting.name).mkdir()
    info.path.rename(path / waiting.with_state("replaced").name)
    return path / waiting.name


def test_a_checkpoint_without_its_name_is_one_that_there_is(tmp_path: Path) -> None:
    """A script that asks first would begin anew, and save over it."""
    save(tmp_path, 1)
    put_aside(tmp_path)
    assert holdfast.has_checkpoint(tmp_path)
    target = {"w": torch.zeros(4)}
    holdfast.load_checkpoint(tmp_path, model=target)
    assert float(target["w"][0]) == 1.0


def test_a_living_overwrite_finds_the_name_free_whoever_loads_meanwhile(tmp_path: Path) -> None:
    save(tmp_path, 1)
    waiting = put_aside(tmp_path)
    with closing(directories.DirectoryLock(waiting)):
        holdfast.load_checkpoint(tmp_path, model={"w": torch.zeros(4)})
        assert not (tmp_path / "step_1").exists()
    holdfast.load_checkpoint(tmp_path, model={"w": torch.zeros(4)})
    assert (tmp_path / "step_1").exists()


def leave(path: Path, run: str, state: str = "partial") -> Path:
    folder = path / DEAD._replace(run=run, state=state).name
    (folder / "model").mkdir(parents=True)
    (folder / "model/model.safetensors").write_bytes(b"half")
    return folder


def test_the_next_save_removes_what_dead_ones_of_its_run_left_and_no_others(tmp_path: Path) -> None:
    save(tmp_path, 1)
    run = holdfast.list_checkpoints(tmp_path)[0].run
    mine, removed, other = leave(tmp_path, run), leave(tmp_path, run, "removed"), leave(tmp_path, "f" * 16)
    (tmp_path / ".hidden.of.mine").mkdir()
    save(tmp_path, 2)
    assert not mine.exists()
    assert not removed.exists()
    assert other.exists()
    assert (tmp_path / ".hidden.of.mine").exists()


def age(folder: Path, seconds: float) -> None:
    """Make a folder and all in it so many seconds older."""
    for path in (*folder.rglob("*"), folder):
        now = path.stat().st_mtime
        os.utime(path, (now - seconds, now - seconds))


@pytest.fixture(params=["a local file system", "NFS"])
def is_local(request: pytest.FixtureRequest) -> Iterator[bool]:
    """File systems whose locks all see, and those that other hosts may use with locks of their own."""
    magic = {"a local file system": 0xEF53, "NFS": 0x6969}[request.param]
    with mock.patch("holdfast.storage.filesystems.filesystem_magic", return_value=magic):
        yield magic == 0xEF53


@pytest.mark.parametrize("there", ["nothing", "another run"])
def test_first_saves_that_died_are_removed(tmp_path: Path, is_local: bool, there: str) -> None:
    """Each restart of a job that has saved nothing yet is a run of its own."""
    if there == "another run":
        save(tmp_path, 0)
    dead = [leave(tmp_path, f"{number:x}" * 16) for number in range(1, 7)]
    for folder, seconds in zip(dead, (0, 60, 3600, 2 * 86_400, 0, 0), strict=True):
        age(folder, seconds)
    same = tmp_path / HiddenName("step_1", "a" * 16, "1" * 16, "partial").name
    same.mkdir()
    save(tmp_path, 1)
    gone = [folder for folder in (*dead, same) if not folder.exists()]
    assert gone == ([dead[2], dead[3], same] if is_local else [dead[3]])
    assert tags(tmp_path)[-1] == "step_1"


def test_a_first_save_that_lives_is_left_alone_however_old_and_so_is_the_draft_of_a_run(
    tmp_path: Path, is_local: bool
) -> None:
    save(tmp_path, 0)
    living = leave(tmp_path, "a" * 16)
    (tmp_path / "step_0").rename(tmp_path / "kept")
    of_a_run = leave(tmp_path, holdfast.list_checkpoints(tmp_path)[0].run)
    writing = leave(tmp_path, "b" * 16)
    for folder in (living, of_a_run, writing):
        age(folder, 1e6)
    os.utime(writing / "model/model.safetensors")  # a rank of another host has just written
    with closing(directories.DirectoryLock(living)), mock.patch.object(api, "_defaults", api._DefaultCheckpointers()):
        save(tmp_path, 1)
    assert [folder.exists() for folder in (living, of_a_run, writing)] == [True, True, True]
    with mock.patch.object(api, "_defaults", api._DefaultCheckpointers()):
        save(tmp_path, 2)
    assert [folder.exists() for folder in (living, of_a_run, writing)] == [False, True, True]


def test_where_there_are_no_locks_nothing_is_removed(tmp_path: Path) -> None:
    dead = leave(tmp_path, "a" * 16)
    age(dead, 1e6)
    with mock.patch("holdfast.storage.directories.fcntl.flock", side_effect=OSError(errno.ENOLCK, "no locks")):
        save(tmp_path, 1)
    assert dead.exists()


DIE = """
import os, sys, torch, holdfast
from holdfast.engine.io.commit import StagingDirectory
StagingDirectory.publish = lambda *_: os._exit(9)
holdfast.save_checkpoint(sys.argv[1], "step_0", {"w": torch.zeros(100_000)})
"""


def test_a_job_that_dies_in_its_first_save_again_and_again_leaves_one_draft(tmp_path: Path) -> None:
    for _ in range(3):
        assert subprocess.run([sys.executable, "-c", DIE, str(tmp_path)], check=False).returncode == 9
        assert len(hidden(tmp_path)) == 1
    save(tmp_path, 0)
    assert not hidden(tmp_path)


HOLD = """
import sys, time
from pathlib import Path
from holdfast.storage.directories import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]))
print(lock.held, flush=True)
time.sleep(60)
"""


def test_a_living_save_is_left_alone_until_it_dies(tmp_path: Path) -> None:
    save(tmp_path, 1)
    living = leave(tmp_path, holdfast.list_checkpoints(tmp_path)[0].run)
    with subprocess.Popen([sys.executable, "-c", HOLD, str(living)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "True"
        save(tmp_path, 2)
        assert living.exists()
        process.kill()
    save(tmp_path, 3)
    assert not living.exists()


def test_a_save_holds_its_own_folder(tmp_path: Path) -> None:
    """Another save of the run, in this moment, would leave it alone."""
    seen = []

    def look(*_: Any) -> Any:
        (partial,) = [path for path in tmp_path.iterdir() if path.name.startswith(".")]
        with pytest.raises(BlockingIOError):
            directories.DirectoryLock(partial)
        seen.append(partial)
        return {}

    with mock.patch("holdfast.save.shard_writer.write_file_ranges", look), pytest.raises(HoldfastError):
        save(tmp_path, 1)
    assert seen
    assert not hidden(tmp_path)


def test_too_little_space_is_told_before_anything_is_written(tmp_path: Path) -> None:
    full = os.statvfs_result((4096, 4096, 1000, 10, 10, 100, 100, 100, 0, 255))
    with mock.patch("holdfast.storage.directories.os.statvfs", return_value=full):
        save(tmp_path, 1)
        with pytest.raises(StorageError, match=r"40,960 bytes free.* needs [\d,]+; nothing was written") as raised:
            holdfast.save_checkpoint(tmp_path, "big", {"w": torch.zeros(20_000)})
    assert raised.value.errno == 28
    assert tags(tmp_path) == ["step_1"]
    assert not hidden(tmp_path)


def kept_by_ranks(path: str) -> list[str]:
    for step in range(4):
        tensor = torch.full((4,), float(step))
        holdfast.save_checkpoint(path, f"step_{step}", {"w": tensor}, step=step, keep=KeepLast(1) | KeepEvery(2))
        dist.barrier()
    return tags(Path(path))


def test_ranks_agree_on_what_is_kept(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(3, kept_by_ranks, str(tmp_path)) == [["step_0", "step_2", "step_3"]] * 3


def unlike_policies(path: str) -> None:
    holdfast.save_checkpoint(path, "s", {"w": torch.ones(1)}, num_kept_ckpts=1 + dist.get_rank())


def test_ranks_with_other_policies_are_told(ranks: Ranks, tmp_path: Path) -> None:
    errors = ranks.outcomes(2, unlike_policies, str(tmp_path))
    assert all("what is kept" in str(error) and "KeepLast(number=2)" in str(error) for error in errors)


def prune(*arguments: object) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "prune", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_prune_removes_what_it_is_told_to_and_says_so(tmp_path: Path) -> None:
    for step in range(4):
        save(tmp_path, step)
    dead = leave(tmp_path, "f" * 16)
    code, out, _ = prune(tmp_path, "--keep", 2, "--leftovers", "--dry-run", "--json")
    assert code == 0
    assert json.loads(out)["checkpoints"] == ["step_0", "step_1"]
    assert json.loads(out)["leftovers"] == [dead.name]
    assert len(tags(tmp_path)) == 4
    code, out, _ = prune(tmp_path, "--keep", 2, "--leftovers")
    assert code == 0
    assert "removed step_0" in out
    assert "2 checkpoints and 1 leftover" in out
    assert tags(tmp_path) == ["step_2", "step_3"]
    assert not hidden(tmp_path)


def test_prune_without_a_word_on_what_or_where_is_misuse(tmp_path: Path) -> None:
    for arguments in ([tmp_path], [tmp_path, "--keep", 0], [tmp_path / "nowhere", "--keep", 1]):
        code, _, error = prune(*arguments)
        assert code == 2
        assert "Traceback" not in error


def test_pruning_gives_a_checkpoint_its_name_back_rather_than_removing_it(tmp_path: Path) -> None:
    save(tmp_path, 1)
    hidden_as = HiddenName("step_1", holdfast.list_checkpoints(tmp_path)[0].run, "2" * 16, "partial")
    (tmp_path / hidden_as.name).mkdir()
    (tmp_path / "step_1").rename(tmp_path / hidden_as.with_state("replaced").name)
    assert prune(tmp_path, "--leftovers")[0] == 0
    assert tags(tmp_path) == ["step_1"]
    assert not hidden(tmp_path)


def test_what_was_replaced_and_then_removed_does_not_come_back(tmp_path: Path) -> None:
    """The process died before it removed the old one; then the user removed the new one."""
    save(tmp_path, 1)
    (info,) = holdfast.list_checkpoints(tmp_path)
    (tmp_path / "step_1").rename(tmp_path / HiddenName("step_1", info.run, "2" * 16, "replaced").name)
    with pytest.raises(holdfast.errors.NoCheckpointError):
        holdfast.load_checkpoint(tmp_path, model={"w": torch.zeros(4)})


def test_only_checkpoints_are_overwritten(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/precious").write_text("mine")
    with pytest.raises(TagExistsError, match="not a holdfast checkpoint"):
        holdfast.save_checkpoint(tmp_path, "data", {"w": torch.ones(1)}, overwrite=True)
    assert (tmp_path / "data/precious").read_text() == "mine"
    assert not hidden(tmp_path)


def test_an_exchange_that_is_done_is_a_success_whatever_follows(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with mock.patch.object(Path, "rename", side_effect=OSError(5, "input/output error")):
        holdfast.save_checkpoint(tmp_path, "step_1", {"w": torch.full((4,), 2.0)}, overwrite=True)
    assert float(holdfast.open(tmp_path)["model/w"][0]) == 2.0
    assert not hidden(tmp_path)


def test_a_policy_that_fails_does_not_fail_the_save(tmp_path: Path) -> None:
    class Odd(KeepLast):
        def select_kept(self, *_: Any) -> set[str]:
            raise KeyError("odd")

    with pytest.warns(UserWarning, match="is saved, but"):
        save(tmp_path, 1, keep=Odd(1))
    assert tags(tmp_path) == ["step_1"]


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_save_that_fails_early_leaves_no_folder_and_no_open_file(tmp_path: Path) -> None:
    save(tmp_path, 1)
    before = descriptors()
    write_files = "holdfast.save.operation.SaveOperation._write_files"
    for where in ("holdfast.engine.io.commit.posix.allocate_space", write_files):
        with mock.patch(where, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            save(tmp_path, 2)
    for where in ("holdfast.save.background.threading.Thread.start", "holdfast.save.shard_writer.stage_tensors"):
        with mock.patch(where, side_effect=RuntimeError("can't start new thread")), pytest.raises(RuntimeError):
            save(tmp_path, 2, async_save=True)
    assert descriptors() == before
    assert tags(tmp_path) == ["step_1"]
    assert not hidden(tmp_path)


def test_saves_of_one_path_wait_for_each_other_however_they_are_asked_for(tmp_path: Path) -> None:
    holdfast.save_checkpoint(tmp_path, "a", {"w": torch.ones(4)}, async_save=True)
    holdfast.save_checkpoint(tmp_path, "b", {"w": torch.ones(4)}, max_shard_size="1GB", timeout=30.0)
    a, b = holdfast.list_checkpoints(tmp_path)
    assert (a.tag, b.tag, a.sequence, b.sequence) == ("a", "b", 1, 2)
    assert a.run == b.run
