"""Tests of artifacts against the real packages, offline: what they have written leads back to the checkpoint."""

from __future__ import annotations

import json
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rankless
from rankless.artifacts import log_mlflow_model, log_wandb_artifact, open_artifact
from rankless.errors import CheckpointReplacedError, InvalidArgumentError, NoCheckpointError
from tests.helpers.fake_http import BUCKET
from tests.helpers.fake_s3 import FakeS3
from tests.helpers.pool import Ranks

#: A tag with what names, URLs and pages could take for something else.
HOSTILE = "a:b% #c?d=<img src=x onerror=alert(1)>'\""

Log = Callable[..., Any]


@pytest.fixture
def wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(project="a", mode="offline", dir=str(tmp_path)) as run:
        yield run


@pytest.fixture
def mlflow_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow.set_tracking_uri(f"file:{tmp_path}/mlruns")
    with mlflow.start_run() as run:
        yield run


@pytest.fixture(params=[log_wandb_artifact, log_mlflow_model])
def log(request: pytest.FixtureRequest) -> Log:
    """Either function, with a run of its system."""
    request.getfixturevalue("wandb_run" if request.param is log_wandb_artifact else "mlflow_run")
    function: Log = request.param
    return function


def save(run: Any, tag: str = "s", value: float = 1.0, **options: Any) -> None:
    rankless.save_checkpoint(run, tag, {"w": torch.full((10,), value)}, step=7, metrics={"loss": 0.5}, **options)


def identity(path: Any, tag: str | None = None) -> str:
    found = rankless.open(path, tag).identity
    assert found is not None
    return found.id


def test_an_artifact_of_wandb_says_what_the_checkpoint_is(tmp_path: Path, wandb_run: Any) -> None:
    save(tmp_path / "run")
    artifact = log_wandb_artifact(tmp_path / "run", aliases=["best"])
    path = tmp_path / "run/s"
    assert (artifact.type, artifact.name.partition(":")[0]) == ("model", f"checkpoint-{wandb_run.id}")
    assert artifact.metadata == {
        "path": str(path),
        "tag": "s",
        "id": identity(path),
        "step": 7,
        "format": "rankless",
        "nbytes": 40,
        "metrics": {"loss": 0.5},
    }
    entries = artifact.manifest.entries.values()
    assert {entry.ref for entry in entries} == {file.as_uri() for file in path.rglob("*") if file.is_file()}
    assert all(entry.local_path is None for entry in entries)


def test_wandb_stores_the_artifact_and_its_aliases(tmp_path: Path, wandb_run: Any) -> None:
    save(tmp_path / "run", HOSTILE)
    log_wandb_artifact(tmp_path / "run", aliases=["best"])
    wandb_run.finish()
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    while (record := read_artifact_record(file)) is None:
        time.sleep(0.1)  # W&B's own process writes it, on a busy machine some time later
    assert set(record.aliases) == {"latest", HOSTILE.replace(":", "_"), "best"}
    assert json.loads(record.metadata)["tag"] == HOSTILE
    assert open_artifact(json.loads(record.metadata))["model/w"].sum() == 10


def read_artifact_record(file: Path) -> Any:
    """Return the record of the artifact in the file of an offline run, a log as of LevelDB; ``None`` if it has none."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, payload = file.read_bytes(), 7, b""
    while position < len(data):
        if 32768 - position % 32768 < 7:  # the rest of a block is padding
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        payload += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in {1, 4}:  # a whole record, or the last part of one
            record = Record.FromString(payload)
            payload = b""
            if record.HasField("request") and record.request.HasField("log_artifact"):
                return record.request.log_artifact.artifact
            if record.HasField("artifact"):
                return record.artifact
    return None


def test_a_checkpoint_under_the_same_tag_is_another_version_of_the_artifact(tmp_path: Path, wandb_run: Any) -> None:
    """W&B compares the digests of the entries, which have the same references."""
    save(tmp_path / "run")
    first = log_wandb_artifact(tmp_path / "run")
    save(tmp_path / "run", value=2.0, overwrite=True)
    assert log_wandb_artifact(tmp_path / "run").digest != first.digest


def test_a_model_of_mlflow_says_what_the_checkpoint_is(tmp_path: Path, mlflow_run: Any) -> None:
    import mlflow

    save(tmp_path / "run")
    log_mlflow_model(tmp_path / "run", "s")
    (model,) = mlflow.search_logged_models(filter_string="metrics.loss < 0.6", output_format="list")
    assert (model.name, model.model_type, model.source_run_id) == ("s", "checkpoint", mlflow_run.info.run_id)
    tags = {key: value for key, value in model.tags.items() if key.startswith("rankless.")}
    assert tags == {
        "rankless.path": str(tmp_path / "run/s"),
        "rankless.tag": "s",
        "rankless.id": identity(tmp_path / "run"),
        "rankless.step": "7",
        "rankless.format": "rankless",
        "rankless.nbytes": "40",
    }
    assert [(metric.key, metric.value, metric.step) for metric in model.metrics] == [("loss", 0.5, 7)]
    assert open_artifact(model).path == tmp_path / "run/s"
    copied = [file for file in (tmp_path / "mlruns").rglob("*") if file.is_file() and file.suffix == ".safetensors"]
    assert copied == []


def test_mlflow_with_a_database_and_a_run_that_is_not_active(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    pytest.importorskip("alembic")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = mlflow.create_experiment("other", artifact_location=(tmp_path / "artifacts").as_uri())
    run = mlflow.MlflowClient().create_run(experiment)
    save(tmp_path / "run")
    model = log_mlflow_model(tmp_path / "run", run_id=run.info.run_id)
    assert (model.experiment_id, model.source_run_id) == (experiment, run.info.run_id)
    assert open_artifact(mlflow.get_logged_model(model.model_id)).step == 7


def test_hostile_names_stay_text(tmp_path: Path, log: Log) -> None:
    run = tmp_path / "<b>run</b> %41 #"
    metrics = {"../../x": 1.0, "": 2.0, "a//b\n": 3.0, "..a": float("nan"), "val/loss": 4.0}
    rankless.save_checkpoint(run, HOSTILE, {"w": torch.ones(2)}, metrics=metrics)
    logged = log(run)
    checkpoint = open_artifact(logged)
    assert (checkpoint.path, checkpoint.tag) == (run / HOSTILE, HOSTILE)
    if log is log_wandb_artifact:
        files = {file.as_uri() for file in (run / HOSTILE).rglob("*") if file.is_file()}
        assert {entry.ref for entry in logged.manifest.entries.values()} == files


def test_a_listener_logs_each_save(tmp_path: Path, log: Log) -> None:
    """Also of an asynchronous save, whose events come from another thread."""
    run_id = {"run_id": active_mlflow_run()} if log is log_mlflow_model else {}
    logged: list[Any] = []

    def listen(event: rankless.Event) -> None:
        if isinstance(event, rankless.Saved):
            logged.append(log(event.path, **run_id))

    for tag in "ab":
        rankless.save_checkpoint(tmp_path, tag, {"w": torch.ones(2)}, async_save=True, on_event=listen).wait()
    assert [open_artifact(artifact).tag for artifact in logged] == ["a", "b"]


def active_mlflow_run() -> str:
    import mlflow

    return str(mlflow.active_run().info.run_id)


def test_what_an_artifact_refers_to_must_be_that_checkpoint(tmp_path: Path, log: Log) -> None:
    run = tmp_path / "run"
    save(run)
    logged, known = log(run), identity(run)
    assert identity(open_artifact(logged).path) == known
    save(run, value=2.0, overwrite=True)
    with pytest.raises(CheckpointReplacedError, match=f"'s' with the id '{known}' at '{run}/s' was replaced"):
        open_artifact(logged)
    shutil.rmtree(run / "s")
    with pytest.raises(NoCheckpointError, match=f"'s' with the id '{known}' at '{run}/s' was removed"):
        open_artifact(logged)
    (run / "s").mkdir()
    with pytest.raises(NoCheckpointError, match=f"'s' with the id '{known}'"):
        open_artifact(logged)
    (run / "s").rmdir()
    (run / "s").write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointReplacedError, match=f"'s' with the id '{known}' at '{run}/s' was replaced"):
        open_artifact(logged)


def test_a_checkpoint_of_the_run_directory_that_took_the_path_is_another_one(tmp_path: Path, wandb_run: Any) -> None:
    save(tmp_path / "run")
    logged = log_wandb_artifact(tmp_path / "run")
    shutil.rmtree(tmp_path / "run/s")
    save(tmp_path / "run/s", "t")
    with pytest.raises(CheckpointReplacedError, match="is another checkpoint"):
        open_artifact(logged)


def test_a_copy_at_the_same_path_is_the_same_checkpoint(tmp_path: Path, wandb_run: Any) -> None:
    save(tmp_path / "run")
    logged = log_wandb_artifact(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "moved")
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "moved").rename(tmp_path / "run")
    assert open_artifact(logged).step == 7


def test_in_an_object_store_the_reference_is_the_url(tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeS3().served() as endpoint:
        for name, value in {
            "AWS_ENDPOINT_URL_S3": endpoint,
            "AWS_REGION": "r",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }.items():
            monkeypatch.setenv(name, value)
        run = f"s3://{BUCKET}/run"
        save(run, HOSTILE)
        known = identity(run)
        logged = log(run)
        if log is log_wandb_artifact:
            (entry,) = logged.manifest.entries.values()
            assert (entry.path, entry.ref) == (known, f"rankless+{logged.metadata['path']}")
            assert identity(entry.ref) == known
        assert str(open_artifact(logged).path).startswith(f"{run}/{HOSTILE}.")
        save(run, HOSTILE, 2.0, overwrite=True)
        with pytest.raises(NoCheckpointError, match=known):
            open_artifact(logged)


def test_only_checkpoints_of_rankless_have_an_id(tmp_path: Path, log: Log) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(InvalidArgumentError, match=r"a\.pt is no checkpoint of rankless"):
        log(tmp_path / "a.pt")


@pytest.mark.parametrize("artifact", [{}, {"path": 1, "tag": "s", "id": "x"}, {"rankless.path": "a"}, object()])
def test_what_refers_to_no_checkpoint_is_refused(artifact: object) -> None:
    with pytest.raises(InvalidArgumentError, match="does not refer to a checkpoint"):
        open_artifact(artifact)


@pytest.mark.parametrize("path", ["a\0b", "a\ud800b"])
def test_what_can_be_no_path_is_refused(path: str) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be a path"):
        open_artifact({"path": path, "tag": "a", "id": "b"})


def test_without_a_run_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "run")
    pytest.importorskip("wandb")
    with pytest.raises(InvalidArgumentError, match=r"call wandb\.init\(\) first"):
        log_wandb_artifact(tmp_path / "run")
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    with pytest.raises(InvalidArgumentError, match=r"call mlflow\.start_run\(\) first"):
        log_mlflow_model(tmp_path / "run")


def log_on_rank(path: str) -> tuple[Any, Any]:
    return (log_wandb_artifact(path), log_mlflow_model(path)) if dist.get_rank() else (None, None)


def test_other_ranks_than_the_first_log_nothing(ranks: Ranks, tmp_path: Path) -> None:
    """They need no run, and do not look at the path."""
    assert ranks(2, log_on_rank, str(tmp_path / "nowhere")) == [(None, None)] * 2
