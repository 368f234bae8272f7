"""The statistics of checkpoints that this process has saved, computed in the background and kept with them.

One thread of rank 0 reads one checkpoint after the other, as ``rankless stats`` does. It begins after the commit, and
stops reading while a save is in progress, so that no save takes longer. A checkpoint that is removed meanwhile is
skipped, and every other failure is a warning: the checkpoint is complete without its statistics.

The bytes are read again, because those in memory have no fixed order: each rank has other ranges of them, and a
synchronous save has no copy. The modules that read are imported by the thread, not by the caller.

:class:`~rankless.run_directory.RunDirectory` adds :func:`keep_statistics` on rank 0 to the listener of a save with
``stats=True``.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from rankless.errors import CheckpointReplacedError, NoCheckpointError
from rankless.observe.events import Event, OnEvent, Saved
from rankless.observe.warning import warn_caller
from rankless.process.exit_order import ExitStage, call_at_exit
from rankless.process.worker_threads import lower_priority
from rankless.save.background import background_saves

#: The number of seconds that the end of the process waits for statistics.
_EXIT_SECONDS = 5.0

#: The number of seconds between two looks whether a save is still in progress.
_PAUSE = 0.05

_log = logging.getLogger("rankless")


class _EndedError(Exception):
    """The process ends, and with it the computation."""


class BackgroundStatistics:
    """The checkpoints that wait for statistics, and the thread that computes them."""

    def __init__(self) -> None:
        self._paths: deque[Path] = deque()
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_ending = False
        self._process = 0

    def add(self, path: Path) -> None:
        """Compute the statistics of a checkpoint, after all earlier checkpoints, and keep them with it.

        The listener calls it in the thread of the save.
        """
        with self._condition:
            if self._is_ending:
                return
            self._paths.append(path)
            if self._process != os.getpid():
                self._process = os.getpid()
                call_at_exit(ExitStage.STATISTICS, self._end)
            if self._thread is None:  # a daemon: the end of the process does not wait for it any longer than _end()
                self._thread = threading.Thread(target=self._run, name="rankless statistics", daemon=True)
                self._thread.start()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all statistics are computed, at most for ``timeout`` seconds.

        :func:`rankless.finalize` calls it in the thread of the caller, and the end of the process with a limit.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._thread is None, timeout)

    def _end(self) -> None:
        """Wait for the statistics a little, then stop computing them. No thread is left when the interpreter ends."""
        with self._condition:
            thread = self._thread
        self.wait(_EXIT_SECONDS)
        with self._condition:
            self._is_ending, thread = True, self._thread or thread
            self._paths.clear()
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        lower_priority()
        while (path := self._next_path()) is not None:
            try:
                self._compute(path)
            except _EndedError:
                _log.info("the process ends before the statistics of %s are computed", path)
            except (NoCheckpointError, CheckpointReplacedError):
                _log.debug("%s was removed or replaced before its statistics were computed", path)
            except Exception as error:  # noqa: BLE001 - the checkpoint is committed, whatever happens here
                with suppress(Warning):
                    warn_caller(f"{path} is saved, but without statistics: {error}")

    def _next_path(self) -> Path | None:
        """Return the next checkpoint; ``None`` if there is none, and the thread ends."""
        with self._condition:
            if self._paths:
                return self._paths.popleft()
            self._thread = None
            self._condition.notify_all()
            return None

    def _compute(self, path: Path) -> None:
        from rankless.inspection.checkpoint_statistics import measure_checkpoint, select_tensors  # noqa: PLC0415
        from rankless.inspection.inspected_checkpoint import inspect_exact_path  # noqa: PLC0415
        from rankless.inspection.kept_statistics import write_statistics  # noqa: PLC0415

        self._give_way(0)
        inspected = inspect_exact_path(path)
        write_statistics(inspected, measure_checkpoint(inspected, select_tensors(inspected, None), self._give_way))

    def _give_way(self, nbytes: int) -> None:
        """Wait while a save is in progress. Called after ``nbytes`` were read."""
        del nbytes
        while not self._is_ending and background_saves.is_saving():
            time.sleep(_PAUSE)
        if self._is_ending:
            raise _EndedError

    def forget_in_forked_process(self) -> None:
        """Forget all checkpoints in a forked process: its parent process computes their statistics."""
        self._paths, self._condition = deque(), threading.Condition()
        self._thread, self._is_ending = None, False


background_statistics = BackgroundStatistics()
os.register_at_fork(after_in_child=background_statistics.forget_in_forked_process)


def keep_statistics(on_event: OnEvent) -> OnEvent:
    """Return a listener that also lets the statistics of each saved checkpoint be computed and kept with it."""

    def listen(event: Event) -> None:
        if isinstance(event, Saved):
            background_statistics.add(event.path)
        on_event(event)

    return listen
