"""Timing of work in a separate process, which imports and warms up before the clock starts, and its memory."""

from __future__ import annotations

import multiprocessing as mp
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.measure import Contender, Figure, SelfTimed, Table

#: The interval, in seconds, at which the memory of the process is sampled.
_LOOK = 0.005


@dataclass(frozen=True)
class ProcessTimer:
    """A timer of ``work`` in a new process each, after ``warm`` (both pickled). ``clear`` runs right before it."""

    work: Callable[[], object]
    warm: Callable[[], object]
    clear: Callable[[], object]
    #: The increase of the process's memory in each run, in bytes, without pages shared with the page cache.
    memory: list[int] = field(default_factory=list)

    def build_contender(self) -> Contender:
        """Return the contender, timed from its start signal to its end."""
        running: list[_TimedProcess] = []

        def prepare() -> None:
            running.append(_TimedProcess(self.work, self.warm))
            self.clear()

        def run() -> SelfTimed:
            timed, rise = running.pop().run()
            self.memory.append(rise)
            return timed

        return Contender(run, prepare)


class _TimedProcess:
    """A process that waits for its start signal."""

    def __init__(self, work: Callable[[], object], warm: Callable[[], object]) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.__main__"])  # otherwise each process would import torch again
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run_child, args=(work, warm, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe.recv()

    def run(self) -> tuple[SelfTimed, int]:
        """Start the work and wait for its end. Return its time, and the peak increase of its memory."""
        before = peak = self._resident()
        started = time.perf_counter()
        self._pipe.send(None)
        while not self._pipe.poll(_LOOK):
            peak = max(peak, self._resident())
        self._pipe.recv()  # raises if the process failed
        timed = SelfTimed(time.perf_counter() - started)
        self._process.join()
        return timed, peak - before

    def _resident(self) -> int:
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))) * 1024


def _run_child(work: Callable[[], object], warm: Callable[[], object], pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    warm()
    pipe.send(None)
    pipe.recv()
    work()
    pipe.send(None)


def build_memory_table(title: str, jobs: Mapping[str, ProcessTimer]) -> Table:
    """Return a table of the peak memory of each contender over all rounds."""
    figures = {name: Figure((max(job.memory) / 1e6,)) for name, job in jobs.items()}
    return Table(title, "MB", figures, note="The most of all rounds.")
