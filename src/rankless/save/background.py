"""The background saves of this process, and the resources that they share.

Background saves share three things: the staging memory, the guard that makes optimizer steps and loads wait for copies,
and the handlers at process exit that wait for the saves. Each exists once in a process, through any objects that the
caller saves with, so one object owns them all.

A forked process has no background saves: the threads that save stay in its parent process.

:func:`~rankless.save.run_save.run_save` lists a save here before its thread starts. Callers of saves and loads wait for
them here, each rank for itself: no method waits for another rank. All ranks must start saves in the same order, because
they meet by number. The tensors that a save has staged must be copied before the guard lets a step go on.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from rankless.engine.comm.process_group_argument import ProcessGroupArgument, current_process_group
from rankless.engine.io.staging_memory import Arena, StagingMemory
from rankless.errors import RankTimeoutError
from rankless.observe.spans import span, tracer
from rankless.process.exit_order import ExitStage, call_at_exit
from rankless.save.deferred_errors import DeferredErrors
from rankless.save.handle import SaveHandle
from rankless.state.step_guard import StepGuard

_log = logging.getLogger("rankless")


class SaveInFlight(msgspec.Struct, eq=False):
    """A save that runs in the background. Saves with the same ``scope``, a path, wait for each other's ``turn``.

    The turn ends when the next save may begin; ``done``, when the save has ended.

    The process group is a weak reference: an unreported failure must not keep a group alive that the caller has
    destroyed, because a group has threads.
    """

    scope: Path
    group: weakref.ref[dist.ProcessGroup] | None
    handle: SaveHandle[Any]
    turn: Future[None]
    done: Future[Any]
    has_started: threading.Event = msgspec.field(default_factory=threading.Event)
    #: To be called when the thread ends: traces record it to its end.
    end_recording: Callable[[], None] = msgspec.field(default_factory=tracer.hold)

    @property
    def thread(self) -> threading.Thread | None:
        """The thread that saves."""
        return self.handle.thread


class BackgroundSaves:
    """The saves of this process that run in the background or have failed, and the turns of the paths."""

    def __init__(self) -> None:
        self._memory, self._guard = StagingMemory(), StepGuard()
        #: The saves in progress, and the failed saves with an error that was not raised yet.
        self._flights: list[SaveInFlight] = []
        #: By path, the lock of the thread that starts a save, until the save is done or runs in the background.
        self._turns: weakref.WeakValueDictionary[Path, _PathTurn] = weakref.WeakValueDictionary()
        #: The calls that save now. Each is an object of its own.
        self._calls: set[object] = set()
        self._process = 0
        self._is_interrupted = False

    def prepare_memory(self, nbytes: int) -> None:
        """Prepare staging memory for the first save in the background.

        The first step of a training calls it in the thread of the caller, by way of
        :meth:`~rankless.run_directory.RunDirectory.prepare_staging`.
        """
        self._memory.prepare_buffer(nbytes)

    @contextmanager
    def path_turn(
        self, scope: Path, process_group: ProcessGroupArgument, *, raises_failures: bool = True
    ) -> Iterator[None]:
        """Wait for the saves of ``scope``, then prevent other threads from starting one inside the ``with`` block.

        Raises the error of a failed save of the same process group, once, and after the block, so that the state that
        this saves is not lost. If the block fails, the next save or :meth:`finalize` raises it. Errors of saves of
        other groups are not raised here, because other ranks would not raise them in this call. Without
        ``raises_failures`` none is raised.

        The thread of the caller enters it, on each rank, around the start of a save or drain.
        """
        group = current_process_group(process_group)
        turn = self._turns.setdefault(scope, _PathTurn())
        while True:
            # Wait without the lock: a listener of the save in progress may save to the same path.
            with span("wait for the save before", "wait"):
                flights = self._wait_for_turns(scope)
            with turn.lock:
                if not all(flight.turn.done() for flight in self._other_flights(scope)):
                    continue
                failed = _of_group(flights, group) if raises_failures else []
                if failed and _is_rank_missing(failed):  # the block would wait for it again
                    self._raise_failures(failed)
                self._guard.remove_idle_hook()
                call = object()
                self._calls.add(call)
                try:
                    yield
                finally:
                    self._calls.discard(call)
                if failed:
                    failures = DeferredErrors()
                    failures.run_until_success(partial(self._raise_failures, failed))
                    failures.raise_first("the save that raises this error has begun all the same")
                return

    def wait_for_turn(self, scope: Path, process_group: ProcessGroupArgument) -> None:
        """Wait until a save may begin. Raise the errors that :meth:`path_turn` would raise.

        :meth:`rankless.Checkpointer.save` calls it first, in the thread of the caller.
        """
        self._raise_failures(_of_group(self._wait_for_turns(scope), current_process_group(process_group)))

    def open_arena(self) -> Arena:
        """Return staging memory for one save. :func:`~rankless.save.run_save.run_save` calls it and releases it."""
        return Arena(self._memory)

    def let_steps_wait(self, copied: threading.Event, order_steps: Callable[[], None] | None) -> None:
        """Let optimizer steps and loads wait until ``copied`` is set.

        :func:`~rankless.save.run_save.run_save` calls it before it starts a thread. ``order_steps`` is
        :attr:`StagedTensors.order_steps`.
        """
        self._guard.add_copy(copied, order_steps)

    def add(self, flight: SaveInFlight) -> None:
        """List a save, whose thread is about to start. The end of the process waits for it from now on."""
        if self._process != os.getpid():
            self._process = os.getpid()
            call_at_exit(ExitStage.SAVES, self._join_threads)
            call_at_exit(ExitStage.STATUS, self._exit_if_failed)
        self._flights.append(flight)

    def remove(self, flight: SaveInFlight) -> None:
        """Remove a save from the list: it has not started, or has ended without an error."""
        self._flights.remove(flight)

    def is_saving(self) -> bool:
        """Return whether a save is in progress, in a call or in the background.

        The thread that computes statistics asks it, and reads while no save is in progress.
        """
        return bool(self._calls) or any(not flight.done.done() for flight in list(self._flights))

    def _other_flights(self, scope: Path | None) -> list[SaveInFlight]:
        """Return the saves of a path, or all, except the one that runs in this thread, where a listener may save."""
        this_thread = threading.current_thread()
        flights = [flight for flight in list(self._flights) if scope in {None, flight.scope}]
        return [flight for flight in flights if flight.thread is not this_thread]

    def _wait_for_turns(self, scope: Path) -> list[SaveInFlight]:
        """Wait until the next save of a path may begin, and return the saves that have failed."""
        wait([flight.turn for flight in self._other_flights(scope)])
        return self._failed_saves(scope)

    def _wait_for_saves(self, scope: Path | None) -> list[SaveInFlight]:
        """Wait for the saves of a path, or for all, and return those that have failed."""
        wait([flight.done for flight in self._other_flights(scope)])
        return self._failed_saves(scope)

    def _failed_saves(self, scope: Path | None) -> list[SaveInFlight]:
        flights = [flight for flight in list(self._flights) if scope in {None, flight.scope}]
        return [flight for flight in flights if flight.done.done() and flight.done.exception() is not None]

    def finalize(self, scope: Path | None = None) -> None:
        """Wait for the saves of a path, or for all, and raise the error of the first that failed.

        Each error is raised once: if several saves have failed, the next call raises the next error.

        The thread of the caller calls it, in ``finalize()`` and before loads of a run with a tier.
        """
        failed = self._wait_for_saves(scope)
        self._guard.remove_idle_hook()
        if scope is None:
            self._memory.free_idle()
        self._raise_failures(failed)

    def wait_for_copies(self) -> None:
        """Wait until no save copies tensors of the caller, which are about to change.

        Loads and live copies call it in the thread of the caller, before they change anything.
        """
        self._guard.wait()

    def _raise_failures(self, failed: list[SaveInFlight]) -> None:
        for flight in failed:
            try:
                self._flights.remove(flight)
            except ValueError:  # another thread raises it
                continue
            flight.handle.wait()

    def _join_threads(self) -> None:
        """Wait for the threads of all saves. A process of multiprocessing does this before it joins its threads."""
        try:
            for flight in list(self._flights):
                if flight.thread is not None and flight.thread is not threading.current_thread():
                    flight.thread.join()
        except KeyboardInterrupt:
            self._is_interrupted = True

    def _exit_if_failed(self) -> None:
        """End the process with status 1 if a save has failed and its error was never raised."""
        failures = [(flight.handle.path, flight.handle.unreported_failure()) for flight in self._flights]
        unreported = [(path, error) for path, error in failures if error is not None]
        if not unreported and not self._is_interrupted:
            return
        try:
            for path, error in unreported:
                _log.error(
                    "the save of %s failed and the program ends without waiting for it: the exit status is 1. "
                    "Call rankless.finalize() at the end to raise the error: %s",
                    path,
                    error,
                )
        finally:
            _exit_with_failure()

    def forget_in_forked_process(self) -> None:
        """Forget all saves in a forked process: they belong to its parent process."""
        self._guard.forget_copies()
        self._memory, self._flights, self._calls = StagingMemory(), [], set()
        self._turns = weakref.WeakValueDictionary()


class _PathTurn:
    """The lock for starting a save of a path. It is reentrant, so that an event listener may start a save, too."""

    def __init__(self) -> None:
        self.lock = threading.RLock()


def _of_group(flights: list[SaveInFlight], group: dist.ProcessGroup | None) -> list[SaveInFlight]:
    """Return the saves of a process group. All its ranks raise their errors in the same call."""
    return [flight for flight in flights if (flight.group and flight.group()) is group]


def _is_rank_missing(failed: list[SaveInFlight]) -> bool:
    return any(isinstance(flight.done.exception(), RankTimeoutError) for flight in failed)


def _exit_with_failure() -> None:
    # Functions of atexit cannot change the exit status, so the process ends here.
    with suppress(Exception):  # a handler may do anything
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or None
            stream.flush()
    os._exit(1)


background_saves = BackgroundSaves()
os.register_at_fork(after_in_child=background_saves.forget_in_forked_process)
