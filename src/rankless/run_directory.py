"""The ``RunDirectory``: saves into and loads from one run directory, with settings that are given once.

:mod:`rankless.api`, :class:`rankless.Checkpointer` and integrations have one on every rank, and call it in the thread
of the caller.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from msgspec.structs import replace

from rankless.engine.comm.call_check import CallDescription, vote_same_call
from rankless.engine.comm.collective_call import collective_call
from rankless.engine.comm.process_group_argument import (
    ProcessGroupArgument,
    check_process_group,
    check_ranks_are_joined,
    current_process_group,
)
from rankless.engine.comm.session import RankGroup
from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.errors import CorruptCheckpointError, InvalidArgumentError, RanklessError, StorageError
from rankless.observe.events import OnEvent, ignore_event
from rankless.observe.reporter import with_progress_bar
from rankless.observe.spans import span, traced
from rankless.observe.warning import warn_caller
from rankless.ondisk.data_files import ONLY_ADAPTERS, WITH_ADAPTERS
from rankless.ondisk.validation import check_flag, check_timeout
from rankless.options import LoadKeywords, LoadOptions, SaveKeywords, SaveOptions, with_keywords
from rankless.run.catalog import claim_incarnation, list_checkpoints
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.claims import JobHistory
from rankless.run.retention import Retention, as_policy
from rankless.run.stored_history import read_history
from rankless.run.tag_arguments import TagArgument, check_tag_argument
from rankless.save.background import background_saves
from rankless.save.base_checkpoint import BaseCheckpoint, KnownRun, loaded_base
from rankless.save.deferred_errors import DeferredErrors
from rankless.save.handle import SaveHandle
from rankless.save.job_memory import JobMemory
from rankless.state.training import TrainingObjects, as_loader
from rankless.storage.location import parse_location
from rankless.storage.store import store_of
from rankless.tier.tier_options import LocalTier, as_local_tier

#: Prepared memory exceeds an estimate by so many bytes, in addition to an eighth: ranks write parts of unequal sizes.
_STAGING_MARGIN = 8 * 2**20

_log = logging.getLogger("rankless")

if TYPE_CHECKING:
    from rankless.formats.reader import Reader
    from rankless.load.load_request import LoadRequest
    from rankless.load.restore_result import RestoreResult
    from rankless.load.tier_load import TierLoad
    from rankless.save.save_operation import Content
    from rankless.save.save_request import SaveRequest
    from rankless.save.training_content import SavePlanCache, TrainingContent
    from rankless.tier.job import TierJob

#: The most characters of the name of replica groups.
_MAX_GROUPS_NAME = 200


class RunDirectory:
    """Saves into and loads from one run directory. All ranks must make the same calls in the same order.

    The objects to save are arguments of each call; a :class:`rankless.Checkpointer` is given them once. A
    ``RunDirectory`` is a context manager; at the end of the ``with`` block it waits for its background saves.

    Args:
        path: The run directory, on a file system that all ranks share, or its URL in an object store. It is created by
            the first save.
        keep: The number of checkpoints to keep, or a retention policy (see :mod:`rankless.run.retention`). A save
            removes only checkpoints of its own run: the run that was loaded from, or a new one.
        async_save: The default of ``async_save`` in :meth:`save`.
        process_group: The ranks that save and load together. By default the default process group, or this process
            alone if there is none; ``"self"`` is this process alone in any case. Without a process group a save is
            refused if ``torchrun`` has started several ranks.
        timeout: The number of seconds that ranks wait for each other before all of them fail.
        local: The local tier: a folder of each host, such as ``"/dev/shm/job"``, or a :class:`rankless.LocalTier`.
        replica_groups: The name of the job, if several process groups hold the same training state, such as torchft's
            replica groups, and any of them may save: their checkpoints are the work of one job, and the highest
            ``step`` is the latest. All groups pass the same name, and a later job another one, such as the id that its
            scheduler has given to it. Not with ``local``.
        options: The default of ``options`` in :meth:`save`. Its ``on_event`` is called with the events of loads, too.
        more: Fields of :class:`rankless.SaveOptions`, which documents them; they have precedence over ``options``.

    Raises:
        InvalidArgumentError: An argument is invalid.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        keep: Retention | int | None = None,
        async_save: bool = False,
        process_group: ProcessGroupArgument = None,
        timeout: float = 600.0,
        local: LocalTier | str | PathLike[str] | None = None,
        replica_groups: str | None = None,
        options: SaveOptions | None = None,
        **more: Unpack[SaveKeywords],
    ) -> None:
        self.path = parse_location(path)
        self._local = as_local_tier(local)
        groups = "" if replica_groups is None else _check_groups(replica_groups, local)
        self._tier = self._find_tier(self._local)
        #: The loads and saves of this job, here and elsewhere. Objects of one job may share it.
        self.memory = JobMemory()
        if groups:
            self.history.groups = groups
        #: The options of a save that passes none.
        self.options = with_keywords(SaveOptions(), options, more, RunDirectory)
        self.options.check()
        self._keep, self._async_save = as_policy(keep), check_flag("async_save", async_save)
        #: The checkpoints that each save keeps besides: one with states that only it has.
        self.kept_besides: Retention | None = None
        #: The retention policy of the newest save, which may be drained later.
        self._newest_keep = self._keep
        self._process_group, self._timeout = check_process_group(process_group), check_timeout(timeout)
        #: The plan of the newest save, if there was one with these ranks.
        self._plans: SavePlanCache | None = None
        #: Whether the newest save asked for statistics: a later drain of it lets them be computed.
        self._measures_newest = False
        self._ranks: RankGroup | None = None

    @property
    def history(self) -> JobHistory:
        """The history of this job here: a save continues the loaded checkpoint, and retention affects no other run."""
        return self.memory.of(self.path).history

    @property
    def _known(self) -> KnownRun:
        """The knowledge of this job about the run directory, for its saves."""
        return self.memory.of(self.path).known

    @property
    def _on_event(self) -> OnEvent:
        return self.options.on_event or ignore_event

    def _find_tier(self, local: LocalTier | None) -> TierJob | None:
        if local is None:
            return None
        from rankless.tier.job import tier_jobs  # noqa: PLC0415 - other saves do not need its modules

        return tier_jobs.get_state(local.path, self.path)

    def save(
        self,
        tag: str,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        user_content: Any = None,
        *,
        dataloader: Any = None,
        stateful: Mapping[str, Any] | None = None,
        per_rank_content: Any = None,
        step: float | None = None,
        metrics: Mapping[str, Any] | None = None,
        keep: Retention | int | None = None,
        overwrite: bool = False,
        async_save: bool | None = None,
        forced: bool = False,
        options: SaveOptions | None = None,
        **more: Unpack[SaveKeywords],
    ) -> SaveHandle[CheckpointInfo]:
        """Save a training state as the checkpoint ``tag``. If a save of this path is in progress, wait for it first.

        Args:
            tag: The checkpoint's name: one path component, such as ``"step_1000"``.
            model: A module in any layout (plain, DDP, FSDP1, FSDP2, HSDP, tensor parallel, compiled) or a state dict.
                Pass a list for the parts of one model, such as pipeline stages. Pass a dict for separate models; each
                gets a directory of its own, such as ``model/generator``.
            optimizer: A ``torch.optim.Optimizer`` (also a ``ZeroRedundancyOptimizer``), the state dict of one, or a
                list or dict of them. It is not stepped, and its states keep their own dtypes.
            scheduler: An object with ``state_dict`` and ``load_state_dict``, or a state dict. Saved from rank 0.
            user_content: A tree of plain values, tensors and arrays. Saved from rank 0.
            dataloader: An object with ``state_dict`` and ``load_state_dict``, such as torchdata's
                ``StatefulDataLoader``. Each rank's state is saved. Of several, a dict by name.
            stateful: A dict of objects with ``state_dict`` and ``load_state_dict`` that have the same state on all
                ranks, such as ``{"scaler": scaler}``.
            per_rank_content: A tree of values like ``user_content``, but saved from each rank and returned to that
                rank.
            step: The training step, stored in the manifest and used by retention policies.
            metrics: Numbers or tensors of one element by name, stored in the manifest and used by retention policies.
                Values that are not finite are stored as null.
            keep: The number of newest checkpoints of this run to keep, or a policy such as
                ``KeepLast(5) | KeepEvery(1000) | KeepBest("val_loss", 3)``; by default the constructor's, or else
                nothing is removed. Others are removed after this one is committed, and only checkpoints of the same
                run. A process continues the run that it loaded from; if it loaded nothing, it starts a new run. Renamed
                or copied checkpoints are never removed.
            overwrite: Replace a checkpoint with this tag in one atomic step instead of raising ``TagExistsError``. One
                that the run has abandoned gets another tag instead, as without ``overwrite``.
            async_save: Return as soon as the training state may change again, and write in the background. The next
                save to the same path, :func:`rankless.finalize` and the end of the process wait for the background
                save. If that has failed, the next save begins, and then raises its error. By default as in the
                constructor.
            forced: Save even if the retention policy needs a metric that was not passed, and leave the error of an
                earlier save in the background to :meth:`finalize`.
            options: Options that few need, in place of the constructor's: see :class:`rankless.SaveOptions`.
            more: Fields of :class:`rankless.SaveOptions`; they have precedence over ``options``.

        Returns:
            A handle of the save. The checkpoint is complete and durable when this function returns, or, with
            ``async_save``, when the handle's ``wait()`` returns. With a local tier, that holds for the checkpoints that
            are drained; all others are complete in the tier then.

        Every rank raises the same error. Existing checkpoints are left unchanged then.

        Raises:
            TagExistsError: A checkpoint with this tag exists. A corrupt one that an earlier load in this process had to
                skip is hidden instead, and does not raise.
            UnsupportedValueError: Some values cannot be stored; the message names each by its path.
            InvalidArgumentError: An argument or an option is invalid, or there is no argument of this name.
            StateError: The objects contradict each other, or cannot be stored in the way that an option demands.
            ReplicaMismatchError: Ranks hold different values of one tensor.
            RankMismatchError: Ranks were called with different arguments, or do not share a file system.
            RankTimeoutError: A rank did not arrive in time.
            StorageError: The file system or the object store reported an error.
        """
        with collective_call(self._process_group, self._timeout):
            began = time.perf_counter()
            chosen = with_keywords(self.options, options, more, RunDirectory.save)
            # Imported here, as a job that only loads needs no code of saves.
            from rankless.save.metrics import copy_metrics  # noqa: PLC0415
            from rankless.save.save_request import SaveRequest  # noqa: PLC0415

            training = TrainingObjects(
                model,
                optimizer,
                scheduler,
                user_content,
                per_rank_content,
                stateful,
                as_loader(dataloader),
                chosen.rng,
                state_dict_hooks=chosen.state_dict_hooks,
                frozen_apart=chosen.frozen == "apart",
                adapters=ONLY_ADAPTERS if chosen.adapter_only else WITH_ADAPTERS,
                files={} if chosen.files is None else chosen.files,
            )
            policy = self._keep if keep is None else as_policy(keep)
            request = SaveRequest(
                path=self.path,
                tag=tag,
                training=training,
                options=chosen,
                step=step,
                metrics=copy_metrics({} if metrics is None else metrics),
                overwrite=check_flag("overwrite", overwrite),
                keep=policy if policy is None or self.kept_besides is None else policy | self.kept_besides,
                async_save=self._async_save if async_save is None else check_flag("async_save", async_save),
                forced=forced,
                began=began,
            )
            check_ranks_are_joined(self._process_group)
            turn = background_saves.path_turn(self.path, self._process_group, raises_failures=not forced)
            with span("save", "call", str(tag)), turn:
                request = replace(request, job=self.history, corrupt=frozenset(self.memory.corrupt))
                self._measures_newest, self._newest_keep = bool(chosen.stats), request.keep
                request = replace(
                    request, on_event=self._with_statistics(chosen.on_event or ignore_event, chosen.stats)
                )
                if request.async_save:
                    return self._run_save(request)
                with self._with_progress_bar(f"saving {request.tag}", request.on_event) as listener:
                    return self._run_save(replace(request, on_event=listener))

    def _with_statistics(self, on_event: OnEvent, stats: object) -> OnEvent:
        """Return a listener that, on the coordinator, lets statistics be computed if they are requested."""
        if not stats or self._current_ranks().rank != COORDINATOR_RANK:
            return on_event
        from rankless.inspection.background_statistics import keep_statistics  # noqa: PLC0415 - other saves need none

        return keep_statistics(on_event)

    def _run_save(self, request: SaveRequest) -> SaveHandle[CheckpointInfo]:
        from rankless.save.run_save import run_save  # noqa: PLC0415 - as above

        training, content = self._make_content(request)
        try:
            return run_save(content, self.path, self._process_group, asynchronous=request.async_save)
        finally:
            if (identity := training.identity).run:
                newest = identity.id, request.tag
                self.history.note_saved(identity.run, identity.incarnation, identity.sequence, newest)

    @traced("begin the save", "import")
    def _make_content(self, request: SaveRequest) -> tuple[TrainingContent, Content[CheckpointInfo]]:
        """Return the content to save, and the same with the local tier in between, if there is one."""
        from rankless.save.training_content import SavePlanCache, TrainingContent  # noqa: PLC0415 - as above

        tier, local, ranks = self._tier, self._local, self._current_ranks()
        if tier is not None and local is not None:
            request = replace(request, known_tags=tier.known_tags, local=local.describe())
        self._plans = self._plans or SavePlanCache()
        training = TrainingContent(request, ranks, self._plans, self._known, self._timeout)
        if tier is None or local is None:
            return training, training
        from rankless.save.tier_content import TierContent  # noqa: PLC0415 - other saves do not need its modules

        return training, TierContent(training, tier, local)

    def _with_progress_bar(self, label: str, on_event: OnEvent) -> AbstractContextManager[OnEvent]:
        """Return the event listener, on the coordinator combined with a progress bar."""
        return (
            with_progress_bar(label, on_event)
            if self._current_ranks().rank == COORDINATOR_RANK
            else nullcontext(on_event)
        )

    def finalize(self) -> None:
        """Wait for the background saves of this path. All ranks must call it if there is a local tier.

        Then the newest checkpoint in the local tier is written into the run directory, unless it is there, also if a
        save has failed.

        Raises:
            Exception: The error of the first save that failed. Each error is raised once.
        """
        failures = DeferredErrors()
        failures.run(self.wait)
        if not failures.is_rank_missing:
            failures.run(self.drain)
        failures.raise_first()

    def wait_for_turn(self) -> None:
        """Wait until a save may begin. Raise the error of an earlier one, which :meth:`save` then does not raise.

        :class:`rankless.Checkpointer` calls it on every rank in its method ``save``.
        """
        background_saves.wait_for_turn(self.path, self._process_group)

    def wait(self) -> None:
        """Wait for the background saves of this path, and for no other rank."""
        background_saves.finalize(self.path)

    def load(
        self,
        tag: TagArgument = None,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        *,
        dataloader: Any = None,
        stateful: Mapping[str, Any] | None = None,
        options: LoadOptions | None = None,
        **more: Unpack[LoadKeywords],
    ) -> Any:
        """Return ``restore(...).user_content``: load ``tag`` or the latest checkpoint, and return its user content.

        The arguments and errors are as in :meth:`restore`.
        """
        chosen = with_keywords(LoadOptions(), options, more, RunDirectory.load)
        restored = self.restore(
            tag, model, optimizer, scheduler, dataloader=dataloader, stateful=stateful, options=chosen
        )
        if restored.per_rank_content is not None and _is_resume_call(optimizer, dataloader):
            warn_caller(
                f"the checkpoint {restored.tag!r} has per_rank_content, which only restore() returns: call that instead"
            )
        return restored.user_content

    def restore(
        self,
        tag: TagArgument = None,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        *,
        dataloader: Any = None,
        stateful: Mapping[str, Any] | None = None,
        options: LoadOptions | None = None,
        **more: Unpack[LoadKeywords],
    ) -> RestoreResult:
        """Load ``tag`` or the latest checkpoint in place, and report the loaded parts.

        The arguments, the result and the errors are as in :func:`rankless.restore`. :class:`rankless.LoadOptions`
        documents ``options``, and its fields are the further keyword arguments.
        """
        with collective_call(self._process_group, self._timeout):
            chosen = with_keywords(LoadOptions(), options, more, RunDirectory.restore)
            # Imported here, as a job that only saves needs none of it, and no reader of another format.
            from rankless.load.load_request import LoadRequest  # noqa: PLC0415
            from rankless.state.mismatches import RestorePolicy, as_components  # noqa: PLC0415

            chosen.check()
            selected = check_tag_argument(tag)
            resumes = _is_resume_call(optimizer, dataloader) if chosen.resume is None else chosen.resume
            policy = RestorePolicy(
                strict=chosen.strict if isinstance(chosen.strict, bool) else True,
                lenient=_lenient_components(chosen.strict),
                cast_dtype=chosen.cast_dtype,
                rng=optimizer is not None if chosen.rng is None else chosen.rng,
                per_rank_content=_is_resume_call(optimizer, dataloader),
                # Components that were not requested explicitly may be missing, but a warning says so.
                allow_missing=as_components(chosen.allow_missing)
                | {"per_rank_content"}
                | ({"rng"} if chosen.rng is None else set()),
            )
            request = LoadRequest(
                path=self.path,
                tag=selected,
                training=TrainingObjects(
                    model, optimizer, scheduler, stateful=stateful, dataloader=as_loader(dataloader)
                ),
                policy=policy,
                verify=chosen.verify,
                share_reads=chosen.share_reads,
                on_corruption=chosen.on_corruption,
                keys=chosen.keys or {},
                token=secrets.token_hex(8),
                local="none" if self._tier is None or self._local is None else self._local.describe(),
                resume=chosen.resume,
                goes_back_once=chosen.again is False,
                edit=None if chosen.edit is None else _reader_edit(chosen.edit, is_repeated=not resumes),
                on_event=chosen.on_event or self._on_event,
            )
            with span("load", "call", str(selected or "")):
                return self._run_load(request, resumes=resumes, claims=chosen.resume is True)

    def _run_load(self, request: LoadRequest, *, resumes: bool, claims: bool) -> RestoreResult:
        with span("import", "import"):
            from rankless.load.fallback import load_with_fallback  # noqa: PLC0415 - as above

        if claims:
            background_saves.finalize(self.path)  # this job's newest checkpoint is the latest when they have ended
        title = f"loading {request.tag or self.path.name}"
        with self._with_progress_bar(title, request.on_event) as listener:
            tier = None if self._tier is None else self._open_tier(self._tier, resumes=resumes)
            restored = load_with_fallback(
                replace(request, on_event=listener), self._current_ranks(), self._timeout, self.memory.corrupt, tier
            )
        if tier is not None and resumes and restored.source == "local tier":
            self._drain_assembled(tier, self._on_event, self._keep)
        self._note_loaded(restored, resumes=resumes, claims=claims)
        return restored

    def _note_loaded(self, restored: RestoreResult, *, resumes: bool, claims: bool) -> None:
        """Remember the loaded checkpoint: the next save into its directory continues it, and may share files with it.

        ``claims``: claim an incarnation now, if it is a checkpoint of this directory. After a load by the path of a
        checkpoint the training may go on in any directory, so the first save claims.
        """
        if restored.base is None or restored.path is None:  # it is in another format
            self._known.checkpoint = None
            self.history.edits = restored.edits
            return
        is_of_run = restored.path.parent == self.path
        memory = self.memory.of(self.path if is_of_run else restored.path.resolve().parent)
        memory.history.note_loaded(restored.base, resumes=resumes)
        memory.known.checkpoint = self._find_base(restored)
        if claims and is_of_run and self._tier is None and self._current_ranks().rank == COORDINATOR_RANK:
            claim_incarnation(self.path, self.history)

    @traced("open the local tier", "import")
    def _open_tier(self, tier: TierJob, *, resumes: bool) -> TierLoad:
        from rankless.load.tier_load import TierLoad  # noqa: PLC0415 - other loads do not need its modules

        background_saves.finalize(self.path)
        return TierLoad(tier, self._current_ranks(), self._timeout, resumes=resumes)

    def _drain_assembled(
        self, tier: TierLoad, on_event: OnEvent, keep: Retention | None, *, on_failure: str | None = None
    ) -> None:
        """Begin to write a checkpoint that was assembled from the local tier into the run directory.

        ``on_failure`` is the tier's by default.
        """
        from rankless.save.generation_content import DrainOptions, GenerationContent  # noqa: PLC0415 - as above
        from rankless.save.run_save import run_save  # noqa: PLC0415 - as above

        if tier.assembly is None or self._local is None:
            return
        options = DrainOptions(on_failure or self._local.on_failure, keep, on_event)
        content = GenerationContent(self._current_ranks(), self._timeout, tier.tier, tier.assembly, options)
        with background_saves.path_turn(self.path, self._process_group, raises_failures=False):
            run_save(content, self.path, self._process_group, asynchronous=True)

    def warn_of_unread_tiers(self) -> None:
        """Warn on the coordinator if jobs have used a local tier of this directory, and this one does not.

        :meth:`rankless.Checkpointer.resume` calls it on every rank; rank 0 alone looks.
        """
        if self._tier is not None or self.rank != COORDINATOR_RANK:
            return
        with suppress(RanklessError):  # only a warning: this rank must not fail alone
            if read_history(self.path).announced:
                warn_caller(
                    f"{self.path} has no checkpoint, but a job has used a local tier of it, which may have one: to "
                    "look there, pass local="
                )

    def is_ahead_of_run(self) -> bool:
        """Return whether the local tier has a checkpoint, of this job or an earlier one. All ranks must call it."""
        if self._local is None:
            return False
        from rankless.load.tier_generations import has_checkpoint_in_tier  # noqa: PLC0415 - few jobs have a tier

        return has_checkpoint_in_tier(self.path, self._local, self._current_ranks(), self._timeout)

    @property
    def has_undrained(self) -> bool:
        """True if the local tier has a checkpoint of this job that the run directory lacks."""
        return self._tier is not None and self._tier.newest is not None and not self._tier.is_drained

    def drain(self) -> None:
        """Write the newest checkpoint of this job into the run directory, if only the local tier has it.

        Saves in the background must have ended. All ranks must call it.
        """
        if self._tier is None or self._tier.newest is None or not self.has_undrained:
            return
        from rankless.load.tier_load import TierLoad  # noqa: PLC0415 - as above

        newest = TierLoad(self._tier, self._current_ranks(), self._timeout, resumes=True)
        try:
            newest.assemble_latest(self._tier.newest)
        except (CorruptCheckpointError, StorageError):  # the folder was removed, or its bytes are lost
            self._tier.forget_undrained()
            raise
        on_event = self._with_statistics(self._on_event, self._measures_newest)
        # Whatever fails may be a warning as long as the training goes on: this is the last attempt.
        self._drain_assembled(newest, on_event, self._newest_keep, on_failure="raise")
        self.wait()

    @traced("find the base of the next save", "read")
    def _find_base(self, restored: RestoreResult) -> BaseCheckpoint | None:
        """Return the loaded checkpoint, unless only the local tier has it: the next save may share files with it."""
        if not restored.id or restored.path is None or restored.source != "run directory":
            return None
        if store_of(self.path).is_remote:  # objects cannot be linked
            return None
        return loaded_base(restored.path, restored.id, is_coordinator=self._current_ranks().rank == COORDINATOR_RANK)

    def compare_calls(self, call: CallDescription, check: Callable[[], None]) -> None:
        """Raise ``RankMismatchError`` if ranks make different calls. Run ``check`` on rank 0; all raise its error.

        :class:`rankless.Checkpointer` calls it on every rank: it is the vote "beginning".
        """

        def check_and_agree(_: list[bytes]) -> bytes:
            check()
            return b""

        session = self._current_ranks().open_session(self._timeout)
        vote_same_call(session, "beginning", lambda: call, lambda: b"", check_and_agree)

    def ask_rank_0(self, decide: Callable[[], bytes], phase: str = "deciding when to save") -> bytes:
        """Return the result of ``decide`` on rank 0. All ranks must call it; they wait for each other.

        :class:`rankless.Checkpointer` and :mod:`rankless.model_saves` call it: it is a vote called ``phase``.
        """
        session = self._current_ranks().open_session(self._timeout)
        _, raw = session.vote(phase, lambda: None, lambda _: b"", lambda _: decide())
        session.leave()
        return raw

    def prepare_staging(self, estimate_bytes: Callable[[int], int]) -> None:
        """Prepare memory for the first save, if saves are asynchronous and do not use the memory of a tier.

        ``estimate_bytes`` returns the bytes that this rank will stage, from the number of ranks. Its errors are logged
        only: the first save raises them again.

        :class:`rankless.Checkpointer` calls it on each rank, in its first step.
        """
        if not self._async_save or self._tier is not None:
            return
        try:
            nbytes = estimate_bytes(self._current_ranks().size)
            background_saves.prepare_memory(nbytes + nbytes // 8 + _STAGING_MARGIN)
        except Exception:  # noqa: BLE001 - logged
            _log.debug("the memory of the first save is not prepared", exc_info=True)

    @property
    def rank(self) -> int:
        """The rank of this process among those that save and load together."""
        return self._current_ranks().rank

    def list(self) -> list[CheckpointInfo]:
        """Return the checkpoints in the run directory, oldest first. See :func:`rankless.list_checkpoints`."""
        return list_checkpoints(self.path)

    def _current_ranks(self) -> RankGroup:
        if self._ranks is None or self._ranks.process_group is not current_process_group(self._process_group):
            self._ranks = RankGroup(self._process_group)
            self._plans = None  # a plan is for one rank, and the rank may have changed
        return self._ranks

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finalize()
        else:
            self.wait()


def _check_groups(name: object, local: object) -> str:
    """Return the name that replica groups have passed."""
    if not isinstance(name, str) or not name or not name.isprintable() or len(name) > _MAX_GROUPS_NAME:
        raise InvalidArgumentError(
            "replica_groups must be the name of the job that the groups are part of, the same in all of them, such as "
            f"os.environ['SLURM_JOB_ID']; got {name!r:.80}"
        )
    if local is not None:
        raise InvalidArgumentError("replica groups save past the local tier: leave out local=")
    return name


def _lenient_components(strict: object) -> frozenset[str]:
    """Return the components that ``strict`` excludes by name. Raises ``InvalidArgumentError`` for any other type."""
    if isinstance(strict, bool):
        return frozenset()
    if not isinstance(strict, Mapping) or not all(isinstance(value, bool) for value in strict.values()):
        raise InvalidArgumentError(f"strict must be a bool, or a dict such as {{'model': False}}; got {strict!r}")
    return frozenset(name for name, value in strict.items() if not value)


def _reader_edit(edit: Any, *, is_repeated: bool) -> Callable[[Reader], Reader]:
    """Return how a load changes the values that it reads. Raises ``InvalidArgumentError`` if the recipe is invalid.

    ``is_repeated``: also the values of a checkpoint that came about by this edit.
    """
    from rankless.edits.apply_edits import ReaderEdit  # noqa: PLC0415 - few loads need its modules
    from rankless.edits.recipe import parse_recipe  # noqa: PLC0415 - as above

    return ReaderEdit(parse_recipe(edit), is_repeated=is_repeated)


def _is_resume_call(optimizer: Any, dataloader: Any) -> bool:
    """Return whether a load resumes training, and so must restore the per-rank content."""
    return optimizer is not None or dataloader is not None
