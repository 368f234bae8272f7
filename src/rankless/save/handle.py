"""The handle that a save returns.

Each rank gets one from its call, and may wait for it in any thread but the save's own. It waits for this process only.
:mod:`rankless.save.background` makes it, for training saves and for saves of one component; Lightning's strategies,
torchtitan's manager, DeepSpeed's engine and ColossalAI's booster keep it or return it. It is public: the names of its
methods must stay. A listener of a save must not wait for that save: the wait would never end.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, TypeVar

from rankless.errors import RankTimeoutError, StateError

#: The result of a committed save.
Result = TypeVar("Result")


class SaveHandle(Generic[Result]):
    """A save in progress. A synchronous save is done when the call returns its handle."""

    def __init__(
        self, path: Path, blocking_seconds: float, done: Future[Result], local: Future[Any] | None = None
    ) -> None:
        #: The path of the checkpoint's directory or file, which exists once the save is committed.
        self.path = path
        #: The number of seconds that the call blocked.
        self.blocking_seconds = blocking_seconds
        self._done = done
        self._local: Future[Any] = done if local is None else local
        self._is_reported = False
        self._process = os.getpid()
        #: The thread that saves. Event listeners run in it, so they cannot wait for it.
        self.thread: threading.Thread | None = None

    def __repr__(self) -> str:
        if not self.done():
            state = "in progress"
        elif (error := self._done.exception()) is not None:
            state = f"failed: {type(error).__name__}"
        else:
            state = "done"
        return f"<SaveHandle of {str(self.path)!r}, {state}>"

    def done(self) -> bool:
        """Return whether the save has ended: it was committed, or it failed."""
        return self._done.done()

    def has_failed(self) -> bool:
        """Return whether the save has ended with an error."""
        return self._done.done() and self._done.exception() is not None

    def wait(self, timeout: float | None = None) -> Result:
        """Wait until the save has ended, and return its result.

        Args:
            timeout: The maximum number of seconds to wait. ``None`` means no limit.

        Returns:
            The information of the committed checkpoint, or the path of a single component.

        Raises:
            RankTimeoutError: The save is still in progress after ``timeout`` seconds.
            StateError: The save can never end while this caller waits: the process was forked from the one that
                saves, or the caller is an event listener of the save.
            Exception: The error that the save failed with.
        """
        self._wait_for(self._done, timeout)
        self._is_reported = True
        return self._done.result()

    def wait_local(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is complete in the local tier; without a tier, until the save has ended.

        From then on, the checkpoint survives the death of all processes. Copies on other hosts are made afterwards.

        Args:
            timeout: The maximum number of seconds to wait. ``None`` means no limit.

        Raises:
            RankTimeoutError: It is not complete after ``timeout`` seconds.
            Exception: As :meth:`wait`.
        """
        self._wait_for(self._local, timeout)
        self._local.result()

    def _wait_for(self, future: Future[Any], timeout: float | None) -> None:
        self._check_can_end(future)
        try:
            future.exception(timeout)
        except TimeoutError:
            if not future.done():
                message = f"the save of {self.path} is still in progress after {timeout} seconds"
                raise RankTimeoutError(message) from None

    def _check_can_end(self, future: Future[Any]) -> None:
        if future.done():
            return
        if os.getpid() != self._process:
            raise StateError(
                f"the save of {self.path} runs in the process that this one was forked from; wait for it there"
            )
        if self.thread is threading.current_thread():
            raise StateError(f"a listener of the save of {self.path} waits for that save, which waits for the listener")

    def unreported_failure(self) -> BaseException | None:
        """Return the error of the save if it failed and :meth:`wait` has not raised it yet, else ``None``.

        :mod:`rankless.save.background` asks it at the exit of the process.
        """
        return None if self._is_reported or not self._done.done() else self._done.exception()
