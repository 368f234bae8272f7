"""``SaveOperation``: the steps of every save, from training objects to a committed output, on all ranks together.

Every step that can fail on one rank ends in a vote. So no rank continues alone, and all raise the same error.
Subclasses say what is laid out in which files, and how rank 0 publishes them.

Training saves, saves of one component and drains are subclasses; :mod:`rankless.save.background` calls the steps, each
once, in this order: prepare, stage, complete the copies, write and commit, follow up, leave the session. A synchronous
save leaves out the staging. Training objects may be read before :attr:`SaveOperation.copied` is set, and not later.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Generic

from rankless.engine.comm.session import RankGroup
from rankless.engine.io.staging import DeferredCopies, StagedTensors
from rankless.engine.io.staging_memory import Arena
from rankless.engine.plan.save_plan import EMPTY_PLAN
from rankless.save.handle import Result
from rankless.save.shard_writer import ShardWriter
from rankless.state.capture import Capture

#: The phase of the vote on staging.
_COPYING = "copying what is to be saved"


class SaveOperation(ABC, Generic[Result]):
    """The steps of one save. On failure nothing is left, and all ranks raise the same error.

    :meth:`prepare_save` and :meth:`stage_tensors` must be called in the caller's thread. After that,
    :meth:`complete_copies` and :meth:`write_and_commit` may be called in any thread.
    """

    def __init__(self, ranks: RankGroup, timeout: float) -> None:
        self._ranks, self._session = ranks, ranks.open_session(timeout)
        self._captured, self._plan = Capture(), EMPTY_PLAN
        #: The number of the attempt to write: see :class:`ShardWriter`.
        self._attempt = 0
        self._wait_for_copies: Callable[[], StagedTensors | None] = lambda: None
        self._staged: StagedTensors | None = None
        #: What this rank has staged, also if another one has failed.
        self._own_staged: StagedTensors | None = None
        #: Set when the training objects are no longer needed.
        self.copied = threading.Event()
        #: Whether :meth:`follow_up` is to be called after :meth:`write_and_commit`, while the next save may begin.
        self.has_follow_up = False
        #: Resolved when the checkpoint is complete in the local tier; ``None`` if the save does not use one.
        self.completed_locally: Future[None] | None = None

    @property
    @abstractmethod
    def path(self) -> Path:
        """The path of the new checkpoint, file or folder."""

    @abstractmethod
    def prepare_save(self) -> None:
        """Capture the training state, plan the save, and create the pending directory."""

    @abstractmethod
    def write_and_commit(self) -> Result:
        """Write the files, and publish them when all ranks have written theirs."""

    def follow_up(self) -> Result:
        """Do what is left after the commit, and return the result. Saves with :attr:`has_follow_up` have it.

        Called in the thread of the save, on all ranks, while another save may begin.
        """
        raise NotImplementedError

    @abstractmethod
    def mark_returned(self) -> float:
        """Record that the call returns to the caller, and return for how many seconds it blocked.

        Called in the thread of the caller.
        """

    @abstractmethod
    def _roll_back(self, error: BaseException) -> None:
        """Remove the pending directory, unless the output has its final name already."""

    def _deferred_copies(self) -> DeferredCopies:
        """Return which tensors may be copied after the call has returned: by default none."""
        return DeferredCopies()

    def stage_tensors(self, arena: Arena) -> None:
        """Copy the tensors that this rank writes into ``arena``, except those that may be copied later.

        The vote on the copies ends in :meth:`complete_copies`.
        """
        deferred = self._deferred_copies()

        def stage() -> StagedTensors:
            self._own_staged = self._writer.stage(arena, deferred)
            return self._own_staged

        self._wait_for_copies = self._session.begin_on_all(_COPYING, stage)
        if not self._is_overlapped:
            self._release_tensors()

    @property
    def order_steps(self) -> Callable[[], None] | None:
        """See :attr:`StagedTensors.order_steps`."""
        return None if self._own_staged is None else self._own_staged.order_steps

    def complete_copies(self) -> None:
        """Copy the remaining tensors. Afterwards the training objects may change."""
        self._staged = staged = self._wait_for_copies()

        def copy_deferred() -> None:
            try:
                if staged is not None:
                    staged.copy_deferred(self._plan.tensors)
            finally:
                self._release_tensors()

        if self._is_overlapped:
            self._session.run_on_all(_COPYING, copy_deferred)

    def forget_staged(self) -> None:
        """Drop what was staged, when the save has ended: other ranks may be waited for after that."""
        self._staged = self._own_staged = None
        self._wait_for_copies = lambda: None

    def leave_session(self) -> None:
        """Leave the session. Rank 0 waits for all others first, because its process may host the key-value store.

        Called after a success, in the thread of the save.
        """
        self._session.leave()

    @contextmanager
    def rollback_on_error(self) -> Iterator[None]:
        """Remove the pending directory if a step inside the ``with`` block fails. A committed checkpoint stays."""
        process = os.getpid()
        try:
            yield
        except BaseException as error:
            if os.getpid() != process:  # a listener forked: the save belongs to the parent process
                raise
            if self._own_staged is not None:
                self._own_staged.abandon()
            self._release_tensors()
            self._roll_back(error)
            raise

    @property
    def _is_overlapped(self) -> bool:
        """True if some tensors are copied after the call has returned."""
        return False

    @property
    def _writer(self) -> ShardWriter:
        return ShardWriter(self._ranks, self._session, self._plan, self._captured.tensors, self._attempt)

    def _release_tensors(self) -> None:
        self._captured.tensors.clear()
        self.copied.set()
