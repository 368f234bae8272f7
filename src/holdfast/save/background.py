"""The saves of this process, and what it has one of for all of them.

Saves that go on in the background share three things: the memory that they are staged in, the guard that lets steps and
loads wait until nothing is copied any more, and the end of the process, which waits for them. Each is needed once for a
process, whatever objects the caller saves through, so one object owns them all.

A forked process has none of this: the threads that save stay in the process that it was forked from.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from holdfast.engine.comm.session import current_process_group
from holdfast.engine.io.staging_memory import Arena, StagingMemory
from holdfast.process.exit_order import ExitStage, call_at_exit
from holdfast.process.gc_pause import gc_paused
from holdfast.save.handle import Result, SaveHandle
from holdfast.state.step_guard import StepGuard

#: Seconds in which a thread begins to run.
_START_SECONDS = 5.0

#: Writing gives way to training: added to the niceness of its threads.
_NICENESS = 10

_Result_co = TypeVar("_Result_co", covariant=True)

_log = logging.getLogger("holdfast")


class BackgroundOperation(Protocol[_Result_co]):
    """The steps of one save. :meth:`begin` and :meth:`stage` belong to the caller's thread."""

    @property
    def path(self) -> Path:
        """Where it will be."""

    @property
    def copied(self) -> threading.Event:
        """Set when nothing of the caller's is needed any more."""

    def undone_on_failure(self) -> AbstractContextManager[None]:
        """Leave nothing where what is done inside fails."""

    def begin(self) -> None:
        """Look at what is to be saved, plan, and open the draft."""

    def stage(self, arena: Arena) -> None:
        """Copy what must be copied in the call."""

    def complete(self) -> None:
        """Copy what was left for later."""

    def finish(self) -> _Result_co:
        """Write and commit."""

    def returned(self) -> float:
        """Note that the caller goes on. Returns for how many seconds it was kept."""

    def part(self) -> None:
        """Wait until all ranks know how it ended."""


@dataclass(eq=False)
class _SaveInFlight:
    """A save that goes on in the background. ``scope`` is the path whose saves wait for each other.

    A group that the caller has destroyed must not live on for a failure that nobody has asked about: it has threads.
    """

    scope: Path
    group: weakref.ref[dist.ProcessGroup] | None
    handle: SaveHandle[Any]
    done: Future[Any]
    has_started: threading.Event = field(default_factory=threading.Event)

    @property
    def thread(self) -> threading.Thread | None:
        """The thread that saves."""
        return self.handle.thread


class BackgroundSaves:
    """Runs the saves of this process."""

    def __init__(self) -> None:
        self._memory, self._guard = StagingMemory(), StepGuard()
        #: Those under way, and those that have failed until somebody is told.
        self._flights: list[_SaveInFlight] = []
        #: Held by the thread that begins a save of a path, until it is done or goes on in the background.
        self._turns: weakref.WeakValueDictionary[Path, _PathTurn] = weakref.WeakValueDictionary()
        self._process = 0
        self._is_interrupted = False

    @contextmanager
    def turn(self, scope: Path, process_group: dist.ProcessGroup | None) -> Iterator[None]:
        """Wait for the saves of a path that are under way, then let no other thread begin one.

        Raises what went wrong with one of the same ranks, once. Other ranks would not raise it in this call.
        """
        group = current_process_group(process_group)
        turn = self._turns.setdefault(scope, _PathTurn())
        while True:
            # Not in the turn: a listener of the save that is waited for may save, too.
            flights = self._wait(scope)
            with turn.lock:
                if self._under_way(scope):
                    continue
                self._raise_failure([flight for flight in flights if (flight.group and flight.group()) is group])
                self._guard.remove_idle_hook()
                yield
                return

    def run(
        self,
        save: BackgroundOperation[Result],
        scope: Path,
        process_group: dist.ProcessGroup | None,
        *,
        asynchronous: bool,
    ) -> SaveHandle[Result]:
        """Save, within a :meth:`turn`; with ``asynchronous`` return when it is staged."""
        arena = Arena(self._memory)
        interrupt: BaseException | None = None
        with gc_paused(), save.undone_on_failure():
            save.begin()
            # When the main thread has ended, nothing waits for other threads any more.
            if not asynchronous or not threading.main_thread().is_alive():
                info = save.finish()
                save.part()
                return SaveHandle(save.path, save.returned(), _wait_until_ended(info))
            try:
                save.stage(arena)
                handle, interrupt = self._start(save, arena, scope, process_group)
            except BaseException:
                arena.release()
                raise
        if interrupt is not None:
            raise interrupt
        return handle

    def _start(
        self, save: BackgroundOperation[Result], arena: Arena, scope: Path, process_group: dist.ProcessGroup | None
    ) -> tuple[SaveHandle[Result], BaseException | None]:
        """Start the thread. Returns what interrupted this one meanwhile, too: the save goes on then."""
        self._prepare_process()
        self._guard.add(save.copied)
        done: Future[Result] = Future()
        handle = SaveHandle(save.path, save.returned(), done)
        group = current_process_group(process_group)
        flight = _SaveInFlight(scope, None if group is None else weakref.ref(group), handle, done)
        # Not a daemon: the process waits for it. A step may wait for the copy, so the thread gives way only afterwards.
        name = f"holdfast {save.path.name}"
        handle.thread = threading.Thread(target=self._run_in_background, args=(flight, save, arena), name=name)
        self._flights.append(flight)
        try:
            handle.thread.start()
        except BaseException as error:
            if not isinstance(error, RuntimeError) and flight.has_started.wait(_START_SECONDS):
                return handle, error
            self._flights.remove(flight)
            raise
        return handle, None

    def _run_in_background(self, flight: _SaveInFlight, save: BackgroundOperation[Any], arena: Arena) -> None:
        flight.has_started.set()
        self._finish(flight, save, arena)

    def _finish(self, flight: _SaveInFlight, save: BackgroundOperation[Any], arena: Arena) -> None:
        try:
            with save.undone_on_failure():
                save.complete()
                _lower_priority()
                info = save.finish()
        except BaseException as error:  # noqa: BLE001 - raised by who waits, by the next save, or by finalize()
            arena.release()
            flight.done.set_exception(_clear_frames(error))
        else:
            arena.release()
            flight.done.set_result(info)
            save.part()
            self._flights.remove(flight)

    def _under_way(self, scope: Path | None) -> list[_SaveInFlight]:
        """The saves that are waited for; not the one of this thread, in which a listener saves."""
        own = threading.current_thread()
        flights = [flight for flight in list(self._flights) if scope in {None, flight.scope}]
        return [flight for flight in flights if not flight.done.done() and flight.thread is not own]

    def _wait(self, scope: Path | None) -> list[_SaveInFlight]:
        """Wait for the saves of a path, or for all. Returns those that have ended, and failed."""
        wait([flight.done for flight in self._under_way(scope)])
        flights = [flight for flight in list(self._flights) if scope in {None, flight.scope}]
        return [flight for flight in flights if flight.done.done() and flight.done.exception() is not None]

    def finalize(self, scope: Path | None = None) -> None:
        """Wait for the saves of a path, or for all. Raises what went wrong with the first that failed, once.

        If several have failed, the next call raises what went wrong with the next one.
        """
        failed = self._wait(scope)
        self._guard.remove_idle_hook()
        if scope is None:
            self._memory.free_idle()
        self._raise_failure(failed)

    def wait_for_copies(self) -> None:
        """Wait until no save reads tensors of the caller's, which are about to change."""
        self._guard.wait()

    def _raise_failure(self, failed: list[_SaveInFlight]) -> None:
        for flight in failed:
            try:
                self._flights.remove(flight)
            except ValueError:  # another thread raises it
                continue
            flight.handle.wait()

    def _prepare_process(self) -> None:
        if self._process != os.getpid():
            self._process = os.getpid()
            call_at_exit(ExitStage.SAVES, self._join)
            call_at_exit(ExitStage.STATUS, self._exit_if_failed)

    def _join(self) -> None:
        """Wait for all saves. Processes of multiprocessing do this before they wait for their threads."""
        try:
            for flight in list(self._flights):
                if flight.thread is not None and flight.thread is not threading.current_thread():
                    flight.thread.join()
        except KeyboardInterrupt:
            self._is_interrupted = True

    def _exit_if_failed(self) -> None:
        """End the process with status 1 if a save has failed, and the program has not asked how it ended."""
        failures = [(flight.handle.path, flight.handle.unreported_failure()) for flight in self._flights]
        unreported = [(path, error) for path, error in failures if error is not None]
        if not unreported and not self._is_interrupted:
            return
        try:
            for path, error in unreported:
                _log.error(
                    "the save of %s failed, and the program ends without having asked: the exit status is 1. "
                    "Call holdfast.finalize() at the end to get the error raised: %s",
                    path,
                    error,
                )
        finally:
            _exit_with_failure()

    def forget_in_forked_process(self) -> None:
        """Start anew in a forked process: the saves belong to the one that it was forked from."""
        self._guard.forget_copies()
        self._memory, self._flights = StagingMemory(), []
        self._turns = weakref.WeakValueDictionary()


class _PathTurn:
    """The right to begin a save of a path. A listener of a save may begin another one in its thread."""

    def __init__(self) -> None:
        self.lock = threading.RLock()


def _wait_until_ended(info: Result) -> Future[Result]:
    done: Future[Result] = Future()
    done.set_result(info)
    return done


def _clear_frames(error: BaseException) -> BaseException:
    """Put tracebacks into a note: their frames would keep what was saved alive until somebody asks."""
    error.add_note("In the thread that saved:\n" + "".join(traceback.format_exception(error)))
    chain = [error]
    for link in chain:
        link.__traceback__ = None
        chain += [other for other in (link.__cause__, link.__context__) if other is not None and other not in chain]
    return error


def _lower_priority() -> None:
    """Lower the priority of this thread, and of those that it starts."""
    with suppress(OSError, AttributeError):  # not on every system are threads so many processes
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)


def _exit_with_failure() -> None:
    # Functions of atexit cannot change the exit status, so this is the last thing that the process does.
    with suppress(Exception):  # a handler may do anything
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or gone
            stream.flush()
    os._exit(1)


background_saves = BackgroundSaves()
os.register_at_fork(after_in_child=background_saves.forget_in_forked_process)
