"""What a call that saves returns: how its end is learnt."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Generic, TypeVar

from holdfast.errors import RankTimeoutError, StateError

#: What a save gives when it is committed.
Result = TypeVar("Result")


class SaveHandle(Generic[Result]):
    """A save that was begun. Synchronous ones are done when the call returns it."""

    def __init__(self, path: Path, blocking_seconds: float, done: Future[Result]) -> None:
        #: The checkpoint's folder or file, there once the save is committed.
        self.path = path
        #: Seconds for which the call kept the caller.
        self.blocking_seconds = blocking_seconds
        self._done = done
        self._is_reported = False
        self._process = os.getpid()
        #: The thread that saves; its listeners cannot wait for it.
        self.thread: threading.Thread | None = None

    def done(self) -> bool:
        """Whether the save has ended: committed, or failed."""
        return self._done.done()

    def wait(self, timeout: float | None = None) -> Result:
        """What was committed. Raises what went wrong, or ``RankTimeoutError`` after ``timeout`` seconds."""
        self._check_that_it_can_end()
        try:
            self._done.exception(timeout)
        except TimeoutError:
            if not self._done.done():
                raise RankTimeoutError(f"the save of {self.path} is still under way after {timeout} seconds") from None
        self._is_reported = True
        return self._done.result()

    def _check_that_it_can_end(self) -> None:
        if self._done.done():
            return
        if os.getpid() != self._process:
            raise StateError(f"the save of {self.path} goes on in the process that this one was forked from")
        if self.thread is threading.current_thread():
            raise StateError(f"a listener of the save of {self.path} waits for that save, which waits for the listener")

    def unreported_failure(self) -> BaseException | None:
        """Return what went wrong, if the save has failed and nobody was told yet by :meth:`wait`."""
        return None if self._is_reported or not self._done.done() else self._done.exception()
