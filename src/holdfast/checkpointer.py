"""A run's folder: what is set once for all its saves and loads."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from os import PathLike
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from holdfast.engine.comm.session import RankGroup, current_process_group
from holdfast.engine.comm.vote import COORDINATOR_RANK
from holdfast.load.fallback import load_with_fallback
from holdfast.load.request import LoadRequest
from holdfast.load.result import RestoreResult
from holdfast.observe.events import OnEvent, ignore_event
from holdfast.observe.reporter import with_progress_bar
from holdfast.observe.warning import warn_caller
from holdfast.ondisk.validation import check_choice
from holdfast.run.catalog import list_checkpoints
from holdfast.run.corruption import CorruptRecord
from holdfast.run.retention import Retention, as_policy
from holdfast.run.scan import CheckpointInfo
from holdfast.save.background import background_saves
from holdfast.save.handle import SaveHandle
from holdfast.save.operation import SaveOperation, SavePlanCache
from holdfast.save.request import STAGING, BackgroundOptions, SaveRequest
from holdfast.state.restore import RestorePolicy
from holdfast.state.training import TrainingObjects
from holdfast.storage.posix import local_path


class Checkpointer:
    """Saves into and loads from one run's folder. All ranks make the same calls in the same order.

    ``async_save`` and ``staging`` are what saves do where they are not told.
    ``keep`` says which checkpoints of its run a save leaves (see :mod:`holdfast.run.retention`): the run that it has loaded
    from, or else one that it begins. ``max_shard_size`` is the most bytes of tensors in one file (a number, or text
    such as ``"5GB"``);
    ``timeout`` the seconds that ranks wait for each other before all of them fail; ``on_event`` is told what happens
    (see :mod:`holdfast.observe.events`). Usable as a context manager.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        keep: Retention | int | None = None,
        async_save: bool = False,
        staging: str = "eager",
        max_shard_size: int | str = "5GB",
        process_group: dist.ProcessGroup | None = None,
        timeout: float = 600.0,
        on_event: OnEvent | None = None,
    ) -> None:
        self.path = local_path(path)
        #: The ids of the runs that it has saved or loaded: a save continues one of them, retention touches no other.
        self.runs: set[str] = set()
        #: The checkpoints that its loads found corrupt: they make way for its saves.
        self.corrupt: set[CorruptRecord] = set()
        self._max_shard_size, self._keep = max_shard_size, as_policy(None, keep)
        self._process_group, self._timeout = process_group, timeout
        check_choice("staging", staging, STAGING)
        self._async, self._staging = async_save, staging
        self._on_event = on_event or ignore_event
        self._plans = SavePlanCache()
        self._ranks: RankGroup | None = None

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
        metrics: Mapping[str, float] | None = None,
        overwrite: bool = False,
        num_kept_ckpts: int | None = None,
        keep: Retention | int | None = None,
        async_save: bool | None = None,
        staging: str | None = None,
        staging_check: str = "sampled",
        replica_check: str = "sampled",
        rng: bool = True,
        state_dict_hooks: bool = True,
        on_event: OnEvent | None = None,
    ) -> SaveHandle[CheckpointInfo]:
        """Save under ``tag``: see :func:`holdfast.save_checkpoint`. Waits for the save before, if that is under way."""
        began = time.perf_counter()
        training = TrainingObjects(
            model,
            optimizer,
            scheduler,
            user_content,
            per_rank_content,
            stateful,
            dataloader,
            rng,
            state_dict_hooks=state_dict_hooks,
        )
        own = num_kept_ckpts is None and keep is None
        kept = self._keep if own else as_policy(num_kept_ckpts, keep)
        request = SaveRequest(
            path=self.path,
            tag=tag,
            training=training,
            max_shard_size=self._max_shard_size,
            step=step,
            metrics=metrics or {},
            overwrite=overwrite,
            keep=kept,
            async_save=self._async if async_save is None else async_save,
            staging=BackgroundOptions(self._staging if staging is None else staging, staging_check),
            replica_check=replica_check,
            on_event=on_event or self._on_event,
            began=began,
        )
        with background_saves.turn(self.path, self._process_group):
            request = replace(request, runs=frozenset(self.runs), corrupt=frozenset(self.corrupt))
            if request.async_save:
                return self._run(request)
            with self._watched(f"saving {request.tag}", request.on_event) as heard:
                return self._run(replace(request, on_event=heard))

    def _run(self, request: SaveRequest) -> SaveHandle[CheckpointInfo]:
        save = SaveOperation(request, self._current_ranks(), self._plans, self._timeout)
        try:
            return background_saves.run(save, self.path, self._process_group, asynchronous=request.async_save)
        finally:
            if save.run:
                self.runs.add(save.run)

    def _watched(self, what: str, on_event: OnEvent) -> AbstractContextManager[OnEvent]:
        """The listener, with a bar on the terminal of the first rank."""
        return (
            with_progress_bar(what, on_event)
            if self._current_ranks().rank == COORDINATOR_RANK
            else nullcontext(on_event)
        )

    def finalize(self) -> None:
        """Wait for the saves of this path that are under way. Raises what went wrong with the first, once."""
        background_saves.finalize(self.path)

    def load(
        self, tag: str | None = None, model: Any = None, optimizer: Any = None, scheduler: Any = None, **options: Any
    ) -> Any:
        """Load ``tag`` or the latest, and return the user content: see :func:`holdfast.load_checkpoint`."""
        restored = self.restore(tag, model, optimizer, scheduler, **options)
        if restored.per_rank_content is not None and _is_resume_call(optimizer, options.get("dataloader")):
            warn_caller(
                f"the checkpoint {restored.tag!r} has per_rank_content, which only restore() returns: call that instead"
            )
        return restored.user_content

    def restore(
        self,
        tag: str | None = None,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        *,
        dataloader: Any = None,
        stateful: Mapping[str, Any] | None = None,
        strict: bool = True,
        allow_missing: Collection[str] = (),
        verify: bool = True,
        rng: bool | None = None,
        cast_dtype: bool = False,
        share_reads: str = "auto",
        on_corruption: str = "fall_back",
        keys: Mapping[str, str] | None = None,
        on_event: OnEvent | None = None,
    ) -> RestoreResult:
        """Load ``tag`` or the latest, and tell all about it: see :func:`holdfast.restore`."""
        policy = RestorePolicy(
            strict=strict,
            cast_dtype=cast_dtype,
            rng=optimizer is not None if rng is None else rng,
            per_rank_content=_is_resume_call(optimizer, dataloader),
            # What nobody has asked for in so many words may be missing, but not without a word.
            allow_missing=_as_components(allow_missing) | {"per_rank_content"} | ({"rng"} if rng is None else set()),
        )
        request = LoadRequest(
            path=self.path,
            tag=tag,
            training=TrainingObjects(model, optimizer, scheduler, stateful=stateful, dataloader=dataloader),
            policy=policy,
            verify=verify,
            share_reads=share_reads,
            on_corruption=on_corruption,
            keys=keys or {},
            on_event=on_event or self._on_event,
        )
        with self._watched(f"loading {tag or self.path.name}", request.on_event) as heard:
            restored = load_with_fallback(
                replace(request, on_event=heard), self._current_ranks(), self._timeout, self.corrupt
            )
        if restored.run:
            self.runs.add(restored.run)
        return restored

    def list(self) -> list[CheckpointInfo]:
        """The checkpoints in the folder, oldest first."""
        return list_checkpoints(self.path)

    def _current_ranks(self) -> RankGroup:
        if self._ranks is None or self._ranks.group is not current_process_group(self._process_group):
            self._ranks = RankGroup(self._process_group)
            self._plans = SavePlanCache()  # a plan is one rank's share, and this may be another rank now
        return self._ranks

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finalize()


def _as_components(given: Collection[str]) -> frozenset[str]:
    return frozenset({given} if isinstance(given, str) else given)


def _is_resume_call(optimizer: Any, dataloader: Any) -> bool:
    """Whether a load goes on with the training, and so wants all that ranks had of their own."""
    return optimizer is not None or dataloader is not None
