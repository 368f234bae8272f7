"""Work in a process of its own that has all imported and tried before the clock runs, and the memory it takes then."""

from __future__ import annotations

import multiprocessing as mp
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.measure import Contender, Figure, Table, Told

#: Seconds between two looks at the memory of the process.
_LOOK = 0.005


@dataclass(frozen=True)
class Apart:
    """``work`` in a new process each time, after ``warm``; both are pickled. ``clear`` comes last before the clock."""

    work: Callable[[], object]
    warm: Callable[[], object]
    clear: Callable[[], object]
    #: Bytes by which the process's own memory rose, each time: not what it has in common with the page cache.
    memory: list[int] = field(default_factory=list)

    def contender(self) -> Contender:
        """To be timed: from the word to begin until it is done."""
        running: list[_Child] = []

        def prepare() -> None:
            running.append(_Child(self.work, self.warm))
            self.clear()

        def run() -> Told:
            told, rise = running.pop().run()
            self.memory.append(rise)
            return told

        return Contender(run, prepare)


class _Child:
    """A process that waits for the word to begin."""

    def __init__(self, work: Callable[[], object], warm: Callable[[], object]) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.__main__"])  # else each process imports torch anew
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(work, warm, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe.recv()

    def run(self) -> tuple[Told, int]:
        """Begin, and wait until it is done: the time, and the most by which its memory rose."""
        before = peak = self._resident()
        started = time.perf_counter()
        self._pipe.send(None)
        while not self._pipe.poll(_LOOK):
            peak = max(peak, self._resident())
        self._pipe.recv()  # raises where the process has failed
        told = Told(time.perf_counter() - started)
        self._process.join()
        return told, peak - before

    def _resident(self) -> int:
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))) * 1024


def _serve(work: Callable[[], object], warm: Callable[[], object], pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    warm()
    pipe.send(None)
    pipe.recv()
    work()
    pipe.send(None)


def memory_table(title: str, jobs: Mapping[str, Apart]) -> Table:
    """The most that each took in any round."""
    found = {name: Figure((max(job.memory) / 1e6,)) for name, job in jobs.items()}
    return Table(title, "MB", found, note="The most of all rounds.")
