"""``trace``: records saves and loads, phase by phase, as a file for Perfetto.

Each rank calls it for itself: no vote is held. A record must not change the behaviour of a save or load.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable
from concurrent.futures import Future
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Self

import torch.distributed as dist

from rankless.errors import InvalidArgumentError, RankTimeoutError
from rankless.observe.spans import Recording, tracer
from rankless.observe.trace_format import Clock, TracedProcess, encode_trace, merge_files
from rankless.storage import posix
from rankless.storage.atomic_rename import replace_output

_log = logging.getLogger("rankless")


def trace(output: str | PathLike[str], *, max_spans: int = 100_000) -> Trace:
    """Record the work of rankless inside a ``with`` block, and write it as a trace that Perfetto opens.

    Every phase of a save or a load is a span: when it began and ended, on which rank and in which thread. Each rank
    writes a file of its own, and needs no other rank for that; :func:`merge_traces` makes one trace of them. Saves that
    were begun in the block and end later, in the background, are recorded to their end, and phases of other calls
    meanwhile as well. Then the file is written: see :meth:`Trace.wait`.

    Traces may overlap: each has all that happens until it ends. A forked process has no trace.

    Args:
        output: The file to write. If there are several ranks, ``save.json`` becomes ``save.rank3.json`` on rank 3. A
            file of this name is replaced. Its folder must exist.
        max_spans: The most spans that are kept. If there are more, the oldest are dropped, and the trace says how many.
            A save has about 30, and each takes some hundred bytes of memory.

    Returns:
        The trace, a context manager. It can be used once.

    Raises:
        InvalidArgumentError: ``output`` is not in a folder of a file system, or ``max_spans`` is not positive. At the
            end of the block: something else than a file is there.
        StorageError: The file cannot be written, at the end of the block.
    """
    if max_spans < 1:
        raise InvalidArgumentError(f"max_spans must be at least 1, got {max_spans}")
    located = posix.local_path(output)
    if not posix.is_directory(located.parent):
        raise InvalidArgumentError(f"the folder of the trace {located} does not exist: create it first")
    return Trace(located, max_spans)


class Trace:
    """A trace of this process. :func:`rankless.trace` makes it."""

    def __init__(self, path: Path, max_spans: int) -> None:
        self._recording = Recording(max_spans, self._write)
        self._given, self._ranks, self._pid = path, _find_ranks(), os.getpid()
        self._clock = Clock.read()
        self._written: Future[Path] = Future()
        self._has_begun = False

    @property
    def path(self) -> Path:
        """The file of this rank. For example, ``save.rank3.json`` on rank 3 for ``save.json``."""
        rank, size = self._ranks
        return self._given if size == 1 else self._given.with_suffix(f".rank{rank}{self._given.suffix}")

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until the file is written, and return its path. The block must have ended.

        Args:
            timeout: The maximum number of seconds to wait. ``None`` means no limit.

        Raises:
            RankTimeoutError: A save that was begun in the block is still in progress after ``timeout`` seconds.
            StorageError: The file could not be written.
        """
        try:
            return self._written.result(timeout)
        except TimeoutError:
            message = f"a save is still in progress after {timeout} seconds, so {self.path} is not written yet"
            raise RankTimeoutError(message) from None

    def __enter__(self) -> Self:
        if self._has_begun:
            raise InvalidArgumentError("a trace can be used once: call rankless.trace() for another one")
        self._has_begun = True
        tracer.start(self._recording)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid:  # a forked process leaves the block, too
            return
        self._ranks = max(self._ranks, _find_ranks(), key=lambda ranks: ranks[1])
        self._recording.leave_block()
        if kind is None and self._written.done():
            self._written.result()  # raises the error of the write

    def _write(self, recording: Recording) -> None:
        """Write the file, in the thread that was last. An error is raised by the block, or by :meth:`wait`."""
        try:
            process = TracedProcess(self._ranks[0], socket.gethostname(), self._pid)
            replace_output(self.path, encode_trace(recording, process, self._clock))
        except Exception as error:  # noqa: BLE001 - a trace must not break the save that ends it
            _log.error("the trace %s could not be written: %s", self.path, error)
            self._written.set_exception(error)
            return
        if recording.dropped:
            note = "the trace %s lacks its oldest %d spans: record for a shorter time, or raise max_spans"
            _log.warning(note, self.path, recording.dropped)
        self._written.set_result(self.path)


def merge_traces(output: str | PathLike[str], traces: Iterable[str | PathLike[str]]) -> None:
    """Write several traces into one file, with a process for each rank.

    Traces of ``torch.profiler`` may be among them: times are of the same clock. Their processes and devices get new
    numbers where ranks have the same ones. The clocks of several hosts differ, by milliseconds if they are
    synchronized, and nothing corrects that.

    Args:
        output: The file to write. A file of this name is replaced.
        traces: The files of traces, of all ranks of one job.

    Raises:
        InvalidArgumentError: There are no files, one is not a trace, or something else than a file is at ``output``.
        StorageError: A file cannot be read or written.
    """
    files = {str(name): posix.read_small(posix.local_path(name)) for name in traces}
    if not files:
        raise InvalidArgumentError("there are no traces to merge: pass the files that the ranks have written")
    replace_output(posix.local_path(output), merge_files(files))


def _find_ranks() -> tuple[int, int]:
    """Return the rank of this process in its job, and the number of ranks."""
    is_alone = not (dist.is_available() and dist.is_initialized())
    return (0, 1) if is_alone else (dist.get_rank(), dist.get_world_size())
