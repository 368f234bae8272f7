"""``SaveOperation``: the steps of every save, from training objects to a committed output, on all ranks together.

There is one operation. It saves a content: a training state (:class:`~rankless.save.training_content.TrainingContent`,
with the local tier in between :class:`~rankless.save.tier_content.TierContent`), a generation of the local tier
(:class:`~rankless.save.generation_content.GenerationContent`), or one component
(:class:`~rankless.components.component_content.ComponentContent`). A content has an output, which says where the bytes
go and how they appear at once. The operation knows the class of neither.

:mod:`rankless.save.background` calls the steps, each once, in this order: prepare, stage, complete the copies, finish,
leave the session. A synchronous save leaves out the staging. Every step that can fail on one rank ends in a vote. So no
rank continues alone, and all raise the same error.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, Protocol, TypeVar, final

from rankless.engine.comm.session import RankGroup
from rankless.engine.io.staging import DeferredCopies, StagedTensors
from rankless.engine.io.staging_memory import Arena
from rankless.engine.plan.save_plan import EMPTY_PLAN
from rankless.save.handle import Result
from rankless.save.shard_writer import ShardWriter
from rankless.state.capture import Capture

#: The phase of the vote on staging.
_COPYING = "copying what is to be saved"

#: The result of a save: the description of a checkpoint, or a path.
Saved_co = TypeVar("Saved_co", covariant=True)


class SavedShare:
    """The share of this rank in one save: its tensors, its part of the plan, the staged copies, and the session.

    Training objects may be read before :attr:`copied` is set, and not later.

    :meth:`begin_copies` must be called in the thread of the caller, :meth:`complete_copies` may be in any. Between them
    they hold the vote "copying what is to be saved", and a second one if copies are deferred.
    """

    def __init__(self, ranks: RankGroup, timeout: float) -> None:
        self.ranks, self.session = ranks, ranks.open_session(timeout)
        self.captured, self.plan = Capture(), EMPTY_PLAN
        #: The number of the attempt to write: see :class:`ShardWriter`.
        self.attempt = 0
        #: The staged copies, if all ranks have staged theirs.
        self.staged: StagedTensors | None = None
        #: The tensors that this rank has staged, also if another one has failed.
        self.own_staged: StagedTensors | None = None
        #: Set when the training objects are no longer needed.
        self.copied = threading.Event()
        self._wait_for_copies: Callable[[], StagedTensors | None] = lambda: None
        self._is_overlapped = False

    @property
    def writer(self) -> ShardWriter:
        """The writer of the share as it is planned now."""
        return ShardWriter(self.ranks, self.session, self.plan, self.captured.tensors, self.attempt)

    @property
    def order_steps(self) -> Callable[[], None] | None:
        """See :attr:`StagedTensors.order_steps`."""
        return None if self.own_staged is None else self.own_staged.order_steps

    def begin_copies(self, arena: Arena, deferred: DeferredCopies) -> None:
        """Copy the tensors that this rank writes into ``arena``, except those that may be copied later.

        The vote on the copies ends in :meth:`complete_copies`.
        """

        def stage() -> StagedTensors:
            self.own_staged = self.writer.stage(arena, deferred)
            return self.own_staged

        self._is_overlapped = deferred.is_overlapped
        self._wait_for_copies = self.session.begin_on_all(_COPYING, stage)
        if not self._is_overlapped:
            self.release_tensors()

    def complete_copies(self) -> None:
        """Copy the remaining tensors. Afterwards the training objects may change."""
        self.staged = staged = self._wait_for_copies()

        def copy_deferred() -> None:
            try:
                if staged is not None:
                    staged.copy_deferred(self.plan.tensors)
            finally:
                self.release_tensors()

        if self._is_overlapped:
            self.session.run_on_all(_COPYING, copy_deferred)

    def release_tensors(self) -> None:
        """Drop the training objects: the save needs them no longer. Each rank calls it in the thread of the save."""
        self.captured.tensors.clear()
        self.copied.set()

    def abandon(self) -> None:
        """Let go of tensors and copies after a failure. Each rank calls it in the rollback."""
        if self.own_staged is not None:
            self.own_staged.abandon()
        self.release_tensors()

    def forget_staged(self) -> None:
        """Drop the staged tensors, when the save has ended: other ranks may be waited for after that."""
        self.staged = self.own_staged = None
        self._wait_for_copies = lambda: None


class Content(Protocol[Saved_co]):
    """The content of one save on one rank, which has its output. All ranks call the methods together."""

    @property
    def share(self) -> SavedShare:
        """The share of this rank."""

    @property
    def path(self) -> Path:
        """The path of the new checkpoint, file or folder."""

    @property
    def has_follow_up(self) -> bool:
        """True if :meth:`follow_up` is to be called after the commit, while the next save may begin."""

    @property
    def completed_locally(self) -> Future[None] | None:
        """Resolved when the checkpoint is complete in the local tier; ``None`` if the save does not use one."""

    def prepare(self) -> None:
        """Capture what is to be saved, plan the save, and create what is to be written."""

    def choose_copies(self, arena: Arena) -> tuple[Arena, DeferredCopies] | None:
        """Return where the tensors are staged, in ``arena`` unless the content has memory of its own.

        With it, which tensors may be copied after the call has returned. ``None`` if nothing is to be staged.
        """

    def verify_copies(self) -> None:
        """Check the copies, when all are complete. Called in the thread of the save."""

    def write_and_commit(self) -> Saved_co:
        """Write the files, and publish them when all ranks have written theirs."""

    def follow_up(self) -> Saved_co:
        """Do the rest after the commit, and return the result. Contents with :attr:`has_follow_up` have it."""

    def mark_returned(self) -> float:
        """Record that the call returns to the caller, and return for how many seconds it blocked.

        Called in the thread of the caller.
        """

    def roll_back(self, error: BaseException) -> None:
        """Remove the written files, unless they have their final names already. Each rank calls it for itself."""


@final
class SaveOperation(Generic[Result]):
    """The steps of one save. On failure nothing is left, and all ranks raise the same error.

    :meth:`prepare` and :meth:`stage` must be called in the thread of the caller. After that, :meth:`complete_copies`
    and :meth:`finish` may be called in any thread.
    """

    def __init__(self, content: Content[Result]) -> None:
        self.content = content

    def prepare(self) -> None:
        """Capture what is to be saved, plan the save, and create what is to be written."""
        self.content.prepare()

    def stage(self, arena: Arena) -> None:
        """Copy the tensors that this rank writes into ``arena``, except those that may be copied later."""
        chosen = self.content.choose_copies(arena)
        if chosen is not None:
            self.content.share.begin_copies(*chosen)

    def complete_copies(self) -> None:
        """Copy the remaining tensors. Afterwards the training objects may change."""
        self.content.share.complete_copies()
        self.content.verify_copies()

    def finish(self, on_committed: Callable[[], None] = lambda: None) -> Result:
        """Write, commit, and do the rest. ``on_committed`` is called before the rest, if there is some.

        Then the next save may begin.
        """
        result = self.content.write_and_commit()
        if self.content.has_follow_up:
            on_committed()
            result = self.content.follow_up()
        return result

    def leave_session(self) -> None:
        """Leave the session. Rank 0 waits for all others first, because its process may host the key-value store.

        Called after a success, in the thread of the save.
        """
        self.content.share.session.leave()

    @contextmanager
    def rollback_on_error(self) -> Iterator[None]:
        """Remove the written files if a step inside the ``with`` block fails. A committed checkpoint stays."""
        process = os.getpid()
        try:
            yield
        except BaseException as error:
            if os.getpid() != process:  # a listener forked: the save belongs to the parent process
                raise
            self.content.share.abandon()
            self.content.roll_back(error)
            raise
