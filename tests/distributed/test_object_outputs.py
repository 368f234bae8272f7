"""Single components, conversions and exports in an object store have the bytes of the same output on a disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

import rankless
import rankless.dcp
from rankless.engine.io import upload_files
from rankless.engine.io.upload_parts import UploadedParts
from rankless.errors import InvalidArgumentError, RankMismatchError, StorageError, TagExistsError
from rankless.storage.object_path import ObjectPath
from tests.helpers.deepspeed_files import random_save, write_zero
from tests.helpers.fake_azure import FakeAzure
from tests.helpers.fake_http import BUCKET, Answers, FakeStore, disconnect
from tests.helpers.fake_s3 import FakeS3, failure, store_at
from tests.helpers.pool import Ranks
from tests.helpers.simulated_hosts import simulated_host
from tests.helpers.small_parts import small_parts
from tests.helpers.training import Run, train_run

#: Seconds for which requests are repeated that fail each time.
BRIEF = 0.2


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "temporary"
    folder.mkdir()
    with mock.patch("tempfile.gettempdir", return_value=str(folder)):
        yield folder


@pytest.fixture
def fake(temporary: Path) -> Iterator[FakeS3]:
    fake = FakeS3()
    with (
        fake.connected(),
        mock.patch("tests.helpers.fake_s3.MIN_PART", 1),
        small_parts(4096),
        mock.patch.object(upload_files, "PART_BYTES", 4096),
    ):
        yield fake


def bucket(fake: FakeStore, retry_seconds: float = 1.0) -> ObjectPath:
    return fake.store_at("http://fake", retry_seconds=retry_seconds).path(f"{BUCKET}/out")


def contents(path: Path) -> dict[str, bytes]:
    """The bytes of a file or of all files in a folder, by name."""
    if isinstance(path, ObjectPath):
        infos = path.store.list_objects(path)
        return {str(i.path.relative_to(path)): path.store.read_small(i.path) for i in infos} or {
            "": path.store.read_small(path)
        }
    if path.is_file():
        return {"": path.read_bytes()}
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def do_nothing(request: Any, stage: str) -> None:
    """Let each request have its effect."""


def model_of(value: float) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 20))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(value)
    return model


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("model.safetensors", {}),
        ("model.pt", {}),
        ("folder", {"shard": True}),
        ("folder", {"shard": True, "max_shard_size": 4194}),
        ("folder", {"shard": True, "max_shard_size": 4194, "use_safetensors": False}),
    ],
)
@pytest.mark.parametrize("async_save", [False, True])
def test_a_model_is_saved_as_on_a_disk_and_loaded(
    fake: FakeS3, tmp_path: Path, temporary: Path, name: str, options: dict[str, object], async_save: bool
) -> None:
    model = model_of(0.0)
    rankless.save_model(model, tmp_path / name, **options)  # type: ignore[arg-type]
    path = bucket(fake) / name
    assert rankless.save_model(model, path, async_save=async_save, **options).wait() == path  # type: ignore[arg-type]
    assert contents(path) == contents(tmp_path / name)
    assert not fake.uploads
    assert not [*temporary.rglob("*.partial*")]
    if options.get("use_safetensors", True) and not name.endswith(".pt"):
        loaded = model_of(1.0)
        assert rankless.load_model(loaded, path).verified
        assert all(map(torch.equal, loaded.state_dict().values(), model.state_dict().values()))


def test_a_model_replaces_another_and_other_objects_stay(fake: FakeS3, tmp_path: Path) -> None:
    path = bucket(fake) / "folder"
    path.store.replace_small(path / "README.md", b"mine")
    rankless.save_model(model_of(0.0), path, shard=True, max_shard_size=4194)
    assert len(contents(path)) > 3
    rankless.save_model(model_of(1.0), path, shard=True)
    assert contents(path).keys() == {"README.md", "model.safetensors"}
    rankless.save_model(model_of(2.0), path / "one.safetensors")
    rankless.save_model(model_of(3.0), path / "one.safetensors")
    loaded = model_of(0.0)
    rankless.load_model(loaded, path / "one.safetensors")
    assert all(map(torch.equal, loaded.state_dict().values(), model_of(3.0).state_dict().values()))


def test_a_model_replaces_another_in_azure(temporary: Path) -> None:
    azure = FakeAzure()
    with azure.connected(), small_parts(4096):
        for name, options in (("one.safetensors", {}), ("one.pt", {}), ("folder", {"shard": True})):
            for value in (0.0, 1.0):
                rankless.save_model(model_of(value), bucket(azure) / name, **options)  # type: ignore[arg-type]
            loaded = model_of(0.0)
            rankless.load_model(loaded, bucket(azure) / name)
            assert all(map(torch.equal, loaded.state_dict().values(), model_of(1.0).state_dict().values()))
    assert not azure.uploads


def test_an_answer_that_is_lost_when_a_model_is_replaced_in_azure_is_no_failure(temporary: Path) -> None:
    azure = FakeAzure()
    with azure.connected(), small_parts(4096):
        path = bucket(azure) / "one.safetensors"
        rankless.save_model(model_of(0.0), path)
        azure.on_request = Answers(disconnect, kind="complete", stage="after")
        rankless.save_model(model_of(1.0), path)
        loaded = model_of(0.0)
        rankless.load_model(loaded, path)
    assert all(map(torch.equal, loaded.state_dict().values(), model_of(1.0).state_dict().values()))


def test_a_bucket_is_no_file(fake: FakeS3, tmp_path: Path) -> None:
    root, scheduler = bucket(fake).parent, train_run("plain", "adamw").scheduler
    rankless.save_model(model_of(0.0), tmp_path / "a.safetensors")
    with pytest.raises(InvalidArgumentError, match="pass the path of a file"):
        rankless.save_model(model_of(0.0), root)
    with pytest.raises(InvalidArgumentError, match="pass the path of a file"):
        rankless.save_lr_scheduler(scheduler, root)
    for to in ("torch", "hf"):
        with pytest.raises(InvalidArgumentError, match="is a bucket"):
            rankless.convert(tmp_path / "a.safetensors", root, to=to)
    assert all(request.method == "GET" for request in fake.requests)


def save_shards(path: ObjectPath, value: float) -> bool:
    """Save a model in three shards. Return whether the save has reported success."""
    try:
        rankless.save_model(model_of(value), path, shard=True, max_shard_size=4194)
    except (RankMismatchError, StorageError):
        return False
    return True


def call_before_request(fake: FakeS3, number: int, function: Callable[[], object]) -> list[object]:
    """Call a function in a thread before the request with this number, from 0 on. The list will have its result."""
    requests, results = count(), list[object]()

    def on_request(_: object, stage: str) -> None:
        if stage == "before" and next(requests) == number:
            fake.on_request = do_nothing
            thread = Thread(target=lambda: results.append(function()))
            thread.start()
            thread.join()

    fake.on_request = on_request
    return results


def test_two_jobs_that_save_one_folder_at_the_same_time_leave_no_mixture(fake: FakeS3) -> None:
    path = bucket(fake) / "folder"
    same = fake.store_at("http://fake", retry_seconds=2.0).path(f"{BUCKET}/out/folder")  # as another process has it
    outcomes = set[tuple[bool, float]]()
    for moment in count():
        others = call_before_request(fake, moment, lambda: save_shards(path, 2.0))
        has_succeeded = save_shards(same, 1.0)
        if not others:
            break
        loaded = model_of(0.0)
        with suppress(rankless.RanklessError):
            rankless.load_model(loaded, path)
        tensors = loaded.state_dict().values()
        found = [v for v in (0.0, 1.0, 2.0) if all(map(torch.equal, tensors, model_of(v).state_dict().values()))]
        assert found, f"a mixture was loaded after request {moment}"
        outcomes.add((has_succeeded, *found))
    assert {(True, 1.0), (False, 0.0)} <= outcomes


def fail_from_request(fake: FakeS3, number: int) -> list[int]:
    """Let all requests from one on fail, counted from 0. The list will not be empty if there was one."""
    requests, failed = count(), list[int]()

    def on_request(_: object, stage: str) -> Any:
        if stage == "before" and (request := next(requests)) >= number:
            failed.append(request)
            return failure(503, "ServiceUnavailable")
        return None

    fake.on_request = on_request
    return failed


def test_a_save_after_one_that_failed_at_any_request_leaves_nothing_of_either_model_before(fake: FakeS3) -> None:
    """Also if the failed one has removed the index, which alone said which files were of the old model, and has written
    files of its own, which no index names."""
    for moment in count(0, 2):
        path = bucket(fake, BRIEF) / f"folder-{moment}"
        path.store.replace_small(path / "README.md", b"mine")
        assert save_shards(path, 1.0)
        known, failed = len(fake.requests), fail_from_request(fake, moment)
        with suppress(StorageError):  # in other files than those of the models before and after it
            rankless.save_model(model_of(2.0), path, shard=True, max_shard_size=5100)
        fake.on_request = do_nothing
        if not failed:
            break
        if not any(request.kind == "complete" for request in fake.requests[known:]):  # no new file can be visible
            rankless.load_model(loaded := model_of(0.0), path)
            assert all(map(torch.equal, loaded.state_dict().values(), model_of(1.0).state_dict().values())), moment
        rankless.save_model(model_of(3.0), path, shard=True)
        assert contents(path).keys() == {"README.md", "model.safetensors"}, moment
    assert moment > 20


def test_a_path_of_the_other_kind_is_refused(fake: FakeS3) -> None:
    path = bucket(fake)
    rankless.save_model(model_of(0.0), path / "a.safetensors")
    with pytest.raises(InvalidArgumentError, match="is a file"):
        rankless.save_model(model_of(0.0), path / "a.safetensors", shard=True)
    with pytest.raises(InvalidArgumentError, match="is a folder"):
        rankless.save_model(model_of(0.0), path)


def test_an_optimizer_and_a_scheduler_are_saved_as_on_a_disk_and_loaded(fake: FakeS3, tmp_path: Path) -> None:
    run, path = train_run("plain", "adamw"), bucket(fake)
    for folder in (tmp_path / "disk", path):
        rankless.save_optimizer(run.optimizer, folder / "optimizer.safetensors", model=run.model)
        rankless.save_optimizer(run.optimizer, folder / "optimizer.pt", model=run.model)
        rankless.save_optimizer(run.optimizer, folder / "shards", shard=True, model=run.model)
        rankless.save_lr_scheduler(run.scheduler, folder / "scheduler.json")
        rankless.save_lr_scheduler(run.scheduler, folder / "scheduler.pt")
    assert contents(path) == contents(tmp_path / "disk")
    other = train_run("plain", "adamw", steps=0)
    rankless.load_lr_scheduler(other.scheduler, path / "scheduler.json")
    assert other.scheduler.state_dict() == run.scheduler.state_dict()
    for name in ("optimizer.safetensors", "shards"):
        other = train_run("plain", "adamw", steps=0)
        rankless.load_optimizer(other.optimizer, path / name, model=other.model)
        states = zip(other.optimizer.state.values(), run.optimizer.state.values(), strict=True)
        assert all(torch.equal(a["exp_avg"], b["exp_avg"]) for a, b in states)


@pytest.mark.parametrize("to", ["native", "hf", "safetensors", "torch", "dcp", "lightning", "lightning-folder"])
def test_a_conversion_writes_what_it_writes_to_a_disk(fake: FakeS3, tmp_path: Path, to: str) -> None:
    run = train_run("plain", "adamw")
    rankless.save_checkpoint(tmp_path / "run", "s", run.model, run.optimizer, step=3)
    name = {"torch": "out.pt", "lightning": "out.ckpt", "safetensors": "out.safetensors"}.get(to, "out")
    rankless.convert(tmp_path / "run/s", tmp_path / "disk" / name, to=to, max_shard_size=3000)
    path = bucket(fake) / name
    assert rankless.convert(tmp_path / "run/s", path, to=to, max_shard_size=3000) == path
    found, expected = contents(path), contents(tmp_path / "disk" / name)
    manifest, expected_manifest = found.pop("manifest.json", b""), expected.pop("manifest.json", b"")
    assert found == expected
    assert bool(manifest) == bool(expected_manifest)  # it has an id and a time
    with pytest.raises(TagExistsError, match="exists already"):
        rankless.convert(tmp_path / "run/s", path, to=to)


@pytest.mark.parametrize(
    "to", ["native", "hf", "safetensors", "torch", "dcp", "lightning", "lightning-folder", "colossalai"]
)
def test_every_format_is_read_from_a_store(fake: FakeS3, tmp_path: Path, to: str) -> None:
    run = train_run("plain", "adamw")
    rankless.save_checkpoint(tmp_path / "run", "s", run.model, run.optimizer, run.scheduler, {"epoch": 2}, step=3)
    name = {"torch": "out.pt", "lightning": "out.ckpt", "safetensors": "out.safetensors"}.get(to, "out")
    local, path = tmp_path / "disk" / name, bucket(fake) / name
    rankless.convert(tmp_path / "run/s", local, to=to, max_shard_size=3000)
    rankless.convert(tmp_path / "run/s", path, to=to, max_shard_size=3000)
    here, there = rankless.open(local), rankless.open(path)
    assert here.keys() == there.keys()
    assert all(torch.equal(here[key], there[key]) for key in here)
    loaded = train_run("plain", "adamw", steps=0)
    rankless.load_model(loaded.model, path)
    assert all(map(torch.equal, loaded.model.state_dict().values(), run.model.state_dict().values()))
    rankless.convert(local, tmp_path / "from-disk", to="hf")
    rankless.convert(path, tmp_path / "from-store", to="hf")
    assert contents(tmp_path / "from-store") == contents(tmp_path / "from-disk")


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeeds_checkpoints_are_read_from_a_store(fake: FakeS3, tmp_path: Path, stage: int) -> None:
    save = random_save({"w": (5, 3), "b": (5,)}, [["w"], ["b"]], ("exp_avg",), stage=stage)
    write_zero(tmp_path / "run", save)
    folder = bucket(fake) / "run"
    for file in (file for file in (tmp_path / "run").rglob("*") if file.is_file()):
        path = folder / str(file.relative_to(tmp_path / "run"))
        path.store.replace_small(path, file.read_bytes())
    opened = rankless.open(folder)
    assert all(torch.equal(opened[f"model/{name}"], tensor) for name, tensor in save.masters.items())
    assert all(torch.equal(opened[f"optimizer/{name}/exp_avg"], save.states["exp_avg"][name]) for name in save.masters)


def test_torchs_own_checkpoints_are_loaded_from_a_store(fake: FakeS3, tmp_path: Path) -> None:
    state = {"model": model_of(0.0).state_dict(), "step": 3}
    dcp.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    folder = bucket(fake) / "dcp"
    for file in (tmp_path / "dcp").iterdir():
        folder.store.replace_small(folder / file.name, file.read_bytes())
    loaded = {"model": model_of(1.0).state_dict(), "step": 0}
    dcp.load(loaded, storage_reader=rankless.dcp.FileSystemReader(folder), no_dist=True)
    assert loaded["step"] == 3
    assert all(map(torch.equal, loaded["model"].values(), state["model"].values()))


def test_a_converted_checkpoint_is_one_of_the_run(fake: FakeS3, tmp_path: Path) -> None:
    run, path = train_run("plain", "adamw"), bucket(fake)
    rankless.save_checkpoint(tmp_path / "run", "s", run.model, run.optimizer, step=3)
    rankless.convert(tmp_path / "run", path / "imported", to="native")
    assert [info.tag for info in rankless.list_checkpoints(path)] == ["imported"]
    restored = rankless.restore(path, model=train_run("plain", "adamw", steps=0).model)
    assert (restored.step, restored.verified) == (3, True)


def test_an_export_has_the_files_of_one_on_a_disk(fake: FakeS3, tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path / "run", "s", model_of(0.0), step=3)
    for folder in (tmp_path / "disk/out", bucket(fake) / "out"):
        with pytest.warns(UserWarning, match=r"no config\.json"):
            rankless.export_model(tmp_path / "run", folder)
    assert contents(bucket(fake) / "out") == contents(tmp_path / "disk/out")


@pytest.mark.parametrize("kind", ["part", "put", "complete", "create upload"])
def test_an_output_that_fails_leaves_nothing(fake: FakeS3, tmp_path: Path, temporary: Path, kind: str) -> None:
    rankless.save_checkpoint(tmp_path / "run", "s", {"w": torch.zeros(5000)})
    lost: list[Callable[[], None]] = [disconnect] * 100
    fake.on_request = Answers(*lost, kind=kind)
    with pytest.raises(StorageError):
        rankless.convert(tmp_path / "run", bucket(fake, BRIEF) / "new", to="native")
    assert not fake.objects
    assert not fake.uploads
    assert not [*temporary.rglob("*.partial*")]


def test_a_folder_that_is_replaced_by_half_cannot_be_loaded(fake: FakeS3) -> None:
    path = bucket(fake, BRIEF) / "folder"
    rankless.save_model(model_of(1.0), path, shard=True, max_shard_size=4194)
    shards = sorted(key for key in fake.objects if key.endswith(".safetensors"))
    loaded = model_of(0.0)
    for kind in ("create upload", "complete"):
        answers = Answers(*[disconnect] * 100, kind=kind)

        def lose(request: Any, stage: str, answers: Answers = answers) -> None:
            if request.key == shards[1]:
                answers(request, stage)

        fake.on_request = lose
        with pytest.raises(StorageError):
            rankless.save_model(model_of(2.0), path, shard=True, max_shard_size=4194)
        fake.on_request = do_nothing
        assert not fake.uploads
        if kind == "create upload":  # nothing was replaced yet
            rankless.load_model(loaded, path)
            assert all(map(torch.equal, loaded.state_dict().values(), model_of(1.0).state_dict().values()))
    with pytest.raises(rankless.RanklessError):
        rankless.load_model(loaded, path)
    rankless.save_model(model_of(2.0), path, shard=True, max_shard_size=4194)
    loaded = model_of(0.0)
    rankless.load_model(loaded, path)
    assert all(map(torch.equal, loaded.state_dict().values(), model_of(2.0).state_dict().values()))


def test_a_conversion_that_fails_removes_nothing_of_another(fake: FakeS3, tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path / "run", "s", {"w": torch.zeros(5000)})
    path, finished = bucket(fake, BRIEF) / "new", []

    def finish_other(request: object, stage: str) -> None:
        if finished or request.kind != "create upload":  # type: ignore[attr-defined]
            return
        finished.append(stage)
        with mock.patch("rankless.run.pending_dir.claim_output"):  # another host does not see what this one holds
            rankless.convert(tmp_path / "run", path, to="hf")
        fake.on_request = Answers(*[disconnect] * 100, kind="create upload")
        disconnect()

    fake.on_request = finish_other
    with pytest.raises(StorageError):
        rankless.convert(tmp_path / "run", path, to="hf")
    fake.on_request = do_nothing
    assert contents(path).keys() == {"model.safetensors"}


@pytest.mark.parametrize("to", ["native", "hf"])
def test_names_as_saves_give_them_and_tags_are_refused(fake: FakeS3, tmp_path: Path, to: str) -> None:
    run = bucket(fake)
    rankless.save_checkpoint(tmp_path / "run", "s", {"w": torch.zeros(5)})
    rankless.save_checkpoint(run, "s", {"w": torch.ones(5)})
    with pytest.raises(InvalidArgumentError, match="16 hexadecimal"):
        rankless.convert(tmp_path / "run", run / "copy.0123456789abcdef", to=to)
    with pytest.raises(InvalidArgumentError, match="16 hexadecimal"):
        rankless.save_model(model_of(0.0), run / "copy.0123456789abcdef", shard=True)
    with pytest.raises(TagExistsError, match="exists already"):
        rankless.convert(tmp_path / "run", run / "s", to=to)


def test_files_are_built_where_no_other_user_looks(fake: FakeS3, tmp_path: Path, temporary: Path) -> None:
    rankless.save_model(model_of(0.0), tmp_path / "a.safetensors")
    rankless.convert(tmp_path / "a.safetensors", bucket(fake) / "a.pt", to="torch")
    (folder,) = temporary.glob("rankless-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    with pytest.raises(StorageError, match="only this user may enter"):
        rankless.convert(tmp_path / "a.safetensors", bucket(fake) / "b.pt", to="torch")
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="only this user may enter"):
        rankless.convert(tmp_path / "a.safetensors", bucket(fake) / "b.pt", to="torch")


def test_without_a_directory_for_temporary_files_the_error_says_so(fake: FakeS3, tmp_path: Path) -> None:
    rankless.save_model(model_of(0.0), tmp_path / "a.safetensors")
    with (
        mock.patch("tempfile.gettempdir", side_effect=FileNotFoundError(2, "No usable temporary directory")),
        pytest.raises(StorageError, match="directory for temporary files"),
    ):
        rankless.convert(tmp_path / "a.safetensors", bucket(fake) / "a.pt", to="torch")


def test_a_file_that_names_others_is_uploaded_after_them(fake: FakeS3, tmp_path: Path) -> None:
    run = train_run("plain", "adamw")
    rankless.save_checkpoint(tmp_path / "run", "s", run.model, run.optimizer, max_shard_size=3000)
    fake.requests.clear()
    rankless.convert(tmp_path / "run", bucket(fake) / "new", to="native", max_shard_size=3000)
    written = [request.key for request in fake.requests if request.kind in {"put", "complete"}]
    assert written[-1].endswith("/manifest.json")
    indexes = [number for number, key in enumerate(written) if key.endswith(".index.json")]
    assert indexes == [*range(len(written) - 1 - len(indexes), len(written) - 1)]


@pytest.mark.parametrize("kind", ["part", "put", "complete", "create upload"])
@pytest.mark.parametrize("name", ["m.safetensors", "m.pt", "small.pt"])
def test_a_component_that_fails_leaves_the_old_file(fake: FakeS3, kind: str, name: str) -> None:
    path = bucket(fake, BRIEF) / name
    models = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)] if name == "small.pt" else [model_of(0.0), model_of(1.0)]
    rankless.save_model(models[0], path)
    before = contents(path)
    fake.on_request = Answers(*[disconnect] * 100, kind=kind)
    is_small = len(before[""]) <= 4096
    if is_small is (kind == "put"):
        with pytest.raises(StorageError):
            rankless.save_model(models[1], path)
        assert contents(path) == before
    assert not fake.uploads


def test_a_component_whose_replicas_differ_leaves_nothing(ranks: Ranks) -> None:
    fake = FakeS3()
    with fake.served() as url:
        ranks(2, save_diverged, fake.store_at(url).path(f"{BUCKET}/out"))
    assert not fake.objects
    assert not fake.uploads


def save_diverged(path: Path) -> None:
    model = torch.nn.Linear(40, 40)
    torch.nn.init.constant_(model.weight, torch.distributed.get_rank())
    with small_parts(4096), pytest.raises(rankless.ReplicaMismatchError):
        rankless.save_model(model, path / "model.pt")


@pytest.mark.parametrize("name", ["m.safetensors", "m.pt", "folder"])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_fails_at_last_leaves_the_old_file(ranks: Ranks, name: str, failing: int) -> None:
    fake = FakeS3()
    with fake.served() as url:
        path = fake.store_at(url).path(f"{BUCKET}/out/{name}")
        rankless.save_model(model_of(0.0), path, shard=name == "folder")
        before = contents(path)
        ranks(3, save_and_fail_at_last, path, failing)
        assert contents(path) == before


def save_and_fail_at_last(path: ObjectPath, failing: int) -> None:
    """A file of one part is visible as soon as it is sent, so it must be the last request."""
    error = StorageError(5, "broken") if torch.distributed.get_rank() == failing else None
    broken = mock.patch.object(UploadedParts, "send_held", side_effect=error)
    with broken if error else nullcontext(), pytest.raises(StorageError, match="broken"):
        rankless.save_model(model_of(1.0), path, shard=path.name == "folder")


@pytest.mark.parametrize("is_new", [False, True])
def test_ranks_that_save_to_different_servers_are_told(ranks: Ranks, is_new: bool) -> None:
    fakes = FakeS3(), FakeS3()
    with fakes[0].served() as first, fakes[1].served() as second:
        if not is_new:
            save_small_shards(fakes[0].store_at(first), 0.0)
            save_small_shards(fakes[1].store_at(second), 0.0)
        ranks(2, save_to_own_server, first, second)
    assert "out/folder/model.safetensors.index.json" not in fakes[0].objects


def save_small_shards(store: Any, value: float) -> None:
    rankless.save_model(model_of(value), store.path(f"{BUCKET}/out/folder"), shard=True, max_shard_size=4194)


def save_to_own_server(*urls: str) -> None:
    with pytest.raises(RankMismatchError, match="the same settings of the store"):
        save_small_shards(store_at(urls[torch.distributed.get_rank()]), 1.0)


def test_dead_uploads_of_the_same_file_are_aborted_when_they_are_a_day_old(fake: FakeS3) -> None:
    path = bucket(fake) / "model.pt"
    dead, other = (path.store.create_upload(path.parent / name, {}).id for name in ("model.pt", "another.pt"))
    rankless.save_model(model_of(0.0), path)
    assert fake.uploads.keys() == {dead, other}
    with mock.patch("rankless.save.shared_upload.ABANDONED_SECONDS", -1.0):
        rankless.save_model(model_of(0.0), path)
    assert fake.uploads.keys() == {other}


#: The formats of conversions, with the name of the output.
OUTPUTS = {
    **{to: to for to in ("native", "hf", "dcp", "lightning-folder", "colossalai", "deepspeed-universal")},
    "torch": "out.pt",
    "lightning": "out.ckpt",
    "safetensors": "out.safetensors",
}


def convert_on_a_host_of_its_own(source: Path, output: Path, to: str, **options: Any) -> list[tuple[int, int]]:
    """Convert on a rank that shares no disk with others. Return the bytes done and their total at each event."""
    rank, progress = torch.distributed.get_rank(), list[tuple[int, int]]()

    def note(event: rankless.Event) -> None:
        if isinstance(event, rankless.Progress):
            progress.append((event.done, event.total))

    temporary = source.parent / f"temporary of host {rank}"
    temporary.mkdir(exist_ok=True)
    no_disk = FileNotFoundError(2, "only rank 0 needs a directory")
    with (
        simulated_host(str(rank), str(temporary)),
        mock.patch("tempfile.gettempdir", return_value=str(temporary), side_effect=no_disk if rank else None),
        small_parts(512),
    ):
        rankless.convert(source, output, to=to, max_shard_size=3000, on_event=note, **options)
    assert not [*temporary.rglob("*.partial*")]
    return progress


@pytest.mark.parametrize("to", OUTPUTS)
def test_ranks_of_several_hosts_convert_into_a_store(ranks: Ranks, tmp_path: Path, to: str) -> None:
    run = train_run("plain", "adamw")
    rankless.save_checkpoint(tmp_path / "run", "s", run.model, run.optimizer, run.scheduler, {"a": [2]}, step=3)
    # float64 in DCP's files begins at odd offsets: parts cut elements that are cast.
    options = {"dtype": "float64"} if to in {"dcp", "torch"} else {}
    rankless.convert(tmp_path / "run/s", tmp_path / OUTPUTS[to], to=to, max_shard_size=3000, **options)  # type: ignore[arg-type]
    expected = contents(tmp_path / OUTPUTS[to])
    fake = FakeS3()
    with fake.served() as url, mock.patch("tests.helpers.fake_s3.MIN_PART", 1):
        path = fake.store_at(url, retry_seconds=20.0).path(f"{BUCKET}/out") / OUTPUTS[to]
        progress = ranks(3, partial(convert_on_a_host_of_its_own, **options), tmp_path / "run/s", path, to)
        assert all(done == total for done, total in (events[-1] for events in progress))
        if sum(map(len, expected.values())) > 8192:  # else all is in the parts of one or two ranks
            assert sum(events[-1][1] > 0 for events in progress) == 3
        found = contents(path)
    assert not fake.uploads
    assert found.keys() == expected.keys()
    changing = {"manifest.json"}  # an id and a time
    assert {name for name in found if found[name] != expected[name]} <= changing


@pytest.mark.parametrize("failing", [0, 2])
def test_a_conversion_by_several_hosts_that_fails_leaves_nothing(ranks: Ranks, tmp_path: Path, failing: int) -> None:
    rankless.save_checkpoint(tmp_path / "run", "s", model_of(0.0))
    fake = FakeS3()
    with fake.served() as url, mock.patch("tests.helpers.fake_s3.MIN_PART", 1):
        path = fake.store_at(url, retry_seconds=BRIEF).path(f"{BUCKET}/out")
        for phase in ("send_held", "check_files", "_begin"):
            for outcome in ranks.outcomes(3, fail_to_convert, tmp_path / "run/s", path, phase, failing):
                assert isinstance(outcome, StorageError if phase == "send_held" or failing == 0 else type(None))
            if failing == 0 or phase == "send_held":
                assert not fake.objects
            assert not fake.uploads
            fake.objects.clear()


def fail_to_convert(source: Path, output: Path, phase: str, failing: int) -> None:
    target = {
        "send_held": "rankless.engine.io.upload_parts.UploadedParts.send_held",
        "check_files": "rankless.save.shared_upload.SharedUpload.check_files",
        "_begin": "rankless.conversion.object_output.ObjectConversionOutput._begin",
    }[phase]
    fails = torch.distributed.get_rank() == failing
    with mock.patch(target, side_effect=StorageError(5, "the store is broken")) if fails else nullcontext():
        convert_on_a_host_of_its_own(source, output, "hf")


def save_and_convert(path: Path, folder: Path, part_bytes: int) -> None:
    run = train_run("fsdp", "adamw")
    no_disk = mock.patch("tempfile.gettempdir", side_effect=FileNotFoundError(2, "components need no disk"))
    with no_disk, small_parts(part_bytes):
        save_components(run, path)
    rankless.convert(folder / "run", path / "hf", to="hf")
    loaded = train_run("fsdp", "adamw", steps=0)
    assert rankless.load_model(loaded.model, path / "model.safetensors").verified


def save_components(run: Run, path: Path) -> None:
    for name in ("model.safetensors", "model.pt"):
        rankless.save_model(run.model, path / name, async_save=name == "model.pt").wait()
    rankless.save_model(run.model, path / "folder", shard=True, max_shard_size=5242, use_safetensors=False)
    rankless.save_optimizer(run.optimizer, path / "optimizer", shard=True, model=run.model)
    rankless.save_optimizer(run.optimizer, path / "optimizer.pt", model=run.model)
    rankless.save_lr_scheduler(run.scheduler, path / "scheduler.pt")


def test_ranks_write_what_one_process_writes_to_a_disk(ranks: Ranks, tmp_path: Path) -> None:
    run = train_run("plain", "adamw")
    rankless.save_checkpoint(tmp_path / "run", "s", run.model)
    save_components(run, tmp_path / "disk")
    rankless.convert(tmp_path / "run", tmp_path / "disk/hf", to="hf")
    fake = FakeS3()
    with fake.served() as url, mock.patch("tests.helpers.fake_s3.MIN_PART", 1):
        path = fake.store_at(url, retry_seconds=20.0).path(f"{BUCKET}/out")
        for n, part_bytes in ((1, 2**24), (3, 2**24), (3, 512)):
            fake.objects.clear()
            ranks(n, save_and_convert, path, tmp_path, part_bytes)
            assert contents(path) == contents(tmp_path / "disk")
            assert not fake.uploads


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("stage", ["before", "after"])
@pytest.mark.parametrize("to", ["native", "hf", "dcp"])
def test_a_conversion_that_is_interrupted_at_any_completion_leaves_nothing(
    fake: FakeS3, tmp_path: Path, to: str, stage: str
) -> None:
    """Another one can use the path then."""
    run = train_run("plain", "adamw")
    rankless.save_checkpoint(tmp_path / "run", "s", run.model, run.optimizer)
    path = bucket(fake) / "new"
    interrupted = 0
    while True:
        fake.on_request = Answers(*[lambda: None] * interrupted, interrupt, kind="complete", stage=stage)
        try:
            rankless.convert(tmp_path / "run", path, to=to, max_shard_size=3000)
        except KeyboardInterrupt:
            fake.on_request = do_nothing
            assert not fake.objects
            assert not fake.uploads
            interrupted += 1
        else:
            break
    assert interrupted
    assert fake.objects


@pytest.mark.parametrize("to", ["hf", "torch"])
def test_a_conversion_that_fails_does_not_remove_equal_bytes_of_another(fake: FakeS3, tmp_path: Path, to: str) -> None:
    rankless.save_checkpoint(tmp_path / "run", "s", {"w": torch.zeros(5000)})
    path, finished = bucket(fake) / "new", []

    def finish_other(request: Any, stage: str) -> None:
        if not finished and request.kind == "complete" and stage == "before":
            finished.append(stage)
            with mock.patch("rankless.run.pending_dir.claim_output"):  # another host does not see what this one holds
                rankless.convert(tmp_path / "run", path, to=to)

    fake.on_request = finish_other
    with pytest.raises(TagExistsError, match="exists already"):
        rankless.convert(tmp_path / "run", path, to=to)
    assert torch.equal(rankless.open(path)["model/w"], torch.zeros(5000))


@pytest.mark.parametrize("fails", [False, True])
def test_an_object_of_somebody_else_that_appears_during_a_conversion_stays(
    fake: FakeS3, tmp_path: Path, fails: bool
) -> None:
    rankless.save_checkpoint(tmp_path / "run", "s", {"w": torch.zeros(5000)})
    path = bucket(fake) / "new"

    def write(request: Any, stage: str) -> Any:
        if request.kind == "get" and stage == "before":  # while it reads back
            path.store.replace_small(path / "state.json", b"mine")
        return failure(403) if fails and request.key.endswith("manifest.json") and request.kind == "put" else None

    fake.on_request = write
    with pytest.raises(TagExistsError, match=r"state\.json appeared"):
        rankless.convert(tmp_path / "run", path, to="native")
    assert contents(path) == {"state.json": b"mine"}


@pytest.mark.parametrize("to", ["dcp", "lightning-folder", "native", "colossalai"])
def test_what_names_other_files_is_completed_after_them(fake: FakeS3, tmp_path: Path, to: str) -> None:
    run = train_run("plain", "adamw")
    rankless.save_checkpoint(tmp_path / "run", "s", run.model, run.optimizer, step=3)
    appeared: list[str] = []

    def note(request: Any, stage: str) -> None:
        if request.kind in {"put", "complete"} and stage == "after":
            appeared.append(request.key.rpartition("/")[2])

    fake.on_request = note
    rankless.convert(tmp_path / "run", bucket(fake) / "new", to=to, max_shard_size=3000)
    naming = {".metadata", "manifest.json"}
    assert appeared[-1] in naming or appeared[-1].endswith(".index.json")
    assert len({*appeared} & naming) <= 1
