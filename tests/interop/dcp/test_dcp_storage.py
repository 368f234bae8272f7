"""Tests the storage writer and reader for ``dcp.save`` and ``dcp.load``: torch's format, atomic and verified."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

import rankless
from rankless.dcp import FileSystemReader, FileSystemWriter
from rankless.dcp.pending_dcp import create_pending, find_pending, pending_directory
from rankless.dcp.reader import checksums_json
from rankless.dcp.reader.checksums_json import ChecksumRecord, VerifiedReader
from rankless.errors import CorruptCheckpointError, InvalidArgumentError, StorageError, UnsafePickleError
from rankless.ondisk.block_crcs import crc64
from rankless.run.pending_dir import PendingDirectory
from rankless.storage import atomic_rename
from rankless.storage.direct_io import BufferedReader
from rankless.storage.reader_pool import ReaderPool
from tests.helpers.dcp_states import VALUES, make_state, make_tensors
from tests.helpers.equality import equal_bits
from tests.helpers.pool import Ranks
from tests.helpers.unsafe_pickles import UNSAFE_OBJECTS

pytestmark = pytest.mark.filterwarnings("ignore")


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def save(path: str, step: int, **options: Any) -> None:
    dcp.save(make_state(step), storage_writer=FileSystemWriter(path, **options))


def load(path: str, step: int, theirs: bool = False) -> None:
    actual = make_state(-1)
    actual |= {"list": None, "pair": None}
    dcp.load(actual, checkpoint_id=path) if theirs else dcp.load(actual, storage_reader=FileSystemReader(path))
    for name, tensor in make_tensors(step).items():
        assert equal_bits(full(actual["model"][name]), tensor), name
    assert actual["step"] == step
    assert (actual["list"], actual["groups"]) == (VALUES["list"], VALUES["groups"])
    assert torch.equal(actual["pair"][0], torch.arange(3))
    assert actual["pair"][1] == {"x": 2.5}


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


@pytest.mark.parametrize(
    ("n", "options"),
    [(1, {}), (2, {}), (4, {}), (2, {"thread_count": 2}), (4, {"single_file_per_rank": False})],
    ids=str,
)
def test_what_is_saved_is_loaded_by_us_and_by_torch_on_any_ranks(
    ranks: Ranks, tmp_path: Path, n: int, options: dict[str, Any]
) -> None:
    path = str(tmp_path / "c")
    for step in (1, 2):
        ranks(n, save_with, path, step, options)
    assert names(tmp_path) == ["c"]
    for m in (1, 2, 4) if not options else (2,):
        ranks(m, load, path, 2)
        ranks(m, load, path, 2, True)
    opened = rankless.open(path)
    assert all(equal_bits(opened[f"model/{name}"], tensor) for name, tensor in make_tensors(2).items())


def save_with(path: str, step: int, options: dict[str, Any]) -> None:
    save(path, step, **options)


def save_plain(path: str, step: int) -> None:
    dcp.save(make_state(step), checkpoint_id=path)


@pytest.mark.parametrize("n", [1, 4])
def test_we_read_what_torch_writes(ranks: Ranks, tmp_path: Path, n: int) -> None:
    ranks(n, save_plain, str(tmp_path / "c"), 5)
    ranks(2, load, str(tmp_path / "c"), 5)


def save_in_background(path: str) -> None:
    for step in (1, 2):
        future = dcp.async_save(make_state(step), checkpoint_id=path, storage_writer=FileSystemWriter("elsewhere"))
        future.result()


@pytest.mark.parametrize("n", [1, 2])
def test_asynchronous_saves(ranks: Ranks, tmp_path: Path, n: int) -> None:
    ranks(n, save_in_background, str(tmp_path / "c"))
    ranks(1, load, str(tmp_path / "c"), 2)
    assert names(tmp_path) == ["c"]


#: A rank whose saves are written by a process beside it, which torch starts.
SCRIPT = """
import sys, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from rankless.dcp import FileSystemWriter
from tests.helpers.dcp_states import make_state
dist.init_process_group("gloo")
for step in (1, 2):
    writer = FileSystemWriter(sys.argv[1], thread_count=3)
    future = dcp.async_save(
        make_state(step), storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS
    )
    future.result()
dist.destroy_process_group()
"""


def test_asynchronous_saves_by_a_process_of_their_own(ranks: Ranks, tmp_path: Path) -> None:
    """The pool's ranks may not start processes; torchrun's may."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    script = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path / "c")]
    root = Path(__file__).parents[3]
    # The processes join torchrun's store. By default torch finds a free port, and binds it some seconds later.
    about = os.environ | {"DCP_USE_PREFIX_STORE": "1"}
    done = subprocess.run(
        [*torchrun, *script], cwd=root, env=about, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    ranks(1, load, str(tmp_path / "c"), 2)
    assert names(tmp_path) == ["c"]


# ---------------------------------------------------------------------------------------------------------------
# Complete or not there


def fail(path: str, where: str, rank: int, before: bool) -> None:
    """One rank fails at some point of a save; then one succeeds."""

    def broken(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    if before:
        save(path, 1)
    failing = mock.patch(where, broken) if dist.get_rank() == rank else contextlib.nullcontext()
    with failing, pytest.raises(CheckpointException, match="No space left"):
        save(path, 2)
    dist.barrier()
    assert names(Path(path).parent) == (["c"] if before else [])
    dist.barrier()
    if before:
        load(path, 1)
    save(path, 3)
    load(path, 3)
    assert names(Path(path).parent) == ["c"]


@pytest.mark.parametrize(
    ("where", "rank", "before"),
    [
        ("torch.save", 1, True),
        ("torch.save", 0, False),
        ("rankless.dcp.storage_writer.hash_chunks", 1, False),
        ("rankless.storage.posix.sync_tree", 0, True),
        ("rankless.storage.posix.write_small", 0, True),
        ("rankless.storage.posix.fsync_directory", 0, True),
        ("rankless.storage.posix.make_directory", 0, False),
    ],
)
def test_a_rank_that_fails_leaves_what_was_there(
    ranks: Ranks, tmp_path: Path, where: str, rank: int, before: bool
) -> None:
    ranks(2, fail, str(tmp_path / "c"), where, rank, before)


def test_a_thread_that_fails_fails_the_save(tmp_path: Path) -> None:
    """torch loses the error, and says that all is saved."""
    real = torch.save

    def broken(value: Any, *rest: Any, **options: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.shape == (7, 5):
            raise OSError(28, "No space left on device")
        return real(value, *rest, **options)

    for _ in range(3):
        with mock.patch("torch.save", broken), pytest.raises(CheckpointException, match=r"were not written|No space"):
            save(str(tmp_path / "c"), 1, thread_count=2)
    assert not (tmp_path / "c").exists()


def test_a_save_that_was_killed_leaves_no_trace_after_the_next(tmp_path: Path) -> None:
    path = tmp_path / "c"
    save(str(path), 1)
    killed = create_pending(path, overwrite=True)
    (killed.path / "__0_0.distcp").write_bytes(b"half")
    killed.release()
    assert len(names(tmp_path)) == 2
    load(str(path), 1)
    save(str(path), 3)
    load(str(path), 3)
    assert names(tmp_path) == ["c"]


def test_a_save_that_was_killed_between_two_renames(tmp_path: Path) -> None:
    """As it may be where names cannot be exchanged: the checkpoint that was there is found again."""
    path = tmp_path / "c"
    save(str(path), 1)
    create_pending(path, overwrite=True).release()
    path.rename(pending_directory(path).displaced_path)
    load(str(path), 1)
    assert len(names(tmp_path)) == 3  # with the pending directory and its lock file
    shutil.copytree(path, pending_directory(path).displaced_path)  # one that was replaced, but not removed any more
    save(str(path), 2)
    load(str(path), 2)
    assert names(tmp_path) == ["c"]


def test_a_checkpoint_that_has_lost_its_name_to_a_save_that_failed_gets_it_back(tmp_path: Path) -> None:
    """Where names cannot be exchanged, and the first of two renames cannot be taken back."""
    path = tmp_path / "c"
    save(str(path), 1)
    refused = OSError(errno.EIO, "input/output error")
    rename = Path.rename

    def rename_aside(source: Path, target: Path) -> Path:
        if target == path:
            raise refused
        return rename(source, target)

    with (
        mock.patch.object(atomic_rename, "_renameat2", return_value=False),
        mock.patch.object(atomic_rename, "_rename_new", side_effect=refused),
        mock.patch.object(Path, "rename", rename_aside),
        pytest.raises(CheckpointException, match="Input/output"),
    ):
        save(str(path), 2)
    assert not path.exists()
    save(str(tmp_path / "other"), 3)  # which looks at the folder, and gives the name back
    load(str(path), 1)
    save(str(path), 4)
    load(str(path), 4)
    assert names(tmp_path) == ["c", "other"]


def test_two_that_save_to_one_path_do_not_mix(tmp_path: Path) -> None:
    held = create_pending(tmp_path / "c", overwrite=True)
    with pytest.raises(CheckpointException, match="another process saves"):
        save(str(tmp_path / "c"), 1)
    held.discard()
    save(str(tmp_path / "c"), 1)


def test_a_save_that_removes_what_it_replaced_still_has_the_path_to_itself(tmp_path: Path) -> None:
    """All saves to a path use the same hidden names."""
    path, refused = tmp_path / "c", []
    save(str(path), 1)

    def remove_late(staging: PendingDirectory) -> None:
        with pytest.raises(StorageError, match="another process uses"):
            create_pending(path, overwrite=True)
        refused.append(staging.displaced_path.exists())
        remove_displaced(staging)

    remove_displaced = PendingDirectory.remove_displaced
    with mock.patch.object(PendingDirectory, "remove_displaced", remove_late):
        save(str(path), 2)
    assert refused == [True]
    load(str(path), 2)
    assert names(tmp_path) == ["c"]


def test_a_host_asks_the_server_which_directory_has_the_name_of_staging(tmp_path: Path) -> None:
    """All saves to a path use one hidden name, which a client of NFS remembers until the parent is listed."""
    listed: list[Path] = []
    with (
        mock.patch("rankless.dcp.pending_dcp.is_local", return_value=False),
        mock.patch("rankless.dcp.pending_dcp.posix.list_names", side_effect=listed.append),
    ):
        assert find_pending(tmp_path / "c") == pending_directory(tmp_path / "c").path
    assert listed == [tmp_path]


def test_files_in_another_directory_fail_the_save(tmp_path: Path) -> None:
    """As if the host of a rank had taken an earlier save's directory for that of this one."""
    path, other = tmp_path / "c", tmp_path / "other"
    save(str(path), 1)
    other.mkdir()
    with (
        mock.patch("rankless.dcp.save_output_folder.find_pending", return_value=other),
        pytest.raises(CheckpointException, match=r"does not have __0_0\.distcp"),
    ):
        save(str(path), 2)
    load(str(path), 1)
    assert names(tmp_path) == ["c", "other"]


def test_what_is_in_the_way_stays(tmp_path: Path) -> None:
    path = tmp_path / "c"
    save(str(path), 1)
    with pytest.raises(CheckpointException, match="overwrite=True"):
        save(str(path), 2, overwrite=False)
    (path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointException, match=r"notes\.txt is no file of a checkpoint"):
        save(str(path), 2)
    load(str(path), 1)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointException, match="not a folder"):
        save(str(tmp_path / "file"), 2)
    assert names(tmp_path) == ["c", "file"]
    (tmp_path / "empty").mkdir()
    save(str(tmp_path / "empty"), 2)
    load(str(tmp_path / "empty"), 2)


def test_ranks_that_do_not_agree_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="use_collectives"):
        FileSystemWriter(tmp_path).set_up_storage_writer(True, rank=0, use_collectives=False)


# ---------------------------------------------------------------------------------------------------------------
# Verified


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(str(tmp_path / "c"), 1)
    return tmp_path / "c"


def test_every_flipped_byte_of_a_record_is_found(saved: Path) -> None:
    """torch loads all of these, but for those that make its zip reader stumble."""
    file = saved / "__0_0.distcp"
    raw = file.read_bytes()
    places = pickle.loads((saved / ".metadata").read_bytes()).storage_data  # noqa: S301
    read = [info for index, info in places.items() if index.fqn != "model.empty"]  # which nobody needs to read
    for at in (at for info in read for at in range(info.offset, info.offset + info.length, 97)):
        file.write_bytes(raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :])
        with pytest.raises(CheckpointException, match=r"__0_0\.distcp is corrupt: its bytes"):
            load(str(saved), 1)
    file.write_bytes(raw)
    load(str(saved), 1)


def test_metadata_and_values_are_verified_whoever_reads_them(saved: Path) -> None:
    file = saved / "__0_0.distcp"
    raw = file.read_bytes()
    places = pickle.loads((saved / ".metadata").read_bytes()).storage_data  # noqa: S301
    info = next(info for index, info in places.items() if index.fqn == "pair")
    for at in range(info.offset, info.offset + info.length, 61):
        file.write_bytes(raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :])
        with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp is corrupt: its bytes"):
            rankless.open(saved)
    file.write_bytes(raw)
    assert rankless.open(saved).values["user_content"]["step"] == 1
    metadata = (saved / ".metadata").read_bytes()
    (saved / ".metadata").write_bytes(metadata.replace(b"model.rows", b"model.cows"))
    with pytest.raises(CorruptCheckpointError):
        rankless.open(saved)


def test_the_metadata_of_another_save_is_found(saved: Path, tmp_path: Path) -> None:
    save(str(tmp_path / "d"), 1)
    shutil.copy(tmp_path / "d/.metadata", saved / ".metadata")
    with pytest.raises(CorruptCheckpointError, match="does not match"):
        FileSystemReader(saved).read_metadata()


def test_checksums_that_are_none(saved: Path) -> None:
    file = saved / checksums_json.NAME
    good = json.loads(file.read_bytes())
    unordered = {name: records[::-1] for name, records in good["files"].items()}
    for change in ({"version": 2}, {"metadata": 5}, {"files": {}}, {"files": unordered}):
        file.write_text(json.dumps({**good, **change}))
        with pytest.raises(CheckpointException, match=r"checksums\.json|the checksums of .* do not cover bytes"):
            load(str(saved), 1)
    file.write_bytes(b"[")
    with pytest.raises(CheckpointException, match=r"checksums\.json"):
        load(str(saved), 1)
    file.unlink()
    load(str(saved), 1)


def test_records_that_begin_at_the_same_byte_are_told_apart(tmp_path: Path) -> None:
    """As only somebody else would write them."""
    data = bytes(range(12))
    (tmp_path / "f").write_bytes(data)
    places = [(0, 4), (8, 4), (0, 12)]
    records = [ChecksumRecord(start, size, f"{crc64(data[start : start + size]):016x}") for start, size in places]
    verified = VerifiedReader(ReaderPool(), tmp_path, {"f": records})
    for start, stop in [(0, 4), (9, 12), (0, 4)]:
        buffer = bytearray(stop - start)
        verified.read(tmp_path / "f", start, memoryview(buffer))
        assert buffer == data[start:stop]


def test_of_a_chunk_no_more_is_read_than_is_asked_for(tmp_path: Path) -> None:
    """torch reads all of it. Here, at most a block more at either end, and without checksums just what is asked for."""
    dcp.save({"w": torch.arange(2**20).view(1024, 1024)}, checkpoint_id=tmp_path / "c", no_dist=True)
    reader = FileSystemReader(tmp_path / "c")
    metadata = reader.read_metadata()
    target = torch.zeros(3, 1024, dtype=torch.int64)
    read = []
    index = next(iter(metadata.storage_data))
    offsets, lengths = torch.Size([500, 0]), torch.Size([3, 1024])
    item = ReadItem(LoadItemType.TENSOR, index, torch.Size([0, 0]), index, offsets, lengths)
    planner = mock.Mock(resolve_tensor=lambda _: target)
    whole_read = BufferedReader.read

    def counted(self: Any, offset: int, into: memoryview) -> None:
        read.append(len(into))
        whole_read(self, offset, into)

    with mock.patch.object(BufferedReader, "read", counted):
        reader.read_data(LoadPlan([item]), planner)
    assert torch.equal(target, torch.arange(2**20).view(1024, 1024)[500:503])
    assert sum(read) < 3 * 1024 * 8 + 8192


@pytest.mark.parametrize("kind", UNSAFE_OBJECTS)
def test_no_code_of_the_metadata_or_of_values_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    path = tmp_path / "c"
    dcp.save({"w": torch.ones(2), "evil": UNSAFE_OBJECTS[kind]}, checkpoint_id=path, no_dist=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointException, match="which rankless does not run"):
        dcp.load({"evil": None}, storage_reader=FileSystemReader(path), no_dist=True)
    metadata = pickle.loads((path / ".metadata").read_bytes())  # noqa: S301
    metadata.planner_data = UNSAFE_OBJECTS[kind]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnsafePickleError):
        FileSystemReader(path).read_metadata()
    assert names(tmp_path) == ["c"]


class Mine:
    """A type of somebody's own."""


def test_values_of_any_class_for_those_who_trust_them(tmp_path: Path) -> None:
    dcp.save({"mine": Mine()}, storage_writer=FileSystemWriter(tmp_path / "c"), no_dist=True)
    actual: dict[str, Any] = {"mine": None}
    dcp.load(actual, storage_reader=FileSystemReader(tmp_path / "c", weights_only=False), no_dist=True)
    assert isinstance(actual["mine"], Mine)


def test_a_file_in_memory_is_one_again(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2), "blob": io.BytesIO(b"bytes")}, checkpoint_id=tmp_path / "c", no_dist=True)
    actual: dict[str, Any] = {"blob": None}
    dcp.load(actual, storage_reader=FileSystemReader(tmp_path / "c"), no_dist=True)
    assert actual["blob"].getvalue() == b"bytes"


def test_metadata_that_lacks_a_chunk_is_refused(tmp_path: Path) -> None:
    """With torch, the tensor keeps what it had."""
    path = tmp_path / "c"
    dcp.save({"w": torch.ones(4)}, checkpoint_id=path, no_dist=True)
    metadata = pickle.loads((path / ".metadata").read_bytes())  # noqa: S301
    metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size([2])
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpointError, match="is incomplete"):
        FileSystemReader(path).read_metadata()


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException):
        dcp.load({"w": torch.ones(1)}, storage_reader=FileSystemReader(tmp_path / "none"), no_dist=True)
    with pytest.raises(StorageError):
        FileSystemWriter(tmp_path).finish(mock.Mock(), [])


class Failing(dcp.DefaultSavePlanner):
    """Fails when the folder is there and nothing is written yet, of which torch tells no writer."""

    def finish_plan(self, new_plan: Any) -> Any:
        raise ValueError(f"out of luck: {len(new_plan.items)} items")


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_a_writer_is_used_again_after_a_failed_save(tmp_path: Path) -> None:
    """Also without a ``checkpoint_id``, where torch does not say that another save begins."""
    writer = FileSystemWriter(tmp_path / "c")
    for _ in range(2):
        with pytest.raises(CheckpointException, match="out of luck"):
            dcp.save({"w": torch.ones(2)}, storage_writer=writer, planner=Failing(), no_dist=True)
    dcp.save({"w": torch.ones(2)}, storage_writer=writer, no_dist=True)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_default_device_does_not_matter(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(10.0)}, storage_writer=FileSystemWriter(tmp_path / "c"), no_dist=True)
    state = {"w": torch.zeros(10)}
    with torch.device("meta"):
        dcp.load(state, storage_reader=FileSystemReader(tmp_path / "c"), no_dist=True)
    assert torch.equal(state["w"], torch.arange(10.0))
