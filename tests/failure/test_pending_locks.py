"""Tests who may remove a pending directory: nobody while its owner may be alive, on this host or on another one."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import rankless
from rankless.dcp import FileSystemWriter
from rankless.errors import StorageError
from rankless.lightning.atomic_output import atomic_output
from rankless.ondisk.hidden_names import parse_hidden_name
from rankless.run.catalog import list_stale_directories
from rankless.run.cleanup import clean_up, delete_checkpoints
from rankless.run.ownership import Replaceable
from rankless.run.pending_dir import PendingDirectory
from rankless.run.pending_lock import acquire_lock, confirm_lock, lock_path
from rankless.storage import atomic_rename, directory_trees, filesystem_kind, posix
from tests.helpers.pending_locks import lock_pending
from tests.helpers.pool import Ranks
from tests.helpers.run_directories import list_hidden_names, list_names, make_older, save_step

EXT4, NFS, FUSE = 0xEF53, 0x6969, 0x65735546
DAY = 86_400.0
OTHER_HOST = "00000000-0000-0000-0000-000000000000"


def nfs_mount(*options: str) -> filesystem_kind.Mount:
    return filesystem_kind.Mount("nfs4", "server:/data", options)


@pytest.fixture
def file_system(request: pytest.FixtureRequest) -> Iterator[int]:
    with (
        mock.patch.object(filesystem_kind, "filesystem_magic", return_value=request.param),
        mock.patch.object(filesystem_kind, "_find_mount", return_value=nfs_mount("rw", "vers=4.2", "local_lock=none")),
    ):
        yield request.param


def leave_behind(path: Path, host: str | None, *, witness: bool = False) -> Path:
    """Leave a pending directory, as a job on ``host`` leaves it that is killed."""
    name = PendingDirectory(path / "step_1").name
    folder = path / name.name
    (folder / "model").mkdir(parents=True)
    (folder / "model/model.safetensors").write_bytes(b"half")
    if host is not None:
        content = host.ljust(64) + ("the host that has seen the lock".ljust(64) if witness else "")
        lock_path(path, name).write_text(content)
    return folder


@pytest.mark.parametrize(
    ("file_system", "owner", "is_proof"),
    [
        (EXT4, posix.host_id(), True),
        (EXT4, OTHER_HOST, True),
        (EXT4, None, True),
        (NFS, posix.host_id(), True),
        (NFS, OTHER_HOST, True),
        (FUSE, posix.host_id(), True),
        (FUSE, OTHER_HOST, False),
        (FUSE, "", False),
        (FUSE, None, False),
    ],
    indirect=["file_system"],
)
def test_a_lock_that_can_be_taken_is_a_proof_if_a_living_owner_would_have_been_seen(
    tmp_path: Path, file_system: int, owner: str | None, is_proof: bool
) -> None:
    folder = leave_behind(tmp_path, owner)
    assert clean_up(tmp_path) == ([folder] if is_proof else [])
    assert folder.exists() != is_proof
    if is_proof:
        assert not list_hidden_names(tmp_path)


@pytest.mark.parametrize("file_system", [FUSE], indirect=True)
def test_a_witness_of_the_owners_job_is_a_proof_that_locks_are_seen(tmp_path: Path, file_system: int) -> None:
    folder = leave_behind(tmp_path, OTHER_HOST, witness=True)
    assert clean_up(tmp_path) == [folder]


@pytest.mark.parametrize("file_system", [FUSE], indirect=True)
def test_without_proof_a_directory_stays_for_a_day_by_the_clock_of_the_file_system(
    tmp_path: Path, file_system: int
) -> None:
    folder = leave_behind(tmp_path, OTHER_HOST)
    make_older(folder, DAY - 600)
    with mock.patch("time.time", return_value=0.0):  # the clock of this host is wrong
        assert clean_up(tmp_path) == []
        make_older(folder, 1200)
        assert clean_up(tmp_path) == [folder]


@pytest.mark.parametrize("file_system", [NFS], indirect=True)
@pytest.mark.parametrize("witness", [False, True])
def test_an_nfs_mount_that_keeps_locks_to_itself_is_no_proof(tmp_path: Path, file_system: int, witness: bool) -> None:
    """Nor if another host of the job has seen the lock: this host would not."""
    folder = leave_behind(tmp_path, OTHER_HOST, witness=witness)
    with mock.patch.object(
        filesystem_kind, "_find_mount", return_value=nfs_mount("vers=3", "nolock", "local_lock=all")
    ):
        assert clean_up(tmp_path) == []
    assert folder.exists()


@pytest.mark.parametrize("file_system", [NFS], indirect=True)
def test_an_nfs_mount_with_unknown_options_needs_a_witness(tmp_path: Path, file_system: int) -> None:
    unseen, seen = leave_behind(tmp_path, OTHER_HOST), leave_behind(tmp_path, OTHER_HOST, witness=True)
    with mock.patch.object(filesystem_kind, "_find_mount", return_value=None):
        assert clean_up(tmp_path) == [seen]
    assert unseen.exists()


def test_the_mount_options_are_those_of_the_kernel() -> None:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    options = [set(fields[3].split(",")) for fields in mounts if fields[1] == "/proc"]
    assert options
    mount = filesystem_kind._find_mount(Path("/proc"))
    assert mount is not None
    assert mount.type == "proc"
    assert "rw" in mount.options
    assert set(mount.options) <= options[-1]


def test_a_living_owner_is_left_alone_whatever_its_lock_file_says(tmp_path: Path) -> None:
    for host in (posix.host_id(), OTHER_HOST):
        folder = leave_behind(tmp_path, host, witness=True)
        make_older(folder, 10 * DAY)
        with closing(lock_pending(folder)):
            assert clean_up(tmp_path) == []
        shutil.rmtree(folder)


def test_a_save_leaves_no_lock_file_whether_it_succeeds_or_fails(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    with pytest.raises(StorageError), mock.patch.object(atomic_rename, "rename_noreplace", side_effect=StorageError(5)):
        save_step(tmp_path, 2)
    assert list_names(tmp_path) == ["step_1"]


def test_the_next_save_removes_a_lock_file_without_a_directory(tmp_path: Path) -> None:
    name = PendingDirectory(tmp_path / "step_0").name
    lock_path(tmp_path, name).touch()
    save_step(tmp_path, 1)
    assert not list_hidden_names(tmp_path)


def test_an_owner_that_is_alive_against_all_evidence_cannot_publish_a_part(tmp_path: Path) -> None:
    """Its host was cut off, so that the file server gave its lock away."""
    staging = PendingDirectory(tmp_path / "step_1")
    staging.create()
    (staging.path / "model").mkdir()
    lock_path(tmp_path, staging.name).unlink()  # the lock is on no named file any more
    removed = []

    def publish_meanwhile(path: Path) -> None:
        if path.exists():
            removed.append(path)
            with pytest.raises(StorageError):
                staging.publish()
        remove_tree(path)

    remove_tree = directory_trees.remove_tree
    with mock.patch("rankless.run.folder_removal.remove_tree", publish_meanwhile):
        clean_up(tmp_path)
    assert removed
    assert not (tmp_path / "step_1").exists()


def test_a_checkpoint_that_is_being_deleted_is_left_to_the_process_that_deletes_it(tmp_path: Path) -> None:
    """Another process that removed some of its files would make it look like a checkpoint of another job."""
    for step in (1, 2):
        save_step(tmp_path, step)
    expired = rankless.list_checkpoints(tmp_path)[:1]
    cleaned = []

    def rename_and_clean_up(source: Path, target: Path) -> None:
        rename_path(source, target)
        cleaned.append(clean_up(tmp_path))

    rename_path = atomic_rename.rename_path
    with mock.patch("rankless.run.folder_removal.rename_path", rename_and_clean_up):
        assert list(delete_checkpoints(expired)) == expired
    assert cleaned == [[]]
    assert list_names(tmp_path) == ["step_2"]


def test_a_full_disk_does_not_keep_checkpoints_from_being_deleted(tmp_path: Path) -> None:
    for step in (1, 2):
        save_step(tmp_path, step)
    expired, full = rankless.list_checkpoints(tmp_path)[:1], OSError(errno.ENOSPC, "No space left on device")
    with mock.patch("rankless.run.owned_lock.write_fully", side_effect=full):
        assert list(delete_checkpoints(expired)) == expired
    assert list_names(tmp_path) == ["step_2"]


def test_a_deletion_that_was_interrupted_is_finished_by_another_process(tmp_path: Path) -> None:
    for step in (1, 2):
        save_step(tmp_path, step)
    interrupted = mock.patch("rankless.run.folder_removal.remove_tree", side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt), interrupted:
        list(delete_checkpoints(rankless.list_checkpoints(tmp_path)[:1]))
    clean_up(tmp_path)
    assert list_names(tmp_path) == ["step_2"]


def test_a_replaced_checkpoint_is_left_to_the_save_that_replaced_it(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    cleaned = []

    def clean_up_and_remove(staging: PendingDirectory) -> None:
        cleaned.append((clean_up(tmp_path), staging.displaced_path.exists()))
        remove_displaced(staging)

    remove_displaced = PendingDirectory.remove_displaced
    with mock.patch.object(PendingDirectory, "remove_displaced", clean_up_and_remove):
        save_step(tmp_path, 1, overwrite=True)
    assert cleaned == [([], True)]
    assert list_names(tmp_path) == ["step_1"]


def test_a_link_in_place_of_a_lock_file_is_not_followed(tmp_path: Path) -> None:
    name = PendingDirectory(tmp_path / "step_1").name
    lock_path(tmp_path, name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="symbolic links"):
        acquire_lock(tmp_path, name)
    clean_up(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_lock_is_released_even_if_its_directory_cannot_be_looked_at(tmp_path: Path) -> None:
    folder = leave_behind(tmp_path, posix.host_id())
    lock = lock_pending(folder)
    with mock.patch("rankless.run.pending_lock.path_exists", side_effect=StorageError(errno.EIO, "input/output error")):
        lock.close()
    lock_pending(folder).close()


def test_a_hidden_link_to_itself_is_no_leftover(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    (tmp_path / ".loop").symlink_to(".loop")
    assert list_stale_directories(tmp_path) == []


def test_a_staging_directory_with_files_of_another_process_is_refused(tmp_path: Path) -> None:
    staging = PendingDirectory(tmp_path / "step_1")
    staging.path.mkdir()
    PendingDirectory(staging.final, staging.name).create()  # as after a call that NFS has sent twice
    (staging.path / "file").touch()
    with pytest.raises(StorageError, match="exists"):
        PendingDirectory(staging.final, staging.name).create()


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[PendingDirectory]:
    staging = PendingDirectory(tmp_path / "step_1")
    staging.create()
    yield staging
    staging.discard()


def test_a_host_that_sees_the_lock_says_so_in_the_file(owner: PendingDirectory, tmp_path: Path) -> None:
    before = lock_path(tmp_path, owner.name).read_text().split()
    with mock.patch("rankless.run.owned_lock.host_id", return_value=OTHER_HOST):
        confirm_lock(owner.path)
    assert lock_path(tmp_path, owner.name).read_text().split() == [*before, OTHER_HOST]
    assert before == [posix.host_id()]


def test_a_host_that_does_not_see_the_lock_says_so_in_the_log(
    owner: PendingDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = lock_path(tmp_path, owner.name).read_text()
    with (
        mock.patch("rankless.run.owned_lock.host_id", return_value=OTHER_HOST),
        mock.patch("rankless.storage.file_lock._try_lock", return_value=True),
        caplog.at_level(logging.WARNING),
    ):
        confirm_lock(owner.path)
    assert "do not see each other's locks" in caplog.text
    assert lock_path(tmp_path, owner.name).read_text() == before


def test_the_owner_s_own_host_is_no_witness(owner: PendingDirectory, tmp_path: Path) -> None:
    before = lock_path(tmp_path, owner.name).read_text()
    confirm_lock(owner.path)
    assert lock_path(tmp_path, owner.name).read_text() == before


def save_component(path: str) -> None:
    rankless.save_model({"w": torch.ones(8)}, f"{path}/model")


def convert_folder(path: str) -> None:
    rankless.convert(f"{path}/run", f"{path}/converted", to="native")


def save_by_dcp(path: str) -> None:
    dcp.save({"w": torch.ones(8)}, storage_writer=FileSystemWriter(f"{path}/dcp"))


def save_by_lightning(path: str) -> None:
    with atomic_output(Path(path, "a.ckpt"), Replaceable(("lightning",), "a checkpoint of Lightning", "a.ckpt")) as out:
        if dist.get_rank() == 0:
            torch.save({}, out)


def write_from_two_hosts(path: str, write: Callable[[str], None]) -> list[str]:
    """Write from two ranks that play two hosts, and return what is in the lock file before the output appears."""
    host, contents = f"host {dist.get_rank()}", []

    def look_and(publish: Any) -> Any:
        def look_and_publish(staging: PendingDirectory, *args: Any) -> None:
            contents.append(lock_path(staging.final.parent, staging.name).read_text())
            publish(staging, *args)

        return look_and_publish

    with (
        mock.patch("rankless.run.owned_lock.host_id", return_value=host),
        mock.patch.object(PendingDirectory, "publish", look_and(PendingDirectory.publish)),
        mock.patch.object(PendingDirectory, "replace", look_and(PendingDirectory.replace)),
    ):
        write(path)
    return contents


@pytest.mark.parametrize("write", [save_component, convert_folder, save_by_dcp, save_by_lightning])
def test_whatever_is_written_from_several_hosts_has_a_witness_of_its_lock(
    ranks: Ranks, tmp_path: Path, write: Callable[[str], None]
) -> None:
    save_step(tmp_path / "run", 1)
    contents = ranks(2, write_from_two_hosts, str(tmp_path), write)
    assert [raw.split() for raw in contents[0]] == [["host", "0", "host", "1"]]
    assert not contents[1]


def save_from_two_hosts(path: str) -> str | None:
    """Save from ranks that play two hosts, and return what rank 0 finds in the lock file before it commits."""
    host, publish, content = f"host {dist.get_rank() // 2}", PendingDirectory.publish, []

    def look_and_publish(staging: PendingDirectory, entry: str = "") -> None:
        content.append(lock_path(staging.final.parent, staging.name).read_text())
        publish(staging, entry)

    with (
        mock.patch("rankless.save.save_negotiation.host_id", return_value=host),
        mock.patch("rankless.run.owned_lock.host_id", return_value=host),
        mock.patch.object(PendingDirectory, "publish", look_and_publish),
    ):
        for number in range(2):
            rankless.save_checkpoint(path, f"step_{number}", {"w": torch.ones(8)})
    return content[1] if content else None


def test_in_every_save_from_several_hosts_one_other_host_confirms_the_lock(ranks: Ranks, tmp_path: Path) -> None:
    content = ranks(4, save_from_two_hosts, str(tmp_path))
    assert [raw[start : start + 64].strip() for raw in content[:1] for start in (0, 64)] == ["host 0", "host 1"]
    assert content[1:] == [None] * 3


def keep_open_files(folder: Path) -> Any:
    """Remove files as an NFS client does whose host has them open: they get another name until they are closed."""
    unlink = os.unlink

    def rename_open_file(path: Any, *, dir_fd: int | None = None) -> None:
        if Path(path).name.startswith(".nfs"):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        if Path(path).name == "model.safetensors":
            os.rename(path, f".nfs{os.urandom(8).hex()}", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        else:
            unlink(path, dir_fd=dir_fd)

    return mock.patch.object(os, "unlink", rename_open_file)


def test_a_checkpoint_whose_files_are_open_on_this_host_is_removed_when_they_are_closed(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    with keep_open_files(tmp_path):
        rankless.save_checkpoint(tmp_path, "step_2", {"w": torch.ones(2)}, keep=1)  # without a warning
        (left,) = list_hidden_names(tmp_path)
        assert (name := parse_hidden_name(left)) is not None
        assert (name.tag, name.state) == ("step_1", "removed")
        assert [path.name for path in tmp_path.iterdir() if path.is_dir() and not path.name.startswith(".")] == [
            "step_2"
        ]
        clean_up(tmp_path)
    clean_up(tmp_path)
    assert not list_hidden_names(tmp_path)


def test_a_directory_that_another_process_fills_meanwhile_is_still_an_error(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x/file").touch()
    with (
        mock.patch.object(os, "unlink", side_effect=lambda *_, **__: None),
        pytest.raises(StorageError, match="not empty"),
    ):
        directory_trees.remove_tree(tmp_path / "x")
