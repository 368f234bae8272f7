"""A save into the local tier: the memory of the hosts first, the run directory later.

When the checkpoint is complete in the tier, the next save may begin. What follows, if the save is to be *drained*, is
an ordinary write of the staged bytes into the run directory. It is tried again if it fails.

:class:`~rankless.run_directory.RunDirectory` runs it on all ranks if there is a local tier; the drain runs in the
background of an asynchronous save, in its thread. The checkpoint counts as complete only when all tables and then the
common part are written; copies come after that, and older generations are removed last.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import msgspec

from rankless.engine.comm.session import RankGroup, WritingRanks
from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.engine.io.staging_memory import Arena, StagingMemory
from rankless.engine.plan.save_plan import EMPTY_PLAN
from rankless.errors import RanklessError, StorageError
from rankless.observe.spans import traced
from rankless.observe.warning import warn_caller
from rankless.run.catalog import CheckpointIdentity
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.save.base_checkpoint import KnownRun, TensorVersions
from rankless.save.drain_attempts import begin_attempt, retry_drain
from rankless.save.run_output import LiveTensors, open_output
from rankless.save.save_negotiation import SaveAgreement
from rankless.save.save_request import SaveRequest
from rankless.save.tier_stage import TierStage
from rankless.save.training_save import SavePlanCache, TrainingSave
from rankless.tier.generation import Common, GenerationLabel
from rankless.tier.job import NextSave, TierJob
from rankless.tier.tier_options import LocalTier


class TierSave(TrainingSave):
    """A save into the local tier. If a host lacks memory for it, it is an ordinary save."""

    def __init__(  # noqa: PLR0917 - as an ordinary save, and the tier
        self,
        request: SaveRequest,
        ranks: RankGroup,
        cache: SavePlanCache,
        known: KnownRun,
        timeout: float,
        tier: TierJob,
        options: LocalTier,
    ) -> None:
        described = msgspec.structs.replace(request, known_tags=tier.known_tags, local=options.describe())
        super().__init__(described, ranks, cache, known, timeout)
        self._stage = TierStage(ranks, self._session, tier, options)
        #: The description of the checkpoint in the tier.
        self._info = CheckpointInfo("", self.path)
        self.completed_locally = Future()
        #: The plan of this rank with the places of its bytes in the staged memory. Each drain starts from it.
        self._staged_plan = EMPTY_PLAN
        self._versions: TensorVersions = {}

    def _plan_and_open(self, agreement: SaveAgreement) -> None:
        """Plan, check that replicas are equal, and reserve memory. Open nothing in the run directory."""
        stage = self._stage

        def plan_and_reserve() -> bytes:
            self._update_plan(agreement)
            self._versions = {key: self._captured.tensors[key].version for key in self._captured.frozen}
            return stage.reserve(self._hash_replicas(), self._plan.nbytes)

        _, raw = self._session.vote(
            "preparing the save", plan_and_reserve, bytes, lambda posted: stage.decide(posted, self._plan_next)
        )
        begun = stage.begin(raw)
        if begun.problem:
            self._save_without_tier(agreement, begun.problem)
            return
        self._accept_identity(begun.identity)
        self._started_at = begun.started_at
        if begun.drains:
            self.has_follow_up = True

    def _plan_next(self) -> NextSave:
        request = self._request
        return self._stage.tier.plan_save(request.tag, request.job, self._stage.options, self._must_drain)

    def _must_drain(self, info: CheckpointInfo) -> bool:
        """Return whether the new checkpoint must be drained: the last one of a job, or one that a policy keeps."""
        request = self._request
        step, metrics = request.manifest_numbers()
        described = replace(info, step=step, metrics=metrics)
        return request.forced or (
            request.keep is not None and info.id in request.keep.select_by_merit([*self._stage.tier.durable, described])
        )

    def _save_without_tier(self, agreement: SaveAgreement, problem: str) -> None:
        self._warn_of_tier(problem)
        self._stage.release()
        self.completed_locally = None
        super()._plan_and_open(agreement)

    def _warn_of_tier(self, problem: object) -> None:
        if self._session.rank == COORDINATOR_RANK:
            warn_caller(f"{self.path} is saved without the local tier: {problem}")

    def _choose_identity(self) -> CheckpointIdentity:
        return self._stage.tier.choose_identity(self._request.job)

    def _commit_without_tier(self) -> CheckpointInfo:
        info = super().write_and_commit()
        self._stage.tier.forget_newest()
        self._stage.tier.note_durable(info)
        return info

    def stage_tensors(self, arena: Arena) -> None:
        """See :class:`SaveOperation`. The tensors are copied into the slot."""
        super().stage_tensors(self._stage.arena(arena))

    def write_and_commit(self) -> CheckpointInfo:
        """Complete the checkpoint in the tier, and copy it to other hosts."""
        stage = self._stage
        if not stage.has_slot:
            return self._commit_without_tier()
        if self._staged is None:  # a synchronous save
            self.stage_tensors(Arena(StagingMemory()))
            self.complete_copies()
        self._staged_plan = self._plan if self._own_staged is None else self._own_staged.place_ranges(self._plan)
        try:
            common = stage.complete(self._staged, self._captured.rank_values, self._describe, self._plan)
        except StorageError as error:  # the memory is full, or the folder is gone: the staged bytes are still there
            return self._write_past_tier(error)
        self._release_tensors()
        info = CheckpointInfo.of(self.path, common.label.manifest)
        info = self._info = replace(info, nbytes=sum(file.size for file in self._plan.files))
        if self.completed_locally is not None:
            self.completed_locally.set_result(None)
        self._reporter.report_saved_locally(info.path, info.step, info.nbytes)
        self._keep_newest()
        if not self.has_follow_up:
            stage.release()
        return info

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
        self._stage.tier.forget_newest()
        self._stage.tier.note_durable(info)
        if self.completed_locally is not None:
            self.completed_locally.set_result(None)
        return info

    def _describe(self, rank_values: list[bytes]) -> Common:
        """Return what the generation has in addition to parts and files, on rank 0."""
        options = self._request.options
        keep_full_every = options.keep_full_every if options.incremental else 1
        label = GenerationLabel(self.make_manifest({}), self._request.replaces, keep_full_every)
        return Common(label, {}, self.build_small_files(rank_values))

    def _keep_newest(self) -> None:
        """Make copies or parity. Then the generations before are not needed any more.

        A failure only warns: the checkpoint is complete without copies. If another rank has failed, its host may be
        lost, and only a generation before, which has copies, can be loaded. If memory is short, that must not stay.
        """
        self._reporter.begin_phase("replicate")
        try:
            copies = self._stage.make_redundant()
        except RanklessError as error:
            if self._session.rank == COORDINATOR_RANK:
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
        drained: CheckpointInfo | None = None
        try:
            info = retry_drain(self._drain_once, self._note_failure)
            drained = info
        except RanklessError as error:
            if self._stage.options.on_failure == "raise":
                raise
            if self._session.rank == COORDINATOR_RANK:
                warn_caller(f"{self.path} could not be written, and stays in the local tier: {error}")
            return self._info
        else:
            return info
        finally:
            self._stage.end_drain(drained)
            self._stage.release()

    def _drain_once(self, attempt: int) -> CheckpointInfo:
        """Write the staged bytes into an output that no other attempt has, and commit it."""
        self._attempt = attempt
        ranks = WritingRanks(self._ranks, self._session, attempt)
        new = msgspec.structs.replace(self._new_tag, tier=self._stage.tier)
        self._output = output = open_output(new, ranks, self._known)

        def prepare() -> bytes:
            return output.prepare(self._staged_plan, self._describe_staged(), self._cache.witness)

        if not begin_attempt(self._session, output, self._identity, prepare):
            return self._info
        self._plan = output.omit_unchanged(trusts_versions=False)
        if self._own_staged is not None:
            self._staged = self._own_staged.restrict_to(self._plan.file_ranges)
        return super().write_and_commit()

    def _describe_staged(self) -> LiveTensors | None:
        """Return the staged bytes, which are in one buffer, as an output compares them with the checkpoint before."""
        if self._own_staged is None:
            return None
        memory = self._own_staged.memory
        tensors = dict.fromkeys(self._staged_plan.tensors, memory)
        return LiveTensors(tensors, self._captured.frozen, self._versions, self._identity.sequence)

    def _note_failure(self, error: RanklessError, attempt: int) -> None:
        self._output.discard()
        self._reporter.report_drain_failed(error, attempt, self._stage.tier.undrained_seconds)

    def _roll_back(self, error: BaseException) -> None:
        self._stage.abandon(self._request.tag)
        super()._roll_back(error)
