"""A save that was begun: how it goes on in the background, and how its end is learnt."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from holdfast.errors import RankTimeoutError

#: What a save gives when it is committed.
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)

#: Writing gives way to training: added to the niceness of its threads.
_NICENESS = 10


class Unfinished(Protocol[Result_co]):
    """A save that is staged: what is left of it needs nothing of the caller's."""

    @property
    def path(self) -> Path:
        """Where it will be."""

    def undone_on_failure(self) -> AbstractContextManager[None]:
        """Leave nothing where what is done inside fails."""

    def complete(self) -> None:
        """Copy what was left for later."""

    def finish(self) -> Result_co:
        """Write and commit."""

    def part(self) -> None:
        """Wait until all ranks know how it ended."""


class SaveHandle(Generic[Result]):
    """A save that was begun. Synchronous ones are done when the call returns it."""

    def __init__(self, path: Path, stall_seconds: float, done: Future[Result]) -> None:
        #: The checkpoint's folder or file, there once the save is committed.
        self.path = path
        #: Seconds for which the call kept the caller.
        self.stall_seconds = stall_seconds
        self._done = done

    def done(self) -> bool:
        """Whether the save has ended: committed, or failed."""
        return self._done.done()

    def wait(self, timeout: float | None = None) -> Result:
        """What was committed. Raises what went wrong, or ``RankTimeoutError`` after ``timeout`` seconds."""
        try:
            return self._done.result(timeout)
        except TimeoutError:
            if self._done.done():
                raise
            raise RankTimeoutError(f"the save of {self.path} is still under way after {timeout} seconds") from None


def ended(info: Result) -> Future[Result]:
    """The end of a save that is there already."""
    done: Future[Result] = Future()
    done.set_result(info)
    return done


def in_background(save: Unfinished[Result]) -> Future[Result]:
    """Finish a staged save in a thread of its own. A process that ends waits for it."""
    done: Future[Result] = Future()

    def run() -> None:
        try:
            with save.undone_on_failure():
                save.complete()
                _give_way()
                info = save.finish()
        except BaseException as error:  # noqa: BLE001 - raised by who waits, by the next save, or by finalize()
            done.set_exception(error)
        else:
            done.set_result(info)
            save.part()

    # A step may wait for the copy: that comes at once, and only the writing gives way.
    threading.Thread(target=run, name=f"holdfast {save.path.name}").start()
    return done


def _give_way() -> None:
    """Lower the priority of this thread, and of those that it starts."""
    with suppress(OSError, AttributeError):  # not on every system are threads so many processes
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)
