"""Tests a run's directory over time: retention, replacement, leftovers of dead saves, and a full disk."""

import errno
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import rankless
import rankless.errors
from campaigns.common.fork_server import CONTEXT
from rankless import RunDirectory, api
from rankless.errors import RanklessError, StorageError, TagExistsError
from rankless.ondisk.hidden_names import HiddenName, parse_hidden_name
from rankless.run.catalog import is_run_directory
from rankless.run.lookup import resolve_checkpoint_path
from rankless.run.records_folder import FOLDER
from rankless.storage.filesystem_kind import Mount
from tests.helpers.commands import invoke
from tests.helpers.pending_locks import lock_pending
from tests.helpers.processes import run_code, start_code
from tests.helpers.run_directories import leave_draft, list_hidden_names, list_tags, make_older, save_step


def test_a_checkpoint_that_was_displaced_by_a_dead_save_is_found_by_its_tag(tmp_path: Path) -> None:
    pending = {tag: HiddenName(tag, f"{1:016x}", f"{2:016x}", "partial") for tag in ("a", "b")}
    for name in pending.values():
        (tmp_path / name.name).mkdir()
        (tmp_path / name.with_state("replaced").name).mkdir()
    for tag, name in pending.items():
        assert resolve_checkpoint_path(tmp_path / tag) == tmp_path / name.with_state("replaced").name
    assert resolve_checkpoint_path(tmp_path / "c") == tmp_path / "c"


def test_a_directory_with_a_corrupt_checkpoint_alone_is_a_run_and_one_of_another_program_is_not(tmp_path: Path) -> None:
    save_step(tmp_path / "run", 1)
    manifest = tmp_path / "run/step_1/manifest.json"
    manifest.write_text(manifest.read_text().replace('"crc64nvme": "', '"crc64nvme": "?'))
    (tmp_path / "other/extension").mkdir(parents=True)
    (tmp_path / "other/extension/manifest.json").write_text('{"name": "an extension", "version": "1"}')
    assert is_run_directory(tmp_path / "run")
    assert not is_run_directory(tmp_path / "other")


def test_a_checkpoint_is_replaced_and_then_the_latest(tmp_path: Path, exchanging: None) -> None:
    save_step(tmp_path, 1)
    save_step(tmp_path, 2)
    with pytest.raises(TagExistsError, match="overwrite=True"):
        save_step(tmp_path, 1)
    rankless.save_checkpoint(tmp_path, "step_1", {"w": torch.full((4,), 9.0)}, overwrite=True)
    assert list_tags(tmp_path) == ["step_2", "step_1"]
    assert float(rankless.open(tmp_path)["model/w"][0]) == 9.0
    assert not list_hidden_names(tmp_path)
    rankless.save_checkpoint(tmp_path, "new", {"w": torch.ones(1)}, overwrite=True)


def test_a_replacement_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    with (
        mock.patch("rankless.run.pending_dir.atomic_rename.exchange_directories", side_effect=StorageError(5, "no")),
        pytest.raises(StorageError),
    ):
        rankless.save_checkpoint(tmp_path, "step_1", {"w": torch.ones(1)}, overwrite=True)
    assert float(rankless.open(tmp_path)["model/w"][0]) == 1.0
    assert not list_hidden_names(tmp_path)


def test_one_that_was_to_be_replaced_when_the_power_went_gets_its_name_back(tmp_path: Path) -> None:
    """Where names cannot be exchanged, there is a moment in which neither has it."""
    save_step(tmp_path, 1)
    (info,) = rankless.list_checkpoints(tmp_path)
    aside = tmp_path / HiddenName("step_1", info.run, "2" * 16, "replaced").name
    other = tmp_path / HiddenName("step_1", info.run, "2" * 16, "partial").name
    other.mkdir()
    (tmp_path / "step_1").rename(aside)
    save_step(tmp_path, 2)
    assert list_tags(tmp_path) == ["step_1", "step_2"]
    assert {item.run for item in rankless.list_checkpoints(tmp_path)} == {info.run}
    other.mkdir()
    (tmp_path / "step_1").rename(aside)
    rankless.load_checkpoint(tmp_path, "step_1", model={"w": torch.zeros(4)})


def put_aside(path: Path) -> Path:
    """A folder as it is between the two renames of an overwrite. Returns the one that waits for the name."""
    (info,) = rankless.list_checkpoints(path)
    waiting = HiddenName(info.tag, info.run, "2" * 16, "partial")
    (path / waiting.name).mkdir()
    info.path.rename(path / waiting.with_state("replaced").name)
    return path / waiting.name


def test_a_checkpoint_without_its_name_is_one_that_there_is(tmp_path: Path) -> None:
    """A script that asks first would begin anew, and save over it."""
    save_step(tmp_path, 1)
    put_aside(tmp_path)
    assert rankless.has_checkpoint(tmp_path)
    target = {"w": torch.zeros(4)}
    rankless.load_checkpoint(tmp_path, model=target)
    assert float(target["w"][0]) == 1.0


def test_a_living_overwrite_finds_the_name_free_whoever_loads_meanwhile(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    waiting = put_aside(tmp_path)
    with closing(lock_pending(waiting)):
        rankless.load_checkpoint(tmp_path, model={"w": torch.zeros(4)})
        assert not (tmp_path / "step_1").exists()
    rankless.load_checkpoint(tmp_path, model={"w": torch.zeros(4)})
    assert (tmp_path / "step_1").exists()


def test_the_next_save_removes_what_dead_ones_of_its_run_left_and_no_others(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    run = rankless.list_checkpoints(tmp_path)[0].run
    mine, removed, other = (
        leave_draft(tmp_path, run),
        leave_draft(tmp_path, run, "removed"),
        leave_draft(tmp_path, "f" * 16),
    )
    (tmp_path / ".hidden.of.mine").mkdir()
    save_step(tmp_path, 2)
    assert not mine.exists()
    assert not removed.exists()
    assert other.exists()
    assert (tmp_path / ".hidden.of.mine").exists()


@pytest.fixture(params=["ext4", "NFS", "FUSE"])
def shares_locks(request: pytest.FixtureRequest) -> Iterator[bool]:
    """File systems whose locks all see, and one that other hosts may use with locks of their own."""
    magic = {"ext4": 0xEF53, "NFS": 0x6969, "FUSE": 0x65735546}[request.param]
    with (
        mock.patch("rankless.storage.filesystem_kind.filesystem_magic", return_value=magic),
        mock.patch("rankless.storage.filesystem_kind._find_mount", return_value=Mount("nfs", "server:/data", ["rw"])),
    ):
        yield request.param != "FUSE"


@pytest.mark.parametrize("there", ["nothing", "another run"])
def test_first_saves_that_died_are_removed(tmp_path: Path, shares_locks: bool, there: str) -> None:
    """Each restart of a job that has saved nothing yet is a run of its own."""
    if there == "another run":
        save_step(tmp_path, 0)
    dead = [leave_draft(tmp_path, f"{number:x}" * 16) for number in range(1, 7)]
    for folder, seconds in zip(dead, (0, 60, 3600, 2 * 86_400, 0, 0), strict=True):
        make_older(folder, seconds)
    same = tmp_path / HiddenName("step_1", "a" * 16, "1" * 16, "partial").name
    same.mkdir()
    save_step(tmp_path, 1)
    gone = [folder for folder in (*dead, same) if not folder.exists()]
    assert gone == ([dead[2], dead[3], same] if shares_locks else [dead[3]])
    assert list_tags(tmp_path)[-1] == "step_1"


def test_a_first_save_that_lives_is_left_alone_however_old_and_so_is_the_draft_of_a_run(
    tmp_path: Path, shares_locks: bool
) -> None:
    save_step(tmp_path, 0)
    living = leave_draft(tmp_path, "a" * 16)
    (tmp_path / "step_0").rename(tmp_path / "kept")
    of_a_run = leave_draft(tmp_path, rankless.list_checkpoints(tmp_path)[0].run)
    writing = leave_draft(tmp_path, "b" * 16)
    for folder in (living, of_a_run, writing):
        make_older(folder, 1e6)
    os.utime(writing / "model/model.safetensors")  # a rank of another host has just written
    with closing(lock_pending(living)), mock.patch.object(api, "_defaults", api._DefaultDirectories()):
        save_step(tmp_path, 1)
    assert [folder.exists() for folder in (living, of_a_run, writing)] == [True, True, True]
    with mock.patch.object(api, "_defaults", api._DefaultDirectories()):
        save_step(tmp_path, 2)
    assert [folder.exists() for folder in (living, of_a_run, writing)] == [False, True, True]


def test_where_there_are_no_locks_nothing_is_removed(tmp_path: Path) -> None:
    dead = leave_draft(tmp_path, "a" * 16)
    make_older(dead, 1e6)
    refused = OSError(errno.ENOLCK, "no locks")
    with mock.patch.multiple("fcntl", flock=mock.Mock(side_effect=refused), fcntl=mock.Mock(side_effect=refused)):
        save_step(tmp_path, 1)
    assert dead.exists()


DIE = """
import os, sys, torch, rankless
from rankless.run.pending_dir import PendingDirectory
PendingDirectory.publish = lambda *_: os._exit(9)
rankless.save_checkpoint(sys.argv[1], "step_0", {"w": torch.zeros(100_000)})
"""


def test_a_job_that_dies_in_its_first_save_again_and_again_leaves_one_draft(tmp_path: Path) -> None:
    for _ in range(3):
        assert run_code(DIE, tmp_path).returncode == 9
        hidden = [parse_hidden_name(name) for name in sorted(list_hidden_names(tmp_path))]
        assert [name and name.state for name in hidden] == ["lock", "partial"]
    save_step(tmp_path, 0)
    assert not list_hidden_names(tmp_path)


HOLD = """
import sys, time
from pathlib import Path
from rankless.ondisk.hidden_names import parse_hidden_name
from rankless.run.pending_lock import PendingLock
path = Path(sys.argv[1])
lock = PendingLock(path.parent, parse_hidden_name(path.name))
print(True, flush=True)
time.sleep(60)
"""


def test_a_living_save_is_left_alone_until_it_dies(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    living = leave_draft(tmp_path, rankless.list_checkpoints(tmp_path)[0].run)
    with start_code(HOLD, living) as process:
        assert process.stdout.readline().strip() == "True"
        save_step(tmp_path, 2)
        assert living.exists()
        process.kill()
    save_step(tmp_path, 3)
    assert not living.exists()


def test_a_save_holds_its_own_folder(tmp_path: Path) -> None:
    """Another save of the run, in this moment, would leave it alone."""
    seen = []

    def look(*_: Any, **__: Any) -> Any:
        (partial,) = tmp_path.glob(".*.partial")
        with pytest.raises(BlockingIOError):
            lock_pending(partial)
        seen.append(partial)
        return {}

    with mock.patch("rankless.save.shard_writer.write_file_ranges", look), pytest.raises(RanklessError):
        save_step(tmp_path, 1)
    assert seen
    assert not list_hidden_names(tmp_path)


def test_too_little_space_is_told_before_anything_is_written(tmp_path: Path) -> None:
    full = os.statvfs_result((4096, 4096, 1000, 10, 10, 100, 100, 100, 0, 255))
    with mock.patch("rankless.storage.posix.os.statvfs", return_value=full):
        save_step(tmp_path, 1)
        with pytest.raises(StorageError, match=r"40,960 bytes free.* needs [\d,]+; nothing was written") as raised:
            rankless.save_checkpoint(tmp_path, "big", {"w": torch.zeros(20_000)})
    assert raised.value.errno == 28
    assert list_tags(tmp_path) == ["step_1"]
    assert not list_hidden_names(tmp_path)


def test_what_was_replaced_and_then_removed_does_not_come_back(tmp_path: Path) -> None:
    """The process died before it removed the old one; then the user removed the new one."""
    save_step(tmp_path, 1)
    (info,) = rankless.list_checkpoints(tmp_path)
    (tmp_path / "step_1").rename(tmp_path / HiddenName("step_1", info.run, "2" * 16, "replaced").name)
    with pytest.raises(rankless.errors.NoCheckpointError):
        rankless.load_checkpoint(tmp_path, model={"w": torch.zeros(4)})


def test_only_checkpoints_are_overwritten(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/precious").write_text("mine")
    with pytest.raises(TagExistsError, match="data/precious is no file of a checkpoint of rankless"):
        rankless.save_checkpoint(tmp_path, "data", {"w": torch.ones(1)}, overwrite=True)
    assert (tmp_path / "data/precious").read_text() == "mine"
    assert not list_hidden_names(tmp_path)


def test_an_exchange_that_is_done_is_a_success_whatever_follows(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    with mock.patch.object(Path, "rename", side_effect=OSError(5, "input/output error")):
        rankless.save_checkpoint(tmp_path, "step_1", {"w": torch.full((4,), 2.0)}, overwrite=True)
    assert float(rankless.open(tmp_path)["model/w"][0]) == 2.0
    assert not list_hidden_names(tmp_path)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_save_that_fails_early_leaves_no_folder_and_no_open_file(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    before = descriptors()
    write_files = "rankless.save.folder_output.RunFolderOutput.write"
    for where in ("rankless.engine.io.checkpoint_files.posix.allocate_space", write_files):
        with mock.patch(where, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            save_step(tmp_path, 2)
    for where in ("rankless.save.run_save.threading.Thread.start", "rankless.save.shard_writer.stage_tensors"):
        with mock.patch(where, side_effect=RuntimeError("can't start new thread")), pytest.raises(RuntimeError):
            save_step(tmp_path, 2, async_save=True)
    assert descriptors() == before
    assert list_tags(tmp_path) == ["step_1"]
    assert not list_hidden_names(tmp_path)


def test_saves_of_one_path_wait_for_each_other_however_they_are_asked_for(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "a", {"w": torch.ones(4)}, async_save=True)
    rankless.save_checkpoint(tmp_path, "b", {"w": torch.ones(4)}, max_shard_size="1GB", timeout=30.0)
    a, b = rankless.list_checkpoints(tmp_path)
    assert (a.tag, b.tag, a.sequence, b.sequence) == ("a", "b", 1, 2)
    assert a.run == b.run


@pytest.mark.parametrize(
    ("kind", "source", "program", "advice"),
    [
        ("fuse.gcsfuse", "my-bucket", "gcsfuse", "such as gs://bucket/run"),
        ("fuse", "mountpoint-s3", "mountpoint-s3", "such as s3://bucket/run"),
        ("fuse.s3fs", "s3fs", "s3fs", "such as s3://bucket/run"),
        ("fuse.rclone", "remote:data", "rclone", "pass its URL"),
    ],
)
def test_a_mounted_bucket_is_recognised(tmp_path: Path, kind: str, source: str, program: str, advice: str) -> None:
    with (
        mock.patch("rankless.storage.filesystem_kind.filesystem_magic", return_value=0x65735546),
        mock.patch("rankless.storage.filesystem_kind._find_mount", return_value=Mount(kind, source, ["rw"])),
    ):
        run = RunDirectory(tmp_path / "run")
        with pytest.warns(UserWarning, match=f"a bucket that {program} has mounted.*{advice}"):
            run.save("a", {"w": torch.zeros(2)})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run.save("b", {"w": torch.zeros(2)})


def test_other_file_systems_in_user_space_are_no_buckets(tmp_path: Path) -> None:
    with (
        mock.patch("rankless.storage.filesystem_kind.filesystem_magic", return_value=0x65735546),
        mock.patch(
            "rankless.storage.filesystem_kind._find_mount", return_value=Mount("fuse.sshfs", "host:/data", ["rw"])
        ),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        RunDirectory(tmp_path / "run").save("a", {"w": torch.zeros(2)})


def die_in_a_claim(path: Path) -> None:
    """As with ``kill -9`` between the draft of an entry of the history and its name."""
    with mock.patch.object(os, "link", side_effect=lambda *_: os._exit(9)):
        save_step(path, 9)


def test_prune_removes_what_a_claim_has_left_that_was_killed(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    job = CONTEXT.Process(target=die_in_a_claim, args=(tmp_path,))
    job.start()
    job.join()
    assert job.exitcode == 9
    (draft,) = [path for path in (tmp_path / FOLDER).iterdir() if path.name.startswith(".")]
    strange = tmp_path / FOLDER / ".notes.json.0123456789abcdef"
    strange.write_text("of the user")
    invoke("prune", tmp_path, "--leftovers")
    assert draft.exists()  # its job may only be stopped
    for path in (draft, strange):
        os.utime(path, (time.time() - 2 * 86_400,) * 2)
    invoke("prune", tmp_path, "--leftovers")
    assert (draft.exists(), strange.exists()) == (False, True)
    assert list_tags(tmp_path) == ["step_1"]


def test_a_job_whose_run_directory_was_moved_while_it_saved_hears_of_it(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.save("step_1", {"w": torch.ones(2)}, step=1)
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.warns(UserWarning, match=r"has lost the history .* moved or removed meanwhile"):
        directory.save("step_2", {"w": torch.ones(2)}, step=2)
    assert (list_tags(tmp_path / "moved"), list_tags(tmp_path / "run")) == (["step_1"], ["step_2"])


def test_a_run_directory_that_is_removed_during_a_save_of_one_process_is_no_mismatch_of_ranks(tmp_path: Path) -> None:
    removed = mock.patch("rankless.save.shard_writer.is_directory", return_value=False)
    with removed, pytest.raises(StorageError, match="was removed while this save wrote into it"):
        save_step(tmp_path, 1)
    assert not list_tags(tmp_path)
