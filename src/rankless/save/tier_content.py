"""A training state that is saved into the local tier: the memory of the hosts first, the run directory later.

When the checkpoint is complete in the tier, the next save may begin. If the save is to be *drained*, an ordinary write
of the staged bytes into the run directory follows. It is tried again if it fails.

The tier is a stage between a training content and its output.
:class:`~rankless.run_directory.RunDirectory` makes it on all ranks if there is a local tier; the drain runs in the
background of an asynchronous save, in its thread. The checkpoint counts as complete only when all tables and then the
common part are written; copies come after that, and older generations are removed last.

The common part is written after a vote on the tables, on each host: so a host that has it proves that all tables were
written, and a generation is complete on all ranks or not at all. Nothing else that takes seconds in a large job, as the
headers and the CRCs of files, is computed before a drain.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.engine.io.staging import DeferredCopies
from rankless.engine.io.staging_memory import Arena, StagingMemory
from rankless.engine.plan.save_plan import EMPTY_PLAN
from rankless.errors import RanklessError, StorageError
from rankless.observe.spans import traced
from rankless.observe.warning import warn_caller
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.save.base_checkpoint import TensorVersions
from rankless.save.drain_attempts import begin_attempt, retry_drain, warn_of_drain
from rankless.save.run_output import LiveTensors
from rankless.save.save_negotiation import SaveAgreement
from rankless.save.tier_stage import TierStage
from rankless.save.training_content import TrainingContent
from rankless.tier.generation import Common, GenerationLabel
from rankless.tier.job import NextSave, TierJob
from rankless.tier.tier_options import LocalTier


class TierContent:
    """A training content with the local tier before its output. If a host lacks memory, the tier is left out."""

    def __init__(self, training: TrainingContent, tier: TierJob, options: LocalTier) -> None:
        self.share, self.path = training.share, training.path
        #: Whether the generation is to be written into the run directory by this save.
        self.has_follow_up = False
        self.completed_locally: Future[None] | None = Future()
        self._training = training
        self._stage = TierStage(self.share.ranks, self.share.session, tier, options)
        #: The description of the checkpoint in the tier.
        self._info = CheckpointInfo("", self.path)
        #: The plan of this rank with the places of its bytes in the staged memory. Each drain starts from it.
        self._staged_plan = EMPTY_PLAN
        self._versions: TensorVersions = {}

    def prepare(self) -> None:
        """Plan, check that replicas are equal, and reserve memory. Open nothing in the run directory."""
        stage, training, agreement = self._stage, self._training, self._training.agree()

        def plan_and_reserve() -> bytes:
            training.update_plan(agreement)
            captured = self.share.captured
            self._versions = {key: captured.tensors[key].version for key in captured.frozen}
            return stage.reserve(training.hash_replicas(), self.share.plan.nbytes)

        _, raw = self.share.session.vote(
            "preparing the save", plan_and_reserve, bytes, lambda posted: stage.decide(posted, self._plan_next)
        )
        begun = stage.begin(raw)
        if begun.problem:
            self._open_past_tier(agreement, begun.problem)
            return
        training.accept_identity(begun.identity)
        training.started_at = begun.started_at
        self.has_follow_up = begun.drains

    def _plan_next(self) -> NextSave:
        request = self._training.request
        return self._stage.tier.plan_save(request.tag, request.job, self._stage.options, self._must_drain)

    def _must_drain(self, info: CheckpointInfo) -> bool:
        """Return whether the new checkpoint must be drained: the last one of a job, or one that a policy keeps."""
        request = self._training.request
        step, metrics = request.manifest_numbers()
        described = replace(info, step=step, metrics=metrics)
        return request.forced or (
            request.keep is not None and info.id in request.keep.select_by_merit([*self._stage.tier.durable, described])
        )

    def _open_past_tier(self, agreement: SaveAgreement, problem: str) -> None:
        """Open the output in the run directory, because a host lacks memory. All ranks call it; it ends in votes."""
        stage, job = self._stage, self._training.request.job
        self._warn_of_tier(problem)
        stage.release()
        self.completed_locally = None
        self._training.plan_and_open(agreement, lambda: stage.tier.choose_identity(job))

    def _warn_of_tier(self, problem: object) -> None:
        if self.share.session.rank == COORDINATOR_RANK:
            warn_caller(f"{self.path} is saved without the local tier: {problem}")

    def choose_copies(self, arena: Arena) -> tuple[Arena, DeferredCopies]:
        """See :class:`Content`. The tensors are copied into the slot."""
        return self._training.choose_copies(self._stage.arena(arena))

    def verify_copies(self) -> None:
        """See :class:`Content`."""
        self._training.verify_copies()

    def mark_returned(self) -> float:
        """See :class:`Content`."""
        return self._training.mark_returned()

    def write_and_commit(self) -> CheckpointInfo:
        """Complete the checkpoint in the tier, and copy it to other hosts."""
        stage, training, share = self._stage, self._training, self.share
        if not stage.has_slot:
            info = training.write_and_commit()
            self._note_written_past(info)
            return info
        if share.staged is None:  # a synchronous save
            share.begin_copies(*self.choose_copies(Arena(StagingMemory())))
            share.complete_copies()
        self._staged_plan = share.plan if share.own_staged is None else share.own_staged.place_ranges(share.plan)
        try:
            common = stage.complete(share.staged, share.captured.rank_values, self._describe, share.plan)
        except StorageError as error:  # the memory is full, or the folder is gone: the staged bytes are still there
            return self._write_past_tier(error)
        share.release_tensors()
        info = CheckpointInfo.of(self.path, common.label.manifest)
        info = self._info = replace(info, nbytes=sum(file.size for file in share.plan.files))
        self._note_completed()
        training.reporter.report_saved_locally(info.path, info.step, info.nbytes)
        self._keep_newest()
        if not self.has_follow_up:
            stage.release()
        return info

    def _note_completed(self) -> None:
        if self.completed_locally is not None:
            self.completed_locally.set_result(None)

    def _note_written_past(self, info: CheckpointInfo) -> None:
        self._stage.tier.forget_newest()
        self._stage.tier.note_durable(info)

    def _write_past_tier(self, problem: StorageError) -> CheckpointInfo:
        """Write the staged bytes into the run directory, because the tier cannot complete the checkpoint.

        All ranks have got the error of the vote, so all of them call it.
        """
        self._warn_of_tier(problem)
        try:
            info = self._drain_once(0)
        finally:
            self.has_follow_up = False
        self._stage.end_drain(None)
        self._stage.release()
        self._note_written_past(info)
        self._note_completed()
        return info

    def _describe(self, rank_values: list[bytes]) -> Common:
        """Return the values that a generation has in addition to parts and files, on rank 0."""
        training = self._training
        options = training.request.options
        keep_full_every = options.keep_full_every if options.incremental else 1
        label = GenerationLabel(training.make_manifest({}), training.request.replaces, keep_full_every)
        return Common(label, {}, training.build_small_files(rank_values))

    def _keep_newest(self) -> None:
        """Make copies or parity. Then the generations before are not needed any more.

        A failure only warns: the checkpoint is complete without copies. If another rank has failed, its host may be
        lost, and only a generation before, which has copies, can be loaded. If memory is short, that must not stay.
        """
        self._training.reporter.begin_phase("replicate")
        try:
            copies = self._stage.make_redundant()
        except RanklessError as error:
            if self.share.session.rank == COORDINATOR_RANK:
                warn_caller(f"{self.path} has no copies on other hosts in the local tier: {error}")
            if isinstance(error, StorageError):
                self._stage.keep_newest()
            else:
                self._stage.keep_uncopied()
        else:
            self._stage.keep_newest(copies)

    @traced("drain", "call")
    def follow_up(self) -> CheckpointInfo:
        """Write the staged bytes into the run directory, and try again if that fails."""
        stage, drained = self._stage, None
        warn = partial(warn_of_drain, self.path, self.share.session) if stage.options.on_failure == "warn" else None
        try:
            drained = retry_drain(self._drain_once, self._note_failure, warn)
        finally:
            stage.end_drain(drained)
            stage.release()
        return drained or self._info

    def _drain_once(self, attempt: int) -> CheckpointInfo:
        """Write the staged bytes into an output that no other attempt has, and commit it."""
        training, share = self._training, self.share
        output = training.begin_attempt(self._stage.tier, attempt)

        def prepare() -> bytes:
            return output.prepare(self._staged_plan, self._describe_staged(), training.cache.witness)

        if not begin_attempt(share.session, output, training.identity, prepare):
            return self._info
        share.plan = output.omit_unchanged(trusts_versions=False)
        if share.own_staged is not None:
            share.staged = share.own_staged.restrict_to(share.plan.file_ranges)
        return training.write_and_commit()

    def _describe_staged(self) -> LiveTensors | None:
        """Return the staged bytes, which are in one buffer, as an output compares them with the checkpoint before."""
        staged = self.share.own_staged
        if staged is None:
            return None
        tensors = dict.fromkeys(self._staged_plan.tensors, staged.memory)
        sequence = self._training.identity.sequence
        return LiveTensors(tensors, self.share.captured.frozen, self._versions, sequence)

    def _note_failure(self, error: RanklessError, attempt: int) -> None:
        self._training.output.discard()
        self._training.reporter.report_drain_failed(error, attempt, self._stage.tier.undrained_seconds)

    def roll_back(self, error: BaseException) -> None:
        """See :class:`Content`."""
        self._stage.abandon(self._training.request.tag)
        self._training.roll_back(error)
