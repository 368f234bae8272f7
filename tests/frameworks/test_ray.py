"""Tests of ``rankless.ray.RayCheckpointer`` under Ray Train: what is reported, failures, other numbers of workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import ray
import ray.train
import torch
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from typer.testing import CliRunner

import rankless
from rankless.cli.main import app
from rankless.errors import CorruptCheckpointError, InvalidArgumentError, NoCheckpointError, RankTimeoutError
from rankless.ray import RayCheckpointer

_BATCH = 12


#: The seconds between two looks of Ray at its workers, 2 by default.
_INTERVAL = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_INTERVAL, "0.1")
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


class FailingCheckpointer(RayCheckpointer):
    """Kills its process, or raises, once: between the save of a step and its report, or before the save."""

    def __init__(self, failure: dict[str, Any], **options: Any) -> None:
        super().__init__(**options)
        self._failure = failure

    def fail(self, moment: str) -> None:
        expected = {"moment": moment, "rank": ray.train.get_context().get_world_rank(), "step": self.last_step}
        marker = self.path / f"failed_{moment}_{self.last_step}"
        if self._failure.items() >= expected.items() and not marker.exists():
            marker.touch()
            if self._failure.get("raises"):
                raise OSError("failed on purpose")
            os.kill(os.getpid(), signal.SIGKILL)

    def _save(self, *args: Any, **options: Any) -> Any:
        self.fail("before save")
        return super()._save(*args, **options)

    def _report(self, *args: Any, **options: Any) -> None:
        self.fail("before report")
        super()._report(*args, **options)


class Reluctant:
    """A state that one rank cannot give."""

    def state_dict(self) -> dict[str, int]:
        if ray.train.get_context().get_world_rank() == 1:
            raise OSError("no state on this rank")
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def train_loop(config: dict[str, Any]) -> dict[str, Any]:
    """Train to a step, with a checkpoint every second step. Return where it began, and what it loaded."""
    torch.manual_seed(0)
    workers = ray.train.get_context().get_world_size()
    model = prepare_model(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.arange(480.0).outer(torch.ones(4)) / 480
    loader = rankless.ResumableLoader(data, batch_size=_BATCH // workers)
    parts = {"model": model, "optimizer": optimizer, "dataloader": loader, "save_every": 2, "timeout": 30.0}
    with FailingCheckpointer(config.get("failure", {}), **parts, **config.get("options", {})) as checkpointer:
        start = checkpointer.resume()
        loaded = {name: tensor.tolist() for name, tensor in getattr(model, "module", model).state_dict().items()}
        for step, batch in enumerate(islice(loader, config["steps"] - start), start + 1):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step(step, {"loss": loss, "score": -abs(step - 4), "rank": torch.distributed.get_rank()})
    return {"start": start, "loaded": loaded}


def fit(path: Path, workers: int = 2, loop: Any = train_loop, **config: Any) -> ray.train.Result:
    """Run a training in the storage folder ``path``."""
    checkpoints, failures = CheckpointConfig(**config.pop("keep", {})), config.pop("failures", 0)
    file_system = config.pop("file_system", None)
    trainer = TorchTrainer(
        loop,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            storage_path=str(path.parent),
            storage_filesystem=file_system,
            name=path.name,
            checkpoint_config=checkpoints,
            failure_config=FailureConfig(max_failures=failures),
        ),
    )
    return trainer.fit()


def fit_and_fail(path: Path, **config: Any) -> dict[int, BaseException]:
    """Return the error of each worker that failed."""
    with pytest.raises(ray.train.WorkerGroupError) as caught:
        fit(path, **config)
    return {rank: getattr(error, "_base_exc", error) for rank, error in caught.value.worker_failures.items()}


def tags(path: Path) -> list[str]:
    return sorted(info.tag for info in rankless.list_checkpoints(path))


def check_equal(first: str | Path, second: str | Path) -> None:
    tensors = [dict(rankless.open(path).items()) for path in (first, second)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the last checkpoint of a run of two workers without any failure."""
    result = fit(tmp_path_factory.mktemp("whole") / "run", steps=8)
    assert result.checkpoint is not None
    return str(result.checkpoint.path)


def test_ray_knows_the_checkpoints_and_their_metrics(tmp_path: Path) -> None:
    path = tmp_path / "run"
    result = fit(path, steps=5)
    assert result.checkpoint is not None
    assert [Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints] == ["step_2", "step_4", "step_5"]
    assert tags(path) == ["step_2", "step_4", "step_5"]
    assert Path(result.checkpoint.path) == path / "step_5"
    assert result.metrics.keys() == {"loss", "score", "rank"}
    assert result.metrics["rank"] == 0
    assert {info.tag: info.metrics for info in rankless.list_checkpoints(path)}["step_5"] == result.metrics
    with result.checkpoint.as_directory() as folder:
        assert folder == str(path / "step_5")  # no copy


@pytest.mark.parametrize("options", [{}, {"async_save": True}], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("moment", ["before save", "before report"])
def test_a_run_continues_after_a_worker_was_killed(
    whole: str, tmp_path: Path, moment: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(_INTERVAL)  # Ray has not seen the reports before the failure
    path = tmp_path / "run"
    failure = {"moment": moment, "rank": 1, "step": 6}
    result = fit(path, steps=8, failures=1, failure=failure, options=options)
    assert (path / f"failed_{moment}_6").exists()
    assert (
        result.return_value["start"]
        in ({2, 4} if options else {4}, {4, 6} if options else {6})[moment == "before report"]
    )
    assert [Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints] == tags(path)
    assert tags(path) == ["step_2", "step_4", "step_6", "step_8"]
    check_equal(whole, path / "step_8")


@pytest.mark.parametrize("workers", [1, 3])
def test_another_trainer_resumes_with_another_number_of_workers(tmp_path: Path, workers: int) -> None:
    path = tmp_path / "run"
    first = fit(path, steps=4)
    second = fit(path, workers, steps=8)
    assert first.checkpoint is not None
    assert second.return_value["start"] == 4
    saved = dict(rankless.open(first.checkpoint.path).items())
    for name, values in second.return_value["loaded"].items():
        assert saved[f"model/{name}"].tolist() == values
    assert tags(path) == ["step_2", "step_4", "step_6", "step_8"]
    assert len(second.best_checkpoints) == 4


@pytest.mark.parametrize("options", [{}, {"async_save": True}], ids=["synchronous", "asynchronous"])
def test_ray_keeps_the_checkpoints_with_the_best_scores(tmp_path: Path, options: dict[str, Any]) -> None:
    path = tmp_path / "run"
    keep = {"num_to_keep": 2, "checkpoint_score_attribute": "score", "checkpoint_score_order": "max"}
    result = fit(path, steps=9, keep=keep, options=options)
    assert {Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints} == {"step_4", "step_6"}
    assert tags(path) == ["step_4", "step_6", "step_9"]  # the best ones and the latest
    assert Path(result.checkpoint.path).name == "step_9"
    assert result.get_best_checkpoint("score", "max").path == str(path / "step_4")
    assert fit(path, steps=9, keep=keep).return_value["start"] == 9


def test_ray_keeps_the_last_checkpoints_during_failures(whole: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    failure = {"moment": "before report", "step": 4, "raises": True}  # on all ranks
    result = fit(path, steps=8, keep={"num_to_keep": 1}, failures=3, failure=failure)
    assert tags(path) == ["step_8"]
    assert result.error is None
    check_equal(whole, path / "step_8")


def test_a_save_that_fails_on_one_worker_fails_on_all_and_is_not_reported(tmp_path: Path) -> None:
    path = tmp_path / "run"
    errors = fit_and_fail(path, steps=2, options={"stateful": {"reluctant": Reluctant()}})
    assert errors
    assert all("no state on this rank" in str(error) for error in errors.values())
    assert tags(path) == []


def save_on_one_worker(config: dict[str, Any]) -> None:
    checkpointer = RayCheckpointer(stateful={"state": torch.optim.SGD([torch.zeros(2)])}, timeout=3.0)
    checkpointer.step(1)
    if ray.train.get_context().get_world_rank() == 0:
        checkpointer.save()
    else:
        ray.train.collective.barrier()


def test_a_save_on_a_part_of_the_workers_ends_with_an_error(tmp_path: Path) -> None:
    errors = fit_and_fail(tmp_path / "run", loop=save_on_one_worker)
    assert isinstance(errors[0], RankTimeoutError), errors
    assert tags(tmp_path / "run") == []


def save_twice(config: dict[str, Any]) -> None:
    checkpointer = RayCheckpointer(model=torch.nn.Linear(2, 2), save_every=1)
    checkpointer.resume()
    checkpointer.step(1)
    with pytest.raises(rankless.errors.TagExistsError):
        checkpointer.save()
    with pytest.raises(InvalidArgumentError, match="know the path twice"):
        checkpointer.save(overwrite=True)
    checkpointer.save("another_name")


def test_a_checkpoint_is_reported_once(tmp_path: Path) -> None:
    result = fit(tmp_path / "run", 1, save_twice)
    assert [Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints] == ["step_1", "another_name"]


def return_during_a_save(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    checkpointer = RayCheckpointer(model=torch.nn.Linear(1000, 4000), async_save=True, save_every=1)
    checkpointer.step(1, {"loss": 1.0})  # no with block: nothing of rankless waits


def test_ray_waits_for_a_background_save_at_the_end(tmp_path: Path) -> None:
    result = fit(tmp_path / "run", loop=return_during_a_save)
    assert result.checkpoint is not None
    assert result.metrics == {"loss": 1.0}
    assert (
        subprocess.run([sys.executable, "-m", "rankless", "verify", result.checkpoint.path], check=False).returncode
        == 0
    )


def forget_to_resume(config: dict[str, Any]) -> None:
    RayCheckpointer(model=torch.nn.Linear(2, 2)).step(1)


def test_a_run_that_is_not_resumed_does_not_begin(tmp_path: Path) -> None:
    fit(tmp_path / "run", steps=2)
    assert "call resume()" in str(fit_and_fail(tmp_path / "run", loop=forget_to_resume))


def test_there_is_no_fallback_from_a_corrupt_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run"
    fit(path, steps=4)
    shard = next((path / "step_4" / "model").glob("*.safetensors"))
    intact = shard.read_bytes()
    shard.write_bytes(intact[:-8] + bytes(8))
    errors = fit_and_fail(path, steps=6)
    assert all(isinstance(error, CorruptCheckpointError) for error in errors.values())
    assert tags(path) == ["step_2", "step_4"]


def resume_from_a_missing_checkpoint(config: dict[str, Any]) -> None:
    checkpointer = RayCheckpointer(model=torch.nn.Linear(2, 2), save_every=1)
    checkpointer.resume()
    checkpointer.step(1)
    checkpointer.step(2)
    (checkpointer.path / "step_2").rename(checkpointer.path.parent / "removed")
    with pytest.raises(NoCheckpointError, match=r"'step_2' in .* is missing"):
        checkpointer.resume()
    (checkpointer.path.parent / "removed").rename(checkpointer.path / "step_2")


def test_a_missing_checkpoint_is_no_reason_to_begin_with_an_older_one(tmp_path: Path) -> None:
    fit(tmp_path / "run", 1, resume_from_a_missing_checkpoint)


def report_own_checkpoint(step: int) -> None:
    """Report a checkpoint that is not one of rankless."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "weights").write_text(str(step))
        ray.train.report({"score": step}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def report_own_checkpoints(config: dict[str, Any]) -> tuple[int, list[str]]:
    """Save every second step, and report an own checkpoint at some steps. Return where it began, and the warnings."""
    torch.manual_seed(0)
    with RayCheckpointer(model=torch.nn.Linear(2, 2), save_every=2) as checkpointer:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            start = checkpointer.resume()
        for step in range(start + 1, 7):
            checkpointer.step(step, {"score": step})
            if step in config["own"]:
                report_own_checkpoint(step)
            marker = checkpointer.path / "failed"
            if step == config["fails"] and not marker.exists():
                time.sleep(1.0)  # Ray has processed the reports
                marker.touch()
                raise OSError("failed on purpose")
    return start, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("keep", [{}, {"checkpoint_score_attribute": "score", "checkpoint_score_order": "min"}])
def test_a_run_continues_after_other_checkpoints_that_were_reported(tmp_path: Path, keep: dict[str, Any]) -> None:
    path = tmp_path / "run"
    result = fit(path, 1, report_own_checkpoints, keep=keep, failures=1, own=[3, 4], fails=5)
    assert result.return_value == (4, [])
    reported = [Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints]
    assert sorted(name for name in reported if name.startswith("step")) == ["step_2", "step_4", "step_6"]
    assert len(reported) == 5


def test_a_run_begins_after_other_checkpoints_alone(tmp_path: Path) -> None:
    start, messages = fit(tmp_path / "run", 1, report_own_checkpoints, failures=1, own=[1], fails=1).return_value
    assert start == 0
    assert any("only others that were reported to Ray" in message for message in messages)


def resume_from_older(config: dict[str, Any]) -> None:
    checkpointer = RayCheckpointer(model=torch.nn.Linear(2, 2), save_every=2)
    for tag in ("step_2", rankless.best("score", "min")):
        with pytest.raises(InvalidArgumentError, match="cannot go on at 'step_2': it has 'step_6'"):
            checkpointer.resume(tag)
    assert checkpointer.resume("step_6") == 6
    checkpointer.step(8)


def test_a_run_does_not_go_on_at_an_older_checkpoint(tmp_path: Path) -> None:
    fit(tmp_path / "run", 2, report_own_checkpoints, own=[], fails=0)
    fit(tmp_path / "run", 2, resume_from_older)
    assert tags(tmp_path / "run") == ["step_2", "step_4", "step_6", "step_8"]


def resume_after_a_rollback(config: dict[str, Any]) -> None:
    checkpointer = RayCheckpointer(model=torch.nn.Linear(2, 2), save_every=2)
    with pytest.raises(InvalidArgumentError, match="cannot go on at 'step_2': it has 'step_6'"):
        checkpointer.resume()


def test_a_run_does_not_go_on_after_a_rollback(tmp_path: Path) -> None:
    fit(tmp_path / "run", 2, report_own_checkpoints, own=[], fails=0)
    assert CliRunner().invoke(app, ["rollback", str(tmp_path / "run"), "step_2"]).exit_code == 0
    fit(tmp_path / "run", 2, resume_after_a_rollback)


def create_invalid(config: dict[str, Any]) -> None:
    for argument in ("keep", "path", "signals"):
        with pytest.raises(InvalidArgumentError, match=f"no argument {argument}"):
            RayCheckpointer(**{argument: 1})
    groups = [torch.distributed.new_group([rank]) for rank in range(2)]
    with pytest.raises(InvalidArgumentError, match="2 workers, but 1 would save"):
        RayCheckpointer(process_group=groups[torch.distributed.get_rank()])
    with pytest.raises(InvalidArgumentError, match="on_corruption"):
        RayCheckpointer().resume(on_corruption="fall_back")


def test_arguments_are_checked(tmp_path: Path) -> None:
    fit(tmp_path / "run", loop=create_invalid)


def create_remote(config: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="Object stores are not supported"):
        RayCheckpointer()


def create_local(config: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="num_workers=1"):
        RayCheckpointer()


def test_storage_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    remote = PyFileSystem(FSSpecHandler(DirFileSystem(str(tmp_path), fs=LocalFileSystem())))  # as an object store is
    fit(Path("bucket/run"), 1, create_remote, file_system=remote)
    fit(tmp_path / "run", 0, create_local)
