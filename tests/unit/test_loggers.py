"""Tests of the listeners against the real packages, offline: what they have written is read back from their files."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import rankless
from rankless.errors import InvalidArgumentError, StorageError
from rankless.loggers import log_to_mlflow, log_to_opentelemetry, log_to_tensorboard, log_to_wandb
from rankless.observe.events import DrainFailed, OnEvent, SavedLocally, SaveFailed
from tests.helpers.pool import Ranks

SAVED = {"seconds", "blocking_seconds", "GB", "shared_GB", "GB_per_second"}

#: The phases of a save that blocks its caller, and of an asynchronous one.
BLOCKING_PHASES = {"prepare_seconds", "write_seconds", "commit_seconds"}
ASYNC_PHASES = BLOCKING_PHASES | {"copy_seconds"}


def train(path: Path, listener: OnEvent) -> None:
    """Save steps 10 and 20, fail once, and load."""
    model = {"w": torch.ones(1000)}
    with rankless.Checkpointer(path, model=model, save_every=10, async_save=True, on_event=listener) as checkpointer:
        checkpointer.resume()
        for step in (10, 20):
            checkpointer.step(step)
            checkpointer.finalize()
        checkpointer.resume()
    listener(SaveFailed(path / "x", StorageError("full")))


def check_figures(path: Path, points: dict[str, list[tuple[int, float]]]) -> None:
    """Check the steps and values of each figure of the run directory ``path``."""
    sizes = [(int(info.step or 0), pytest.approx(info.nbytes / 1e9)) for info in rankless.list_checkpoints(path)]
    assert points.keys() == {f"checkpoint/{name}" for name in SAVED | ASYNC_PHASES | {"load_seconds", "failed_saves"}}
    assert [step for step, _ in points["checkpoint/seconds"]] == [10, 20]
    assert points["checkpoint/GB"] == sizes
    assert points["checkpoint/load_seconds"][0][0] == points["checkpoint/failed_saves"][0][0] == 20
    assert points["checkpoint/failed_saves"][0][1] == 1
    phases = [[value for _, value in points[f"checkpoint/{name}"]] for name in sorted(ASYNC_PHASES)]
    whole = [value for _, value in points["checkpoint/seconds"]]
    assert [sum(parts) for parts in zip(*phases, strict=True)] == pytest.approx(whole, rel=1e-5)
    assert all(value >= 0 for row in points.values() for _, value in row)


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "logs")) as writer:
        train(tmp_path / "run", log_to_tensorboard(writer))
    read = EventAccumulator(str(tmp_path / "logs")).Reload()
    check_figures(
        tmp_path / "run",
        {tag: [(entry.step, entry.value) for entry in read.Scalars(tag)] for tag in read.Tags()["scalars"]},
    )


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    listener = log_to_wandb()
    with wandb.init(project="a", mode="offline", dir=str(tmp_path)) as run:
        logged: list[dict[str, Any]] = []
        real = run.log
        with mock.patch.object(run, "log", lambda row, **options: (logged.append(row), real(row, **options))):
            train(tmp_path / "run", listener)
        run.log({})  # as the next step of a training does
        assert run.summary["checkpoint/step"] == 20
        assert names(logged) <= set(run.summary.keys())
    points: dict[str, list[tuple[int, float]]] = {}
    for row in logged:
        for name, value in row.items():
            if name != "checkpoint/step":
                points.setdefault(name, []).append((row["checkpoint/step"], value))
    check_figures(tmp_path / "run", points)
    assert next((tmp_path / "wandb").glob("offline-run-*/*.wandb")).stat().st_size > 0


def test_wandb_keeps_what_the_training_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if several saves come between two rows, and if a row is filled before and after a save."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    listener = log_to_wandb()
    with wandb.init(project="a", mode="offline", dir=str(tmp_path)) as run:
        for epoch in (1, 2, 3):
            run.log({"loss": epoch}, step=epoch)
            for part in (1, 2, 3):
                state = {"w": torch.ones(2)}
                rankless.save_checkpoint(tmp_path / "run", f"{epoch}.{part}", state, step=epoch, on_event=listener)
            run.log({"val_loss": 10 * epoch}, step=epoch)
            assert run.step == epoch
        run.log({})
        assert (run.summary["loss"], run.summary["val_loss"], run.summary["checkpoint/step"]) == (3, 30, 3)


def names(rows: list[dict[str, Any]]) -> set[str]:
    return {name for row in rows for name in row}


def test_without_a_run_wandb_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("wandb")
    rankless.save_checkpoint(tmp_path, "s", {"w": torch.ones(2)}, on_event=log_to_wandb())
    assert "call wandb.init() first" in caplog.text


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow.set_tracking_uri(f"file:{tmp_path}/mlruns")
    with pytest.raises(InvalidArgumentError, match="no active run"):
        log_to_mlflow()
    with mlflow.start_run() as run:
        train(tmp_path / "run", log_to_mlflow())
    client = mlflow.MlflowClient()
    metrics = client.get_run(run.info.run_id).data.metrics
    history = {name: client.get_metric_history(run.info.run_id, name) for name in metrics}
    check_figures(
        tmp_path / "run", {name: [(entry.step, entry.value) for entry in row] for name, row in history.items()}
    )


class Telemetry:
    """The real SDK of OpenTelemetry, which exports into memory."""

    def __init__(self) -> None:
        pytest.importorskip("opentelemetry.sdk")
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self.exporter, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.traces, self.meters = TracerProvider(), MeterProvider([self.reader])
        self.traces.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.listener = log_to_opentelemetry(self.traces, self.meters)

    def spans(self) -> list[Any]:
        return list(self.exporter.get_finished_spans())

    def metrics(self) -> dict[str, tuple[str, float, int]]:
        """The unit, the sum and the count of each metric."""
        data = self.reader.get_metrics_data()
        every = [m for r in data.resource_metrics for scope in r.scope_metrics for m in scope.metrics]
        rows = {}
        for metric in every:
            points = metric.data.data_points
            values = [getattr(point, "sum", getattr(point, "value", 0)) for point in points]
            rows[metric.name] = metric.unit, sum(values), sum(getattr(point, "count", 1) for point in points)
        return rows


def test_opentelemetry(tmp_path: Path) -> None:
    telemetry, events = Telemetry(), list[Any]()

    def listen(event: rankless.Event) -> None:
        events.append(event)
        telemetry.listener(event)

    before = time.time_ns()
    train(tmp_path / "run", listen)
    first, second, loaded, failed = telemetry.spans()
    saved = [event for event in events if isinstance(event, rankless.Saved)]
    for span, event in zip((first, second), saved, strict=True):
        assert span.name == "rankless save"
        assert (span.end_time - span.start_time) / 1e9 == pytest.approx(event.seconds)
        assert before <= span.start_time <= span.end_time <= time.time_ns()
        assert span.attributes == {
            "rankless.path": str(event.path),
            "rankless.step": event.step,
            "rankless.bytes": event.nbytes,
            "rankless.shared_bytes": event.shared_nbytes,
            "rankless.blocking_seconds": event.blocking_seconds,
        }
        assert span.status.is_unset
    assert loaded.name == "rankless load"
    assert (failed.name, failed.status.is_ok, failed.status.description) == ("rankless save", False, "full")
    assert [event.attributes["exception.type"] for event in failed.events] == ["rankless.errors.StorageError"]
    written = sum(event.nbytes - event.shared_nbytes for event in saved)
    assert telemetry.metrics() == {
        "rankless.save.duration": ("s", pytest.approx(sum(event.seconds for event in saved)), 2),
        "rankless.save.blocking_duration": ("s", pytest.approx(sum(event.blocking_seconds for event in saved)), 2),
        "rankless.save.phase.duration": ("s", pytest.approx(sum(event.seconds for event in saved)), 8),
        "rankless.save.written": ("By", written, 1),
        "rankless.load.duration": ("s", pytest.approx((loaded.end_time - loaded.start_time) / 1e9), 1),
        "rankless.save.failures": ("{save}", 1, 1),
    }


def test_opentelemetry_tells_of_the_local_tier(tmp_path: Path) -> None:
    telemetry = Telemetry()
    telemetry.listener(SavedLocally(tmp_path / "a", None, 100, 0.25))
    telemetry.listener(DrainFailed(tmp_path / "a", StorageError("full"), 1, 60.0))
    telemetry.listener(rankless.Progress("save", tmp_path / "a", 1, 2))
    assert [(span.name, dict(span.attributes)) for span in telemetry.spans()] == [
        ("rankless save locally", {"rankless.path": str(tmp_path / "a"), "rankless.bytes": 100}),
        ("rankless drain", {"rankless.path": str(tmp_path / "a")}),
    ]
    assert telemetry.metrics() == {
        "rankless.save_locally.duration": ("s", 0.25, 1),
        "rankless.save.failures": ("{save}", 1, 1),
    }


def test_a_save_is_a_child_of_the_span_of_its_caller(tmp_path: Path) -> None:
    telemetry = Telemetry()
    with telemetry.traces.get_tracer("training").start_as_current_span("step"):
        rankless.save_checkpoint(tmp_path, "a", {"w": torch.ones(2)}, on_event=telemetry.listener)
    save, step = telemetry.spans()
    assert (save.name, step.name) == ("rankless save", "step")
    assert save.parent.span_id == step.context.span_id
    assert step.start_time <= save.start_time <= save.end_time <= step.end_time


def save_with(path: str) -> list[str]:
    calls: list[str] = []
    writer = mock.Mock(add_scalar=lambda name, *_: calls.append(name))
    rankless.save_checkpoint(path, "s", {"w": torch.ones(2)}, step=1, on_event=log_to_tensorboard(writer))
    return calls if dist.get_rank() else sorted(calls)


def test_only_the_first_rank_sends(ranks: Ranks, tmp_path: Path) -> None:
    first, *others = ranks(3, save_with, str(tmp_path))
    assert first == sorted(f"checkpoint/{name}" for name in SAVED | BLOCKING_PHASES)
    assert others == [[], []]


@pytest.mark.parametrize("make", [log_to_tensorboard, log_to_wandb])
def test_progress_is_not_sent(make: Callable[[Any], OnEvent]) -> None:
    target = mock.Mock()
    make(target)(rankless.Progress("save", Path("a"), 1, 2))
    assert not target.mock_calls
