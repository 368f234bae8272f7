"""Agreement of all ranks on a future step to stop at. Each rank counts its own steps; no collective is used.

Training calls :meth:`StepConsensus.count_step` once a step on every rank, which only counts. To stop all ranks,
:meth:`StepConsensus.request_stop` is called on one of them. A thread next to the training of each rank polls for that
(:meth:`StepConsensus.is_stop_requested`), and then calls :meth:`StepConsensus.agree_on_step`:

1. It locks this rank's counter: a step that is counted meanwhile waits.
2. It reports this rank's number of steps. The last rank to report publishes the highest number plus one.
3. It reads that number, and unlocks the counter.

*Agreement*: one number is published. It is higher than any reported number, and a rank counts no step between its
report and reading the number. So every rank reaches this step, and none has passed it.

*No deadlock*: ``agree_on_step`` waits for the reports of the threads of other ranks, never for a training;
``count_step`` waits for the thread next to it. If a rank is blocked in a collective until others come, its thread
reports nevertheless, and the others come, as all continue until the chosen step. Nothing blocks inside the store, and
every wait has a timeout.

:mod:`rankless.liveness.preemption` has one on each rank: training counts its steps in the main thread, and the thread
of the preemption does the rest. No vote is held.
"""

from __future__ import annotations

import threading

from rankless.engine.comm.job_store import DeadlineStore
from rankless.engine.comm.polling import Deadline, poll_until
from rankless.engine.comm.session import Session, translate_store_errors
from rankless.engine.comm.vote import COORDINATOR_RANK, format_ranks
from rankless.errors import RanklessError, RankTimeoutError

#: Keys in the store: a stop is requested; the number of ranks that have reported; the chosen step.
_REQUESTED_KEY, _REPORTED_KEY, _CHOSEN_KEY = "asked", "told", "chosen"

_PHASE = "agreeing on the step to stop at"

#: Seconds that a leaving rank waits for ranks that it has not met yet.
_LEAVE_SECONDS = 1.0


class StepConsensus:
    """The step counter of this rank. ``store`` is the session's own; the session's timeout limits every wait."""

    def __init__(self, session: Session, store: DeadlineStore) -> None:
        self._session, self._store = session, store
        self._counter = threading.Lock()
        self._steps, self._has_reported = 0, False
        self._deadline: Deadline | None = None
        self._chosen: int | None = None
        self._failure: RanklessError | None = None

    def count_step(self) -> bool:
        """Count one more step. Return whether the chosen step is reached.

        Raises the error that occurred in choosing it.

        The thread of the training calls it.
        """
        if not self._counter.acquire(timeout=2 * self._session.timeout):
            raise RankTimeoutError(f"the key-value store of the ranks does not answer while {_PHASE}")
        try:
            if self._failure is not None:
                raise self._failure
            self._steps += 1
            return self._chosen is not None and self._steps >= self._chosen
        finally:
            self._counter.release()

    def request_stop(self) -> None:
        """Request that a step is chosen.

        If rank 0 has not come yet, nothing is requested: call again. Raises as ``translate_store_errors`` does, and
        ``RankTimeoutError`` if rank 0 does not come.
        """
        with translate_store_errors(_PHASE):
            self._deadline = self._deadline or Deadline(self._session.timeout)
            if self._store.is_open():
                self._store.set(_REQUESTED_KEY)
            elif self._deadline.is_over:
                raise RankTimeoutError(_timeout_message(f"rank {COORDINATOR_RANK}"))

    def is_stop_requested(self) -> bool:
        """Return whether any rank has requested a stop. Raises as ``translate_store_errors`` does."""
        with translate_store_errors(_PHASE):
            return self._store.check([_REQUESTED_KEY])

    def agree_on_step(self) -> None:
        """Agree with all ranks on a step; an error is raised by :meth:`count_step`.

        The thread next to the training calls it, on every rank. The report must not be sent before the counter is
        locked.
        """
        with self._counter:
            try:
                self._chosen = self._await_chosen_step()
            except RanklessError as error:
                self._failure = error

    def set_failure(self, error: RanklessError) -> None:
        """Let :meth:`count_step` raise an error."""
        with self._counter:
            self._failure = error

    def leave(self) -> None:
        """Report the final number of steps, so that other ranks do not wait for it.

        Raises as :meth:`request_stop` does.
        """
        with self._counter, translate_store_errors(_PHASE):
            poll_until(self._store.has_met_all, _LEAVE_SECONDS, lambda: "")
            if self._store.is_open():
                self._publish_count()

    def _await_chosen_step(self) -> int:
        """Report the number of steps, and wait for the chosen step."""
        with translate_store_errors(_PHASE):
            self._publish_count()
            if not poll_until(lambda: self._store.check([_CHOSEN_KEY]), self._session.timeout, self._describe_missing):
                raise RankTimeoutError(_timeout_message(self._silent_ranks()))
            return int(self._store.get(_CHOSEN_KEY)[0])

    def _publish_count(self) -> None:
        """Report the number of steps, once. The last rank to report publishes the chosen step.

        For example, if the ranks have counted 10, 11 and 10 steps, all stop at step 12.
        """
        if self._has_reported:
            return
        self._has_reported = True
        self._store.set(f"made/{self._session.rank}", str(self._steps).encode())
        if self._store.add(_REPORTED_KEY, 1) == self._session.size:
            counts = self._store.get(*(f"made/{rank}" for rank in range(self._session.size)))
            self._store.set(_CHOSEN_KEY, str(max(map(int, counts)) + 1).encode())

    def _silent_ranks(self) -> str:
        """Describe the ranks that have not reported their number of steps."""
        silent = [rank for rank in range(self._session.size) if not self._store.check([f"made/{rank}"])]
        return format_ranks(silent) if silent else "a rank"

    def _describe_missing(self) -> str:
        return f"{self._silent_ranks()} while {_PHASE}"


def _timeout_message(silent: str) -> str:
    return (
        f"{silent} did not answer within the timeout while {_PHASE}; "
        "it is stuck or dead, or has not called preemption()"
    )
