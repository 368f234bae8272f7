"""DCP saves into an object store: readers of DCP find the old checkpoint or the new one, whatever happens."""

from __future__ import annotations

import dataclasses
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import rankless
from rankless.dcp import FileSystemReader, FileSystemWriter, save_output_objects
from rankless.engine.io import upload_files, upload_parts
from rankless.storage.object_path import ObjectPath
from tests.helpers.fake_http import BUCKET, disconnect
from tests.helpers.fake_s3 import FakeS3
from tests.helpers.object_histories import CutAt, LoseOnce, Moment, Start, every_moment, every_reply, fast_small_parts
from tests.helpers.pool import Ranks

pytestmark = pytest.mark.filterwarnings("ignore")

SIZE = 3000


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeS3]:
    fake, folder = FakeS3(), tmp_path / "temporary"
    folder.mkdir()
    with (
        fake.connected(),
        fast_small_parts(),
        mock.patch.object(upload_parts, "PART_BYTES", 4096),
        mock.patch.object(upload_files, "PART_BYTES", 4096),
        mock.patch("tempfile.gettempdir", return_value=str(folder)),
    ):
        yield fake
        assert not [*folder.rglob("*.distcp")]


def place(fake: FakeS3) -> ObjectPath:
    return fake.store_at("http://fake", retry_seconds=1.0).path(f"{BUCKET}/run/c")


def state(value: float) -> dict[str, object]:
    return {"weight": torch.full((SIZE,), float(value)), "bias": torch.full((3,), float(value)), "step": int(value)}


def save(path: ObjectPath, value: float, **options: object) -> None:
    dcp.save(state(value), storage_writer=FileSystemWriter(path, **options), no_dist=True)  # type: ignore[arg-type]


def load(path: Path, reader: object | None = None) -> float:
    """The value of a checkpoint, all of which is the same."""
    loaded = state(-1.0)
    dcp.load(loaded, storage_reader=reader or FileSystemReader(path), no_dist=True)  # type: ignore[arg-type]
    weight, bias, step = loaded["weight"], loaded["bias"], loaded["step"]
    assert isinstance(weight, torch.Tensor)
    assert isinstance(bias, torch.Tensor)
    assert {*weight.tolist(), *bias.tolist()} == {float(str(step))}
    return float(str(step))


def names(path: ObjectPath) -> set[str]:
    return {info.path.name for info in path.store.list_objects(path)}


def download(path: ObjectPath, folder: Path) -> Path:
    folder.mkdir()
    for info in path.store.list_objects(path):
        (folder / info.path.name).write_bytes(path.store.read_small(info.path))
    return folder


@pytest.mark.parametrize("options", [{}, {"thread_count": 2}, {"single_file_per_rank": False}])
def test_torch_reads_a_copy(fake: FakeS3, tmp_path: Path, options: dict[str, object]) -> None:
    path = place(fake)
    save(path, 1, **options)
    assert load(path) == 1
    assert not fake.uploads
    copy = download(path, tmp_path / "copy")
    assert load(copy, dcp.FileSystemReader(copy)) == 1
    assert load(copy) == 1


def test_every_byte_is_verified(fake: FakeS3, tmp_path: Path) -> None:
    save(place(fake), 1)
    copy = download(place(fake), tmp_path / "copy")
    (data,) = copy.glob("*.distcp")
    raw = bytearray(data.read_bytes())
    at = raw.index(torch.full((SIZE,), 1.0).numpy().tobytes())
    raw[at] ^= 1
    data.write_bytes(raw)
    with pytest.raises(CheckpointException, match="do not match their CRC"):
        load(copy)


def test_a_save_replaces_the_checkpoint_and_leaves_no_file_of_it(fake: FakeS3) -> None:
    path = place(fake)
    path.store.replace_small(path / "notes.txt", b"mine")
    save(path, 1)
    before = names(path)
    save(path, 2)
    assert load(path) == 2
    assert names(path) & before == {".metadata", "notes.txt"}
    assert len(names(path)) == len(before)


def test_files_that_torch_has_written_there_are_replaced(fake: FakeS3, tmp_path: Path) -> None:
    path = place(fake)
    dcp.save(state(1), storage_writer=dcp.FileSystemWriter(tmp_path / "torch"), no_dist=True)
    for file in (tmp_path / "torch").iterdir():
        path.store.replace_small(path / file.name, file.read_bytes())
    assert load(path) == 1
    save(path, 2)
    assert load(path) == 2
    assert "__0_0.distcp" not in names(path)


def test_without_overwrite_a_checkpoint_stays(fake: FakeS3) -> None:
    path = place(fake)
    save(path, 1)
    before = names(path)
    with pytest.raises(CheckpointException, match="overwrite=True"):
        save(path, 2, overwrite=False)
    assert load(path) == 1
    assert names(path) == before


def test_of_two_saves_without_overwrite_one_wins(fake: FakeS3) -> None:
    path, others = place(fake), []

    def save_meanwhile(request: object, stage: str) -> None:
        if stage == "before" and getattr(request, "key", "").endswith(".metadata") and request.kind == "put":  # type: ignore[attr-defined]
            fake.on_request = lambda *_: None
            save(path, 7, overwrite=False)
            others.append(names(path))

    fake.on_request = save_meanwhile
    with pytest.raises(CheckpointException, match="meanwhile"):
        save(path, 2, overwrite=False)
    assert others
    assert load(path) == 7
    assert len(names(path)) == 3  # no file of the other one


def test_leftovers_are_removed_when_they_are_a_day_old(fake: FakeS3) -> None:
    path = place(fake)
    save(path, 1)
    path.store.replace_small(path / f"__0_0-{'a' * 16}.distcp", b"dead")
    path.store.replace_small(path / "__0_0.distcp", b"not of rankless")
    path.store.create_upload(path / f"__1_0-{'b' * 16}.distcp", {})
    save(path, 2)
    assert f"__0_0-{'a' * 16}.distcp" in names(path)
    fake.clock = lambda: time.time() + 1.0
    with mock.patch.object(save_output_objects, "ABANDONED_SECONDS", -10.0):
        save(path, 3)
    assert load(path) == 3
    assert f"__0_0-{'a' * 16}.distcp" not in names(path)
    assert "__0_0.distcp" in names(path)
    assert not fake.uploads


def test_a_repeated_request_does_not_name_files_that_another_job_has_removed(fake: FakeS3) -> None:
    """Job A loses the reply to its commit, job B replaces A's checkpoint, and A repeats its request."""
    path, lost = place(fake), []

    def lose_reply(request: object, stage: str) -> None:
        is_commit = getattr(request, "method", "") == "PUT" and getattr(request, "key", "").endswith(".metadata")
        if is_commit and stage == "after" and not lost:
            lost.append(request)
            save(path, 2)
            disconnect()

    fake.on_request = lose_reply
    save(path, 1)
    assert lost
    assert load(path) == 1
    with mock.patch.object(save_output_objects, "_REPEAT_SECONDS", -10.0):
        save(path, 3)  # removes what the other one has left
    assert load(path) == 3
    assert len(names(path)) == 3


def test_files_that_another_process_has_just_saved_are_removed_by_a_later_save(fake: FakeS3) -> None:
    path = place(fake)
    save(path, 1)
    save_output_objects._saved_here.clear()  # as in another process
    save(path, 2)
    assert len(names(path)) == 5
    with mock.patch.object(save_output_objects, "_REPEAT_SECONDS", -10.0):
        save(path, 3)
    assert len(names(path)) == 3
    assert load(path) == 3


def test_only_names_of_data_files_are_removed(fake: FakeS3) -> None:
    path = place(fake)
    save(path, 1)
    path.store.replace_small(path / "notes.txt", b"mine")
    data = next(name for name in names(path) if name.endswith(".distcp"))
    metadata = pickle.loads(path.store.read_small(path / ".metadata"))  # noqa: S301 - it was just written
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = dataclasses.replace(info, relative_path="notes.txt")
    path.store.replace_small(path / ".metadata", pickle.dumps(metadata))
    save(path, 2)
    assert {"notes.txt", data} <= names(path)


def test_a_run_of_rankless_is_not_saved_to(fake: FakeS3) -> None:
    run = place(fake)
    rankless.save_checkpoint(run, "t", {"w": torch.zeros(2)})
    for path in (run, run / "t"):
        with pytest.raises(CheckpointException, match="run or a checkpoint of rankless"):
            save(path, 1)


def test_nothing_is_no_checkpoint(fake: FakeS3, tmp_path: Path) -> None:
    for path in (place(fake), tmp_path, tmp_path / "missing"):
        planner = DefaultLoadPlanner(allow_partial_load=True)
        with pytest.raises(CheckpointException, match="no distributed checkpoint in"):
            dcp.load(state(-1), storage_reader=FileSystemReader(path), planner=planner, no_dist=True)


def test_a_full_directory_for_temporary_files_is_named(fake: FakeS3) -> None:
    usage = mock.Mock(f_bavail=1, f_frsize=4096)
    with (
        mock.patch("os.statvfs", return_value=usage),
        pytest.raises(CheckpointException, match=r"temporary/rankless-\d+ has 4,096 bytes free"),
    ):
        save(place(fake), 1)
    assert not names(place(fake))


def moments(fake: FakeS3) -> Start:
    save(place(fake), 1)
    return Start(fake)


def test_a_save_that_dies_at_any_request_leaves_the_old_or_the_new(fake: FakeS3) -> None:
    start = moments(fake)
    outcomes = set()
    for number, stage in _moments(fake, start, every_moment):
        start.restore()
        fake.on_request = CutAt(number, stage)
        with pytest.raises(CheckpointException):
            save(place(fake), 2)
        start_of_next(fake)
        outcomes.add(load(place(fake)))
        with (
            mock.patch.object(save_output_objects, "ABANDONED_SECONDS", -10.0),
            mock.patch.object(save_output_objects, "_REPEAT_SECONDS", -10.0),
        ):
            save(place(fake), 3)
        assert load(place(fake)) == 3
        assert len(names(place(fake))) == 3
        assert not fake.uploads
    assert outcomes == {1.0, 2.0}


def test_a_lost_reply_does_no_harm(fake: FakeS3) -> None:
    start = moments(fake)
    for number, stage in _moments(fake, start, every_reply):
        start.restore()
        fake.on_request = LoseOnce(number, stage)
        save(place(fake), 2)
        start_of_next(fake)
        assert load(place(fake)) == 2
        assert len(names(place(fake))) == 3


def test_a_failure_before_the_commit_leaves_the_old_checkpoint_and_nothing_else(fake: FakeS3) -> None:
    save(place(fake), 1)
    before = names(place(fake))
    with (
        mock.patch.object(save_output_objects.ObjectOutput, "check_files", side_effect=OSError("broken")),
        pytest.raises(CheckpointException, match="broken"),
    ):
        save(place(fake), 2)
    assert load(place(fake)) == 1
    assert names(place(fake)) == before


def start_of_next(fake: FakeS3) -> None:
    fake.on_request = lambda *_: None


def _moments(fake: FakeS3, start: Start, of: object) -> list[Moment]:
    start.restore()
    save(place(fake), 2)
    return of(len(fake.requests))  # type: ignore[operator,no-any-return]


def _save_from_ranks(endpoint: str, value: float, folder: str) -> list[str]:
    from rankless.storage.s3.s3_store import S3

    path = S3(endpoint=endpoint, credentials=("key", "secret"), region="r").path(f"{BUCKET}/run/c")
    with mock.patch("tempfile.gettempdir", return_value=folder):
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        whole = torch.arange(12.0) * value
        tensor = torch.distributed.tensor.distribute_tensor(whole, mesh, [torch.distributed.tensor.Shard(0)])
        dcp.save({"weight": tensor}, storage_writer=FileSystemWriter(path))
        loaded = {"weight": torch.distributed.tensor.distribute_tensor(torch.zeros(12), mesh, tensor.placements)}
        dcp.load(loaded, storage_reader=FileSystemReader(path))
        assert torch.equal(loaded["weight"].full_tensor(), whole)
    return sorted(names(path))


def test_all_ranks_upload_and_load(tmp_path: Path, ranks: Ranks) -> None:
    fake = FakeS3()
    with fake.served() as endpoint:
        for size, value in ((2, 1.0), (3, 2.0)):
            listed = ranks(size, _save_from_ranks, endpoint, value, str(tmp_path))
            assert all(entry == listed[0] for entry in listed)
            assert len(listed[0]) == size + 2


def test_a_copy_on_a_disk_is_replaced_by_a_save(fake: FakeS3, tmp_path: Path) -> None:
    """The names of its files have a digest in them, which those of a save on a disk have not."""
    path, copy = place(fake), tmp_path / "copy"
    save(path, 1)
    for info in path.store.list_objects(path):
        file = copy / str(info.path.relative_to(path))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(path.store.read_small(info.path))
    save(copy, 2)  # type: ignore[arg-type]
    assert load(copy) == 2  # type: ignore[arg-type]
    (copy / "notes.distcp").write_text("mine")
    with pytest.raises(CheckpointException, match=r"notes\.distcp"):
        save(copy, 3)  # type: ignore[arg-type]
