"""The Chrome trace-event format, which Perfetto reads: spans as JSON, and several traces as one.

Times are the same as in ``torch.profiler``: microseconds of the clock of the host, from a base that the file names.
Torch takes the start of the current period of three months as the base, so that microseconds with decimals fit into a
double.

:mod:`rankless.tracing` encodes on each rank, in the thread that was last, and merges in one process. Times must agree
with ``torch.profiler``.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rankless.errors import InvalidArgumentError
from rankless.observe.spans import Recording, Span
from rankless.observe.units import format_count

#: The seconds of a period. Its start is the base of all times in a file, as in ``torch.profiler``.
_BASE_SECONDS = 7_889_238

#: The name of the base in a file, in nanoseconds since 1970.
_BASE_KEY = "baseTimeNanoseconds"

#: Times of traces are smaller.
_MAX_NUMBER = 1e300

#: The pairs of readings of the two clocks.
_PAIRS = 5

#: The facts that a file has about its writer.
_WRITER = "rankless"


@dataclass(frozen=True)
class Clock:
    """The clock of the host: the nanoseconds since 1970 at which ``time.perf_counter_ns`` was 0, and the base.

    It is read once for each trace, so that a correction of the clock changes no duration.
    """

    offset: int
    base: int

    @classmethod
    def read(cls) -> Clock:
        """Read the clock now.

        The system may run another process between the two readings: of several pairs, that read fastest counts.
        """
        _, offset, now = min(_read_pair() for _ in range(_PAIRS))
        return cls(offset, now - now % (_BASE_SECONDS * 10**9))

    def microseconds(self, counted: int) -> float:
        """Return a time of ``time.perf_counter_ns`` in microseconds since the base."""
        return (counted + self.offset - self.base) / 1000


def _read_pair() -> tuple[int, int, int]:
    """Return the nanoseconds that a pair of readings took, their difference, and the time since 1970."""
    before, now, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
    return after - before, now - before, now


@dataclass(frozen=True)
class TracedProcess:
    """The process of a trace. In the file, its number is its rank, so that traces of several hosts do not collide."""

    rank: int
    host: str
    pid: int


def encode_trace(recording: Recording, process: TracedProcess, clock: Clock) -> bytes:
    """Return the file of a trace."""
    return json.dumps(
        {
            "traceEvents": [
                *_describe(recording, process),
                *(_event(span, process, clock) for span in recording.spans),
            ],
            "displayTimeUnit": "ms",
            _BASE_KEY: clock.base,
            "otherData": {
                "writer": _WRITER,
                "rank": process.rank,
                "host": process.host,
                "pid": process.pid,
                "dropped_spans": recording.dropped,
            },
        }
    ).encode()


def merge_files(files: Mapping[str, bytes]) -> bytes:
    """Return the file of several traces, by their names, in the time of the first.

    In traces of rankless a process has the number of its rank. A process or device of another trace that has a number
    which is taken gets a new one. Raises ``InvalidArgumentError`` naming a file that is no trace.
    """
    traces = [_decode(name, data) for name, data in files.items()]
    base = _base_of(traces[0]) if traces else 0
    taken = {event.get("pid") for trace in traces if _is_own(trace) for event in trace["traceEvents"]}
    events: list[dict[str, Any]] = []
    for trace in traces:
        pids = {} if _is_own(trace) else _renumber({event.get("pid") for event in trace["traceEvents"]}, taken)
        events += _moved(trace["traceEvents"], (_base_of(trace) - base) / 1000, pids)
    return json.dumps(
        {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            _BASE_KEY: base,
            "otherData": {"writer": _WRITER},
        }
    ).encode()


def _describe(recording: Recording, process: TracedProcess) -> Iterator[dict[str, Any]]:
    """Yield the events that name the process and its threads. For example, ``rank 3 (node-1, pid 42)``."""
    name = f"rank {process.rank} ({process.host}, pid {process.pid})"
    yield _metadata(process, 0, "process_name", name=name)
    yield _metadata(process, 0, "process_sort_index", sort_index=process.rank)
    if recording.dropped:
        yield _metadata(process, 0, "process_labels", labels=f"{format_count(recording.dropped, 'span')} dropped")
    for thread, thread_name in sorted(recording.threads.items()):
        yield _metadata(process, thread, "thread_name", name=thread_name)


def _metadata(process: TracedProcess, thread: int, kind: str, **args: object) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process.rank, "tid": thread, "args": args}


def _event(span: Span, process: TracedProcess, clock: Clock) -> dict[str, Any]:
    """Return a span as a complete event: one with a start and a duration."""
    args = {name: value for name, value in (("detail", span.detail), ("error", span.error)) if value}
    return {
        "name": span.name,
        "cat": span.category,
        "ph": "X",
        "ts": clock.microseconds(span.started),
        "dur": (span.ended - span.started) / 1000,
        "pid": process.rank,
        "tid": span.thread,
        **({"args": args} if args else {}),
    }


def _decode(name: str, data: bytes) -> dict[str, Any]:
    try:
        decoded = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"{name} is not JSON: pass traces of rankless or torch.profiler ({error})"
        ) from error
    if not isinstance(decoded, dict) or not isinstance(decoded.get("traceEvents"), list):
        raise InvalidArgumentError(f"{name} has no traceEvents: pass traces of rankless or torch.profiler")
    if not all(map(_is_event, decoded["traceEvents"])) or not _is_number(decoded.get(_BASE_KEY, 0)):
        raise InvalidArgumentError(
            f"{name} has events without a time or a process: pass traces of rankless or torch.profiler"
        )
    return decoded


def _is_event(event: object) -> bool:
    return (
        isinstance(event, dict)
        and _is_number(event.get("ts", 0))
        and isinstance(event.get("pid"), int | float | str | None)
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < _MAX_NUMBER  # not NaN, and no integer that is no float


def _base_of(trace: Mapping[str, Any]) -> int:
    return int(trace.get(_BASE_KEY, 0))


def _is_own(trace: Mapping[str, Any]) -> bool:
    """Return whether rankless has written a trace."""
    about = trace.get("otherData")
    return isinstance(about, dict) and about.get("writer") == _WRITER


def _renumber(pids: set[Any], taken: set[Any]) -> dict[Any, int]:
    """Return new numbers for the processes if their number is taken, and take the numbers of all."""
    collisions = sorted(pid for pid in pids & taken if isinstance(pid, int))
    numbers = itertools.count(max((pid for pid in pids | taken if isinstance(pid, int)), default=0) + 1)
    renumbered = dict(zip(collisions, numbers, strict=False))
    taken |= pids | set(renumbered.values())
    return renumbered


def _moved(events: Sequence[dict[str, Any]], microseconds: float, pids: Mapping[Any, int]) -> Iterator[dict[str, Any]]:
    """Yield events, later by a number of microseconds, and with the new numbers of their processes."""
    for event in events:
        time_of = {"ts": event["ts"] + microseconds} if "ts" in event else {}
        process = {"pid": pids[event["pid"]]} if event.get("pid") in pids else {}
        yield {**event, **time_of, **process}
