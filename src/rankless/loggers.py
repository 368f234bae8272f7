"""Listeners that send the figures of saves and loads to TensorBoard, Weights & Biases, MLflow and OpenTelemetry.

Pass one as ``on_event`` on every rank: only the first rank sends. An asynchronous save is reported when it is durable,
some steps after it began, and under its own step.

A listener is called in the thread that saves or loads, and must not wait for other ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from rankless.errors import InvalidArgumentError
from rankless.observe.events import DrainFailed, Event, Loaded, OnEvent, Progress, Saved, SavedLocally, SaveFailed

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

#: The prefix of the names of all figures.
_PREFIX = "checkpoint"

#: Sends figures by name that belong to a step.
_Send = Callable[[Mapping[str, float], int], None]


def log_to_tensorboard(writer: Any) -> OnEvent:
    """Return a listener that writes the figures of saves and loads as scalars.

    Args:
        writer: A ``torch.utils.tensorboard.SummaryWriter``; on other ranks than the first it may be ``None``.

    Returns:
        The listener, for ``on_event``.
    """

    def send(figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)

    return _Listener(send)


def log_to_wandb(run: Any = None) -> OnEvent:
    """Return a listener that logs the figures of saves and loads, over the axis ``checkpoint/step``.

    The figures become a part of the row that the training is filling: its next ``run.log()``, or the end of the run,
    stores them. Of several saves between two rows the figures of the last one remain.

    Args:
        run: A run of ``wandb.init``; by default the current one, when the first event is logged.

    Returns:
        The listener, for ``on_event``.
    """
    runs: list[Any] = []

    def send(figures: Mapping[str, float], step: int) -> None:
        if not runs:
            runs.append(current_wandb_run() if run is None else run)
            # Steps of checkpoints come later than steps of the training, and wandb wants them in order.
            runs[0].define_metric(f"{_PREFIX}/*", step_metric=f"{_PREFIX}/step")
        # A commit would end the row of the training, and W&B drops values of a step before the current one.
        runs[0].log({**figures, f"{_PREFIX}/step": step}, commit=False)

    return _Listener(send)


def log_to_mlflow(run_id: str | None = None) -> OnEvent:
    """Return a listener that logs the figures of saves and loads as metrics.

    Args:
        run_id: The id of a run; by default the active run of this thread, when this function is called.

    Returns:
        The listener, for ``on_event``.

    Raises:
        InvalidArgumentError: There is no active run, and none was passed. On other ranks than the first this is no
            error.
    """
    import mlflow  # noqa: PLC0415 - an optional package

    wanted = find_mlflow_run(run_id) if is_first_rank() else ""
    client = mlflow.MlflowClient()

    def send(figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            client.log_metric(wanted, name, value, step=step)

    return _Listener(send)


def log_to_opentelemetry(
    tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
) -> OnEvent:
    """Return a listener that makes spans and metrics of OpenTelemetry from saves and loads.

    Each save and load is a span that is as long as it took. The span that is current in the thread that reports it is
    its parent: of a save that blocks the caller, the caller's.

    Args:
        tracer_provider: Where the spans go; by default the global provider.
        meter_provider: Where the metrics go; by default the global provider.

    Returns:
        The listener, for ``on_event``.
    """
    return _Telemetry(tracer_provider, meter_provider)


class _Telemetry:
    """A listener that turns events into spans, which end now, and into metrics."""

    def __init__(self, tracer_provider: TracerProvider | None, meter_provider: MeterProvider | None) -> None:
        from opentelemetry.metrics import get_meter  # noqa: PLC0415 - an optional package
        from opentelemetry.trace import get_tracer  # noqa: PLC0415 - as above

        self._tracer = get_tracer("rankless", tracer_provider=tracer_provider)
        meter = get_meter("rankless", meter_provider=meter_provider)
        self._seconds = {
            kind: meter.create_histogram(f"rankless.{name}.duration", "s", f"Time that {text} took")
            for kind, name, text in (
                (Saved, "save", "a save, until it was durable,"),
                (SavedLocally, "save_locally", "a save into the local tier"),
                (Loaded, "load", "a load"),
            )
        }
        self._blocking_seconds = meter.create_histogram(
            "rankless.save.blocking_duration", "s", "Time for which a save blocked its caller"
        )
        self._phase_seconds = meter.create_histogram(
            "rankless.save.phase.duration", "s", "Time that a phase of a save took on the first rank"
        )
        self._written = meter.create_counter("rankless.save.written", "By", "Bytes that saves have written")
        self._failures = meter.create_counter("rankless.save.failures", "{save}", "Saves and drains that have failed")

    def __call__(self, event: Event) -> None:
        """Send the span and the metrics of an event."""
        if isinstance(event, Progress) or not is_first_rank():
            return
        if isinstance(event, SaveFailed | DrainFailed):
            self._report_failure(event)
            return
        self._send_span(event)
        self._seconds[type(event)].record(event.seconds)
        if isinstance(event, Saved):
            self._blocking_seconds.record(event.blocking_seconds)
            self._written.add(event.nbytes - event.shared_nbytes)
            for phase, seconds in event.phases.items():
                self._phase_seconds.record(seconds, {"rankless.phase": phase})

    def _send_span(self, event: Saved | SavedLocally | Loaded) -> None:
        now = time.time_ns()
        attributes: dict[str, str | float] = {"rankless.path": str(event.path), "rankless.bytes": event.nbytes}
        if event.step is not None:
            attributes["rankless.step"] = event.step
        if isinstance(event, Saved):
            attributes["rankless.blocking_seconds"] = event.blocking_seconds
            attributes["rankless.shared_bytes"] = event.shared_nbytes
        name = {Saved: "save", SavedLocally: "save locally", Loaded: "load"}[type(event)]
        began = now - round(event.seconds * 1e9)
        self._tracer.start_span(f"rankless {name}", attributes=attributes, start_time=began).end(now)

    def _report_failure(self, event: SaveFailed | DrainFailed) -> None:
        """Send a span without a length, as the event does not say when the save began."""
        from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415 - as above

        name = "save" if isinstance(event, SaveFailed) else "drain"
        span = self._tracer.start_span(f"rankless {name}", attributes={"rankless.path": str(event.path)})
        span.record_exception(event.error)
        span.set_status(Status(StatusCode.ERROR, str(event.error)))
        span.end()
        self._failures.add(1, {"rankless.kind": name})


class _Listener:
    """A listener that turns events into figures. Events without a step get the step of the event before."""

    def __init__(self, send: _Send) -> None:
        self._send = send
        self._step = self._failures = 0

    def __call__(self, event: Event) -> None:
        """Send the figures of an event."""
        if not is_first_rank():
            return
        if isinstance(event, Saved | Loaded) and event.step is not None:
            self._step = int(event.step)
        if isinstance(event, SaveFailed):
            self._failures += 1
        if figures := self._figures_of(event):
            self._send({f"{_PREFIX}/{name}": value for name, value in figures.items()}, self._step)

    def _figures_of(self, event: Event) -> dict[str, float]:
        if isinstance(event, Saved):
            return {
                "seconds": event.seconds,
                "blocking_seconds": event.blocking_seconds,
                "GB": event.nbytes / 1e9,
                "shared_GB": event.shared_nbytes / 1e9,
                "GB_per_second": event.gigabytes_per_second,
                **{f"{phase}_seconds": seconds for phase, seconds in event.phases.items()},
            }
        if isinstance(event, Loaded):
            return {"load_seconds": event.seconds}
        return {"failed_saves": self._failures} if isinstance(event, SaveFailed) else {}


def is_first_rank() -> bool:
    """Return whether this process is rank 0 of its job; a process without a process group is a job of its own."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def current_wandb_run() -> Any:
    """Return the current run of W&B. Raises ``InvalidArgumentError`` if there is none."""
    import wandb  # noqa: PLC0415 - an optional package

    if wandb.run is None:
        raise InvalidArgumentError("there is no run of Weights & Biases: call wandb.init() first, or pass the run")
    return wandb.run


def find_mlflow_run(run_id: str | None) -> str:
    """Return the id of a run of MLflow, by default of the active one. Raises ``InvalidArgumentError`` without one."""
    if run_id is not None:
        return run_id
    import mlflow  # noqa: PLC0415 - an optional package

    active = mlflow.active_run()
    if active is None:
        raise InvalidArgumentError("there is no active run of MLflow: call mlflow.start_run() first, or pass run_id=")
    return str(active.info.run_id)
