"""Random histories of runs whose jobs are on several hosts: those of ``campaigns.run_histories``, with its oracle.

Each client has a tier of its own. The processes of jobs are forked on the clients, killed and stopped there; the server
copies, moves, merges and removes run directories. The oracle looks at the files as the server has them, never through
the cache of a client.
"""

from __future__ import annotations

import itertools
import os
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from campaigns.common.case_runner import run_cases
from campaigns.hosts import guest
from campaigns.hosts.testbed import Testbed, mount_point
from campaigns.hosts.workers import RemoteError, Worker
from campaigns.run_histories.batches import prepare
from campaigns.run_histories.draws import draw_at_random
from campaigns.run_histories.history import History
from campaigns.run_histories.hosts import OneMachine
from campaigns.run_histories.places import FolderPlace, Place
from campaigns.run_histories.processes import Command, ForkedProcess, HangError, JobProcess
from campaigns.run_histories.state import Counts, ViolationError
from campaigns.run_histories.trainer import Reply, Trainer

#: The events of a history.
_EVENTS = 26

#: The histories that are made at a time.
_LANES = 3

#: The clock of each client is ahead of the one before by this.
_SECONDS_APART = 600.0

#: The seconds after which a job counts as hanging. Calls take several times as long as on real hosts.
_SECONDS = 240.0

#: The clients by the names of hosts in a history.
_CLIENTS = {"a": 0, "b": 1}

#: The jobs of this host that a launcher, which is this process, has started.
_started: dict[int, ForkedProcess] = {}


def _start(number: int, place: FolderPlace, tier: Path | None, drain_every: int) -> None:
    _started[number] = ForkedProcess(number, partial(Trainer, place, tier, "", drain_every), _SECONDS)


def _send(number: int, command: Command) -> None:
    _started[number].send(command)


def _wait(number: int) -> Reply | str:
    return _started[number].wait()


def _wake(number: int) -> None:
    _started[number].wake()


def _kill(number: int) -> None:
    _started.pop(number).kill()


def _remove(folder: Path) -> None:
    OneMachine().remove("", folder)


class GuestProcess:
    """A :class:`JobProcess` on a client, which a launcher there has forked."""

    def __init__(self, launcher: Worker, number: int) -> None:
        self._launcher, self._number = launcher, number
        self._is_killed = False

    def send(self, command: Command) -> None:
        """See :class:`JobProcess`."""
        self._launcher.call(_send, self._number, command)

    def wait(self) -> Reply | str:
        """See :class:`JobProcess`."""
        try:
            return self._launcher.call(_wait, self._number)  # type: ignore[no-any-return]
        except RemoteError as error:
            if error.kind == HangError.__name__:
                raise HangError(str(error)) from error
            raise

    def wake(self) -> None:
        """See :class:`JobProcess`."""
        self._launcher.call(_wake, self._number)

    def kill(self) -> None:
        """See :class:`JobProcess`."""
        if not self._is_killed:
            self._is_killed = True
            self._launcher.call(_kill, self._number)


@dataclass(frozen=True)
class Guests:
    """The clients as the :class:`Hosts` of a history, by a launcher on each of them."""

    launchers: list[Worker]

    def start(self, number: int, place: Place, tier: Path | None, host: str, drain_every: int) -> JobProcess:
        """Start the process of a job: on the host of its tier, or on each client in turn."""
        launcher = self.launchers[_CLIENTS[host] if host else number % len(self.launchers)]
        folder = place.path()
        launcher.call(_start, number, FolderPlace(folder.parent, folder.name), tier, drain_every)
        return GuestProcess(launcher, number)

    def read_files(self, host: str, folder: Path) -> dict[str, bytes]:
        """See :class:`Hosts`."""
        place = FolderPlace(folder.parent, folder.name)
        return dict(self.launchers[_CLIENTS[host]].call(FolderPlace.read_files, place))

    def remove(self, host: str, folder: Path) -> None:
        """See :class:`Hosts`."""
        self.launchers[_CLIENTS[host]].call(_remove, folder)

    def flush(self) -> None:
        """See :class:`Hosts`. A stopped job may have written what is not at the server yet."""
        for launcher in self.launchers:
            launcher.call(os.sync)


@dataclass(frozen=True)
class ServedPlace:
    """A :class:`Place` that jobs reach by a mount. The server reads, copies, moves and removes it."""

    server: Worker
    mount: Path
    name: str

    @property
    def environment(self) -> dict[str, str]:
        """See :class:`Place`."""
        return {}

    @property
    def spared(self) -> bytes:
        """See :class:`Place`."""
        return b""

    @property
    def _exported(self) -> FolderPlace:
        return FolderPlace(guest.EXPORT, self.name)

    def path(self) -> Path:
        """See :class:`Place`."""
        return self.mount / self.name

    def read_files(self) -> dict[str, bytes]:
        """See :class:`Place`. Files that clients keep because they were removed while open are left out."""
        files = self.server.call(FolderPlace.read_files, self._exported)
        return {path: data for path, data in files.items() if not Path(path).name.startswith(".nfs")}

    def copy(self, name: str, *, hidden: bool = True) -> ServedPlace:
        """See :class:`Place`."""
        self.server.call(partial(FolderPlace.copy, hidden=hidden), self._exported, name)
        return replace(self, name=name)

    def move(self, name: str) -> ServedPlace:
        """See :class:`Place`."""
        self.server.call(FolderPlace.move, self._exported, name)
        return replace(self, name=name)

    def remove(self) -> None:
        """See :class:`Place`."""
        self.server.call(FolderPlace.remove, self._exported)


@dataclass(frozen=True)
class Lane:
    """The processes that make one history after the other: a launcher on each client, and one on the server."""

    guests: Guests
    server: Worker

    def make(self, mount: Path, name: str) -> ServedPlace:
        """Return a run directory."""
        return ServedPlace(self.server, mount, name)


@dataclass(frozen=True)
class Outcome:
    """The end of a history. ``violation`` has the history that led to it."""

    counts: Counts
    seconds: float
    violation: str = ""


def run(testbed: Testbed, kinds: list[str], times: int, report: Callable[[str], None]) -> None:
    """Make ``times`` histories on each kind of mount, some at a time. All clients have different clocks."""
    for place, client in enumerate(testbed.clients):
        with client.worker() as worker:
            worker.call(guest.set_clock_ahead, _SECONDS_APART * place)
    for kind in kinds:
        with _open_lanes(testbed, kind) as lanes:
            report(_make_histories(lanes, kind, testbed.first_seed, times))


@contextmanager
def _open_lanes(testbed: Testbed, kind: str) -> Iterator[queue.Queue[Lane]]:
    """Yield lanes whose launchers have imported and done once what jobs do."""
    lanes: queue.Queue[Lane] = queue.Queue()
    with ExitStack() as stack:
        launchers = [[stack.enter_context(client.worker()) for client in testbed.clients] for _ in range(_LANES)]
        for place, launcher in enumerate(itertools.chain(*launchers)):
            launcher.send(prepare, (FolderPlace(mount_point(kind), f"warm-{kind}-{place}"),))
        for launcher in itertools.chain(*launchers):
            launcher.receive()
        for of_lane in launchers:
            lanes.put(Lane(Guests(of_lane), stack.enter_context(testbed.server.worker())))
        yield lanes


def _make_histories(lanes: queue.Queue[Lane], kind: str, first: int, times: int) -> str:
    def make(seed: int) -> Outcome:
        lane = lanes.get()
        try:
            return _make_history(lane, kind, seed)
        finally:
            lanes.put(lane)

    started, total, wrong = time.monotonic(), Counts(), 0
    for _, outcome in run_cases(range(first, first + times), make, _LANES):
        total.add(outcome.counts)
        wrong += bool(outcome.violation)
    events = sum(total.pairs.values())
    errors = ", ".join(f"{count} {name}" for name, count in sorted(total.errors.items()))
    verdict = f"WRONG: {wrong} histories" if wrong else "none wrong"
    figures = f"{events} events, {total.resumed} of {total.resumes} resumes returned a checkpoint, errors: {errors}"
    seconds = time.monotonic() - started
    return f"{kind} | {times} histories from seed {first} in {seconds:.0f} s, {figures} | {verdict}"


def _make_history(lane: Lane, kind: str, seed: int) -> Outcome:
    base, counts, started = Path(f"/dev/shm/tiers-{kind}-{seed}"), Counts(), time.monotonic()
    history = History(partial(lane.make, mount_point(kind)), lane.guests, base, seed, counts)
    violation = ""
    try:
        history.run(_EVENTS, draw_at_random(seed, {}))
    except ViolationError as error:
        story = "\n".join(["; ".join(history.events), *history.log])
        violation = f"{kind}, seed {seed}: {error}\n{story}\n"
    finally:
        for host in _CLIENTS:
            lane.guests.remove(host, base)
    return Outcome(counts, time.monotonic() - started, violation)
