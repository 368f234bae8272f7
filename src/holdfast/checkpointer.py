"""A run's folder: what is set once for all its saves and loads."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from os import PathLike
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from holdfast.catalog import list_checkpoints
from holdfast.engine.ballot import LEADER
from holdfast.engine.ranks import Ranks, current_group
from holdfast.engine.stage import Arena
from holdfast.events import OnEvent, unheard
from holdfast.falling_back import load
from holdfast.garbage import uncollected
from holdfast.handle import SaveHandle, ended, in_background
from holdfast.request import Background, LoadRequest, SaveRequest
from holdfast.restored import Restored
from holdfast.retention import Retention, policy_of
from holdfast.saving import PlanCache, Save
from holdfast.state.capture import Training
from holdfast.state.restore import Policy
from holdfast.state.steady import StepGuard
from holdfast.storage.local import local_path
from holdfast.survey import CheckpointInfo
from holdfast.telling import with_a_bar


class Checkpointer:
    """Saves into and loads from one run's folder. All ranks make the same calls in the same order.

    ``async_save`` and ``staging`` are what saves do where they are not told.
    ``keep`` says which checkpoints of its run a save leaves (see :mod:`holdfast.retention`): the run that it has loaded
    from, or else one that it begins. ``max_shard_size`` is the most bytes of tensors in one file (a number, or text
    such as ``"5GB"``);
    ``timeout`` the seconds that ranks wait for each other before all of them fail; ``on_event`` is told what happens
    (see :mod:`holdfast.events`). Usable as a context manager.
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
        self._max_shard_size, self._keep = max_shard_size, policy_of(None, keep)
        self._process_group, self._timeout = process_group, timeout
        self._async, self._staging = async_save, staging
        self._on_event = on_event or unheard
        self._guard = StepGuard()
        self._arena = Arena()
        self._flight: SaveHandle[CheckpointInfo] | None = None
        self._plans = PlanCache()
        self._ranks: Ranks | None = None

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
        rank_content: Any = None,
        step: float | None = None,
        metrics: Mapping[str, float] | None = None,
        overwrite: bool = False,
        num_kept_ckpts: int | None = None,
        keep: Retention | int | None = None,
        async_save: bool | None = None,
        staging: str | None = None,
        staging_check: str = "sampled",
        rng: bool = True,
        on_event: OnEvent | None = None,
    ) -> SaveHandle[CheckpointInfo]:
        """Save under ``tag``: see :func:`holdfast.save_checkpoint`. Waits for the save before, if that is under way."""
        began = time.perf_counter()
        self.finalize()
        training = Training(model, optimizer, scheduler, user_content, rank_content, stateful, dataloader, rng)
        own = num_kept_ckpts is None and keep is None
        kept = self._keep if own else policy_of(num_kept_ckpts, keep)
        how = Background(staging or self._staging, staging_check)
        background = how if (self._async if async_save is None else async_save) else None
        request = SaveRequest(
            path=self.path,
            tag=tag,
            training=training,
            max_shard_size=self._max_shard_size,
            step=step,
            metrics=metrics or {},
            overwrite=overwrite,
            keep=kept,
            background=background,
            runs=frozenset(self.runs),
            on_event=on_event or self._on_event,
            began=began,
        )
        return self._at_once(request) if background is None else self._later(request)

    def _at_once(self, request: SaveRequest) -> SaveHandle[CheckpointInfo]:
        with self._watched(f"saving {request.tag}", request.on_event) as on_event:
            save = Save(replace(request, on_event=on_event), self._current_ranks(), self._plans, self._timeout)
            with uncollected(), save.undone_on_failure():
                save.begin()
                self.runs.add(save.run)
                info = save.finish()
                save.part()
        return SaveHandle(save.path, save.telling.returned(), ended(info))

    def _later(self, request: SaveRequest) -> SaveHandle[CheckpointInfo]:
        save = Save(request, self._current_ranks(), self._plans, self._timeout)
        with uncollected(), save.undone_on_failure():
            save.begin()
            self.runs.add(save.run)
            save.stage(self._arena)
            if not save.copied.is_set():
                self._guard.arm(save.copied)
            stall = save.telling.returned()
            done = in_background(save)
        self._flight = SaveHandle(save.path, stall, done)
        return self._flight

    def _watched(self, what: str, on_event: OnEvent) -> AbstractContextManager[OnEvent]:
        """The listener, with a bar on the terminal of the first rank."""
        return with_a_bar(what, on_event) if self._current_ranks().rank == LEADER else nullcontext(on_event)

    def finalize(self) -> None:
        """Wait for the save under way. Raises what went wrong with it, once."""
        flight = self._flight
        if flight is None:
            return
        try:
            flight.wait()
        finally:
            if flight.done():  # and not where the wait was interrupted
                self._flight = None
                self._guard.disarm()

    def load(
        self, tag: str | None = None, model: Any = None, optimizer: Any = None, scheduler: Any = None, **options: Any
    ) -> Any:
        """Load ``tag`` or the latest, and return the user content: see :func:`holdfast.load_checkpoint`."""
        return self.restore(tag, model, optimizer, scheduler, **options).user_content

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
        verify: bool = True,
        rng: bool | None = None,
        map_dtype: bool = False,
        exchange: str = "auto",
        on_damage: str = "fall_back",
        keys: Mapping[str, str] | None = None,
        on_event: OnEvent | None = None,
    ) -> Restored:
        """Load ``tag`` or the latest, and tell all about it: see :func:`holdfast.restore`."""
        request = LoadRequest(
            path=self.path,
            tag=tag,
            training=Training(model, optimizer, scheduler, stateful=stateful, dataloader=dataloader),
            policy=Policy(strict=strict, map_dtype=map_dtype, rng=optimizer is not None if rng is None else rng),
            verify=verify,
            exchange=exchange,
            on_damage=on_damage,
            keys=keys or {},
            on_event=on_event or self._on_event,
        )
        self._guard.wait()
        with self._watched(f"loading {tag or self.path.name}", request.on_event) as heard:
            restored = load(replace(request, on_event=heard), self._current_ranks(), self._timeout)
        if restored.run:
            self.runs.add(restored.run)
        return restored

    def list(self) -> list[CheckpointInfo]:
        """The checkpoints in the folder, oldest first."""
        return list_checkpoints(self.path)

    def _current_ranks(self) -> Ranks:
        if self._ranks is None or self._ranks.group is not current_group(self._process_group):
            self._ranks = Ranks(self._process_group)
            self._plans = PlanCache()  # a plan is one rank's share, and this may be another rank now
        return self._ranks

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finalize()
