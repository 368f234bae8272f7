"""Ranks that count their calls agree on the number of one that none of them has made yet.

Training calls :meth:`StepConsensus.arrive` once a step on every rank, and that only counts. Who wants all ranks to stop calls
:meth:`StepConsensus.ask` on one of them. A thread beside the training of each rank looks for that from time to time
(:meth:`StepConsensus.is_asked`), and when it sees it calls :meth:`StepConsensus.choose`:

1. It holds this rank's counter: a call that is made meanwhile waits.
2. It tells the others how many calls this rank has made. The last rank to tell publishes the highest number plus one.
3. It takes that number, and lets go of the counter.

*Agreement*: one number is published. It is higher than what any rank has told, and a rank makes no call between telling
and knowing it. So every rank comes to this call, and none has passed it.

*No deadlock*: ``choose`` waits for what the threads beside other ranks' trainings tell, never for a training;
``arrive`` waits for the thread beside it. A rank that is stuck in a collective until others come has its number told
all the same, and they come, as all go on until the call that was chosen. Nothing blocks inside the store, and all
waiting has an end.
"""

from __future__ import annotations

import threading

from holdfast.engine.comm.polling import Deadline, poll_until
from holdfast.engine.comm.session import Session, translate_store_errors
from holdfast.engine.comm.store import DeadlineStore
from holdfast.engine.comm.vote import COORDINATOR_RANK, format_ranks
from holdfast.errors import HoldfastError, RankTimeoutError

#: Keys in the store: somebody wants it; how many ranks have told; the call that was chosen.
_ASKED, _TOLD, _CHOSEN = "asked", "told", "chosen"

_PHASE = "agreeing on the step to stop at"

#: Seconds that a rank which leaves waits for those that it has not met yet.
_PARTING = 1.0


class StepConsensus:
    """The calls of this rank. ``store`` is the session's own; ranks wait its timeout for each other."""

    def __init__(self, session: Session, store: DeadlineStore) -> None:
        self._session, self._store = session, store
        self._counter = threading.Lock()
        self._made, self._told = 0, False
        self._wait: Deadline | None = None
        self._chosen: int | None = None
        self._failure: HoldfastError | None = None

    def arrive(self) -> bool:
        """Make one more call. Whether the one that was chosen is reached. Raises what went wrong in choosing it."""
        if not self._counter.acquire(timeout=2 * self._session.timeout):
            raise RankTimeoutError(f"the key-value store of the ranks does not answer while {_PHASE}")
        try:
            if self._failure is not None:
                raise self._failure
            self._made += 1
            return self._chosen is not None and self._made >= self._chosen
        finally:
            self._counter.release()

    def ask(self) -> None:
        """Make it known to all ranks that a call is to be chosen: at once, or by one more call when rank 0 has come.

        Raises as ``translate_store_errors`` does, and ``RankTimeoutError`` if rank 0 does not come.
        """
        with translate_store_errors(_PHASE):
            self._wait = self._wait or Deadline(self._session.timeout)
            if self._store.is_open():
                self._store.set(_ASKED)
            elif self._wait.is_over:
                raise RankTimeoutError(_absent(f"rank {COORDINATOR_RANK}"))

    def is_asked(self) -> bool:
        """Whether any rank wants a call to be chosen. Raises as ``translate_store_errors`` does."""
        with translate_store_errors(_PHASE):
            return self._store.check([_ASKED])

    def choose(self) -> None:
        """Agree with all ranks on a call; what goes wrong is raised by :meth:`arrive`."""
        with self._counter:
            try:
                self._chosen = self._agree()
            except HoldfastError as error:
                self._failure = error

    def fail(self, error: HoldfastError) -> None:
        """Let :meth:`arrive` raise an error."""
        with self._counter:
            self._failure = error

    def leave(self) -> None:
        """There will be no more calls: what the others choose does not wait for this rank. Raises as :meth:`ask`."""
        with self._counter, translate_store_errors(_PHASE):
            poll_until(self._store.has_met_all, _PARTING, lambda: "")
            if self._store.is_open():
                self._tell()

    def _agree(self) -> int:
        with translate_store_errors(_PHASE):
            self._tell()
            if not poll_until(lambda: self._store.check([_CHOSEN]), self._session.timeout, self._missing):
                raise RankTimeoutError(_absent(self._silent()))
            return int(self._store.get(_CHOSEN)[0])

    def _tell(self) -> None:
        if self._told:
            return
        self._told = True
        self._store.set(f"made/{self._session.rank}", str(self._made).encode())
        if self._store.add(_TOLD, 1) == self._session.size:
            made = self._store.get(*(f"made/{rank}" for rank in range(self._session.size)))
            self._store.set(_CHOSEN, str(max(map(int, made)) + 1).encode())

    def _silent(self) -> str:
        """The ranks that have not told how many calls they have made."""
        silent = [rank for rank in range(self._session.size) if not self._store.check([f"made/{rank}"])]
        return format_ranks(silent) if silent else "a rank"

    def _missing(self) -> str:
        return f"{self._silent()} while {_PHASE}"


def _absent(who: str) -> str:
    return (
        f"{who} did not answer within the timeout while {_PHASE}; it is stuck or dead, or has not called preemption()"
    )
