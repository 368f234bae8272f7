"""The ``Checkpointer``: it is given the objects of a training once, and decides when to save them and when to stop.

A :class:`~rankless.run_directory.RunDirectory` does the work. The ``Checkpointer`` knows the training's step, which is
the only source of the tag, of the step in the manifest and of the step in events.

Every rank has one, and calls it in the thread of the training.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, Unpack

from rankless.engine.comm.call_check import CallDescription
from rankless.engine.comm.collective_call import collective_call
from rankless.engine.comm.process_group_argument import ProcessGroupArgument
from rankless.errors import (
    CorruptCheckpointError,
    EmptyRunError,
    InvalidArgumentError,
    NoCheckpointError,
    StateError,
    StorageError,
)
from rankless.formats.native import is_native
from rankless.liveness.preemption import Preemption, preemption
from rankless.load.restore_result import RestoreResult
from rankless.model_saves import plan_model_saves
from rankless.observe.warning import warn_caller
from rankless.ondisk.validation import check_integer, check_tag
from rankless.options import LoadKeywords, LoadOptions, SaveKeywords, SaveOptions, with_keywords
from rankless.run.catalog import list_checkpoints_strictly
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.retention import KeepTags, Retention
from rankless.run.tag_arguments import TagArgument
from rankless.run_directory import RunDirectory
from rankless.save.cadence import as_cadence
from rankless.save.content_copy import copy_content
from rankless.save.deferred_errors import DeferredErrors
from rankless.save.failure_tolerance import FailureTolerance
from rankless.save.handle import SaveHandle
from rankless.save.metrics import check_metrics, copy_metrics
from rankless.state.mismatches import COMPONENTS
from rankless.state.staged_size import estimate_staged_bytes
from rankless.state.step_mark import StepMark
from rankless.state.user_objects import check_stateful_object
from rankless.storage.location import parse_location
from rankless.tier.tier_options import LocalTier

_log = logging.getLogger("rankless")

#: The note in an error that the end of a block raises: a block around it saves its last step, too.
_LOOP_HAS_ENDED = "the loop had ended before: this is the error of a save, raised at the end of the block"


class Checkpointer:
    """Saves and resumes one training. All ranks must make the same calls in the same order.

    ::

        with rankless.Checkpointer("runs/a", model=model, optimizer=optimizer, save_every=1000) as checkpointer:
            for step in range(checkpointer.resume() + 1, 10_001):
                ...
                if checkpointer.step(step):
                    break

    At the end of the ``with`` block it saves the last step if that was not saved, waits for all background saves, and
    then raises the error of one that failed, also of one before. If an exception of the loop ends the block, it only
    waits. So leave the loop right after :meth:`step`: if the state has changed since, the last step is not saved, with
    a warning.

    Args:
        path: The run directory, on a file system that all ranks share, or its URL in an object store.
        model: A module, or a dict of modules.
        optimizer: A ``torch.optim.Optimizer``, or a dict of them.
        scheduler: An object with ``state_dict`` and ``load_state_dict``, or a dict of them.
        dataloader: As in :meth:`rankless.RunDirectory.save`.
        stateful: Further objects with ``state_dict`` and ``load_state_dict``, by name. :meth:`register` adds others.
        save_every: :meth:`step` saves each step that is a multiple of this number; or, for a ``timedelta``, the step
            that is nearest to so long after the last save, by the clock of rank 0; or, for ``"auto"``, at the interval
            that costs the training least time, from the cost of its saves and how often it was resumed
            (:mod:`rankless.save.cadence`). By default it saves none of them: then checkpoints come from :meth:`save`,
            from signals, and from the end of the ``with`` block.
        save_model_every: :meth:`step` also saves the weights alone, at each multiple of this number, or for a
            ``timedelta`` after so long: for evaluations and engines, at another interval than checkpoints. Nothing is
            resumed from them.
        models: The run directory of these weights: its path, or a :class:`rankless.RunDirectory` with its own ``keep``
            and options. By default it is next to ``path``, with ``-models`` after its name.
        signals: The signals at which :meth:`step` saves and returns ``True`` on all ranks. Without any, no signal
            handler is installed.
        keep: The number of checkpoints to keep, or a retention policy, as in :meth:`rankless.RunDirectory.save`.
        async_save: Return from a save as soon as the training state may change again, and write in the background.
        process_group: The ranks that save and load together. By default the default process group, or this process
            alone if there is none; ``"self"`` is this process alone in any case. Without a process group a save is
            refused if ``torchrun`` has started several ranks.
        timeout: The number of seconds that ranks wait for each other before all of them fail.
        local: The local tier: a folder of each host, such as ``"/dev/shm/job"``, or a :class:`rankless.LocalTier`.
        replica_groups: The name of the job, if several process groups hold the same training state, such as torchft's
            replica groups, and any of them may save: their checkpoints are the work of one job, and the highest step is
            the latest. All groups pass the same name, and a later job another one, such as the id that its scheduler
            has given to it. Not with ``local``.
        on_failure: ``"warn"``: if storage fails in a save that :meth:`step` has begun, the training goes on with a
            warning, and the next save tries again. The last save of a ``with`` block raises its error in any case. With
            ``local``, :class:`rankless.LocalTier` has this argument.
        max_unsaved: With ``on_failure="warn"``: the failure is an error all the same if nothing was saved for longer.
        options: Options of each save that few need: see :class:`rankless.SaveOptions`. Its ``on_event`` is called with
            the events of loads, too.
        more: Fields of :class:`rankless.SaveOptions`; they have precedence over ``options``.

    Raises:
        InvalidArgumentError: An argument is invalid.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        dataloader: Any = None,
        stateful: Mapping[str, Any] | None = None,
        save_every: int | timedelta | Literal["auto"] | None = None,
        save_model_every: int | timedelta | None = None,
        models: RunDirectory | str | PathLike[str] | None = None,
        signals: Collection[int] = (signal.SIGTERM,),
        keep: Retention | int | None = None,
        async_save: bool = False,
        process_group: ProcessGroupArgument = None,
        timeout: float = 600.0,
        local: LocalTier | str | PathLike[str] | None = None,
        replica_groups: str | None = None,
        on_failure: Literal["raise", "warn"] = "raise",
        max_unsaved: timedelta | None = None,
        options: SaveOptions | None = None,
        **more: Unpack[SaveKeywords],
    ) -> None:
        self._save_model_every = save_model_every
        self._save_every, self._cadence = save_every, as_cadence(save_every, parse_location(path))
        self._tolerance = FailureTolerance.of(on_failure, max_unsaved, has_tier=local is not None)
        chosen = with_keywords(SaveOptions(), options, more, Checkpointer)
        open_directory = partial(
            RunDirectory, async_save=async_save, process_group=process_group, timeout=timeout, options=chosen
        )
        self._directory = open_directory(
            path,
            keep=keep,
            local=local,
            replica_groups=replica_groups,
            options=self._tolerance.listen_in(chosen),
        )
        self._models = plan_model_saves(save_model_every, models, model, self._directory, open_directory)
        self._components = {
            name: given
            for name, given in (
                ("model", model),
                ("optimizer", optimizer),
                ("scheduler", scheduler),
                ("dataloader", dataloader),
            )
            if given is not None
        }
        #: The report of the last :meth:`resume`; ``None`` if there was no checkpoint.
        self.restored: RestoreResult | None = None
        self._registered: dict[str, Any] = {}
        #: Tells whether the objects are still in the state of the last completed step.
        self._mark = StepMark(model, optimizer)
        for name, candidate in (stateful or {}).items():
            self.register(name, candidate)
        self._signals = (signals,) if isinstance(signals, int) else tuple(signals)
        self._process_group, self._timeout = process_group, timeout
        self._stop: Preemption | None = None
        self._has_begun = self._is_stopping = self._is_prepared = self._is_in_block = False
        #: The last completed step, and the last one that this object knows a checkpoint of.
        self._last, self._saved = 0, 0
        #: Whether anything was saved since the last :meth:`resume`.
        self._has_saved = False
        #: The save of the step :attr:`_saved`, if this process has made it.
        self._handle: SaveHandle[CheckpointInfo] | None = None
        #: The values of the last call of :meth:`step` to save with it.
        self._pending: dict[str, Any] = {}

    @property
    def path(self) -> Path:
        """The run directory."""
        return self._directory.path

    @property
    def last_step(self) -> int:
        """The last step that was passed to :meth:`step` or resumed from; 0 at the beginning."""
        return self._last

    def register(self, name: str, stateful_object: Any) -> None:
        """Add an object to the saved and resumed state: an average of weights, a loss scaler, anything with a state.

        After :meth:`resume` it is loaded at once if the checkpoint has its state: then all ranks must register it.

        Args:
            name: Its name in checkpoints.
            stateful_object: An object with ``state_dict`` and ``load_state_dict``.

        Raises:
            InvalidArgumentError: The name is taken or names a component, or the object has no state.
            StateError: The checkpoint that was resumed has its state, and something was saved without it meanwhile.
            Exception: The errors of :func:`rankless.restore`.
        """
        check_tag(name)
        if name in COMPONENTS:
            raise InvalidArgumentError(f"{name!r} is the name of a component: pass {name}= to Checkpointer")
        if name in self._registered:
            raise InvalidArgumentError(f"an object is already registered as {name!r}")
        checked = check_stateful_object(stateful_object, f"stateful object {name!r}")
        if self.restored is not None and f"stateful/{name}" in self.restored.not_requested:
            self._load_late(name, checked, self.restored)
        self._registered[name] = checked
        self._mark.add_optimizer(stateful_object)

    def _load_late(self, name: str, stateful_object: Any, restored: RestoreResult) -> None:
        """Load an object that is registered after the checkpoint was loaded, before the next save would replace it."""
        if self._has_saved:
            raise StateError(
                f"{restored.path} has the state of {name!r}, and this job has saved without it since: register it "
                f"before that, or load it by rankless.restore({str(self.path)!r}, {restored.tag!r}, "
                f"stateful={{{name!r}: ...}}) and register it under another name"
            )
        # Perhaps only some ranks had it, or another number of ranks: on the others it keeps its state, with a warning.
        missing_ok = {f"stateful/{name}"}
        self._directory.restore(restored.tag, stateful={name: stateful_object}, allow_missing=missing_ok)

    def _list_untaken(self) -> list[str]:
        """Return the names of states that the resumed checkpoint has, and that no object was registered for.

        For example, ``ema`` if ``stateful/ema`` was not requested.
        """
        names = () if self.restored is None else self.restored.not_requested
        objects = [name.removeprefix("stateful/") for name in names if name.startswith("stateful/")]
        return [name for name in objects if name not in self._registered]

    def _keep_untaken(self, tag: str) -> None:
        """Keep the resumed checkpoint, in addition to retention, while nothing else has the state of an object.

        Raises ``StateError`` if a save of its own step would replace it. A later step may, with a warning.
        """
        untaken, restored = self._list_untaken(), self.restored
        self._directory.kept_besides = KeepTags(restored.tag) if untaken and restored is not None else None
        if not untaken or restored is None or (restored.tag, restored.source) != (tag, "run directory"):
            return
        names = ", ".join(map(repr, untaken))
        if self._last == _step_of(restored):
            raise StateError(
                f"{restored.path} alone has the state of {names}, which would be lost: register the object, or save "
                "under another tag"
            )
        if not self._has_saved:
            warn_caller(f"{restored.path} is replaced, which alone has the state of {names}: nothing was registered")

    def resume(
        self,
        tag: TagArgument = None,
        *,
        new_ok: Collection[str] = (),
        init_from: str | PathLike[str] | None = None,
        options: LoadOptions | None = None,
        **more: Unpack[LoadKeywords],
    ) -> int:
        """Load the latest checkpoint, if there is one, into the objects of the training.

        :attr:`restored` then has the user content, and the report of the load.

        From now on this job is the one that continues the run: an older job that still saves into it gets
        ``SupersededError``. With a ``tag`` the run goes back: later checkpoints are abandoned. They stay, can be
        loaded, and lose their tags to the steps that are saved again: ``step_20`` becomes ``step_20@3``.

        Args:
            tag: The checkpoint to load, as in :func:`rankless.restore`; the latest by default. If the run went back
                to it already, the latest is loaded: a job that is started again with the same arguments goes on. Pass
                ``again=True`` to go back once more.
            new_ok: The names of registered objects, or of components such as ``"scheduler"``, that checkpoints may
                lack because they are new. They keep their state, with a warning.
            init_from: The beginning of a new run: the weights of a model in any format that :func:`rankless.load_model`
                reads, such as a checkpoint of another run or a folder of Hugging Face. It is loaded if the run
                directory has no checkpoint; a job that is started again goes on. Floating dtypes are cast; the other
                options of the load hold for it, too.
            options: Options that few need: see :class:`rankless.LoadOptions`.
            more: Fields of :class:`rankless.LoadOptions`, such as ``strict={"model": False}``; they have precedence.

        Returns:
            The last step that was completed, or 0 if the run directory has no checkpoint. The next step is one more.

        Raises:
            InvalidArgumentError: ``new_ok`` has an unknown name, or there is no model for ``init_from``.
            StateError: The checkpoint has no step.
            NoCheckpointError: None of the checkpoints can be read, or there is none with this tag; and all other errors
                of :func:`rankless.restore`. Outside of a ``with`` block signals have their earlier effect again then.
        """
        with collective_call(self._process_group, self._timeout):
            chosen = with_keywords(LoadOptions(), options, more, Checkpointer.resume)
            if init_from is not None and "model" not in self._components:
                raise InvalidArgumentError("init_from loads the weights of a model: pass model= to Checkpointer")
            missing = {*_as_names("allow_missing", chosen.allow_missing), *self._find_components(new_ok)}
            self._begin(resumes=True)
            try:
                restored = self._directory.restore(
                    tag,
                    **self._components,
                    stateful=self._registered or None,
                    options=replace(chosen, allow_missing=missing, resume=True, again=bool(chosen.again)),
                )
                step = _step_of(restored)
            except EmptyRunError as error:
                self._directory.warn_of_unread_tiers()
                level = logging.DEBUG if self._directory.rank else logging.INFO
                _log.log(level, "training begins at step 1: %s", error)
                restored, step = None, 0
            except BaseException:
                self._close_outside_block()
                raise
            try:
                if self._models is not None:
                    self._models.continue_from(step)
            except BaseException:
                self._close_outside_block()
                raise
            if restored is None:
                self._begin_with(init_from, replace(chosen, allow_missing=missing))
                return 0
            _log.log(logging.DEBUG if self._directory.rank else logging.INFO, "resumed %s", restored)
            self.restored = restored
            self._last = self._saved = step
            self._has_saved = False
            self._cadence.restart()
            self._tolerance.note_durable()
            self._handle = None
            self._pending = {}
            return step

    def _begin_with(self, path: str | PathLike[str] | None, options: LoadOptions) -> None:
        """Load the weights that a new run begins with, if a path was passed. All ranks must pass the same."""
        settings = {"init_from": "None" if path is None else str(path)}
        try:
            self._directory.compare_calls(CallDescription("Checkpointer.resume", settings), lambda: None)
            if path is not None:
                source = RunDirectory(path, process_group=self._process_group, timeout=self._timeout)
                only_weights = replace(options, rng=False, resume=False, again=None, cast_dtype=True)
                try:
                    restored = source.restore(model=self._components["model"], options=only_weights)
                except NoCheckpointError as error:
                    raise NoCheckpointError(f"init_from={str(path)!r}: {error}") from error
                level = logging.DEBUG if self._directory.rank else logging.INFO
                _log.log(level, "the weights are from %s", path)
                self._directory.history.edits = restored.edits
        except BaseException:
            self._close_outside_block()
            raise

    def _close_outside_block(self) -> None:
        """Restore the signal handlers after an error. In a block, its end does that."""
        if not self._is_in_block:
            self.close()

    def step(
        self,
        step: int,
        metrics: Mapping[str, Any] | None = None,
        *,
        user_content: Any = None,
        per_rank_content: Any = None,
    ) -> bool:
        """Note that a step is complete. Save it if it is due, or if a rank got a signal to stop.

        If an earlier save in the background has failed, a save that is due begins, and then its error is raised. After
        a signal :meth:`finalize` or the end of the block raises it.

        Args:
            step: The number of the step; it must increase from call to call.
            metrics: Numbers by name, or tensors of one element, which are read only if the step is saved.
            user_content: See :meth:`rankless.RunDirectory.save`; used if the step is saved. Of at most 1 MiB and 10,000
                values it is copied now; a larger one must not change until it is saved.
            per_rank_content: Like ``user_content``.

        Returns:
            Whether to leave the training loop: on all ranks at the same step, after a signal.

        Raises:
            InvalidArgumentError: ``step`` is no integer above the step of the call before, or a metric is no number.
            StateError: The run directory has checkpoints, and :meth:`resume` was not called.
            RankMismatchError: The ranks have different ``save_every`` or ``signals``.
            Exception: The errors of :meth:`rankless.RunDirectory.save` and of :meth:`rankless.Preemption.requested`.
        """
        self._begin(resumes=False)
        step = check_integer("step", step, smallest=0)
        if step <= self._last and (step or self._last or self._pending):
            raise InvalidArgumentError(
                f"step {step} comes after step {self._last}: steps must increase; the first one is resume() + 1"
            )
        metrics = {} if metrics is None else metrics
        check_metrics(metrics)
        self._last = step
        self._mark.set_mark()
        self._pending = {
            "metrics": copy_metrics(metrics),
            "user_content": copy_content(user_content),
            "per_rank_content": copy_content(per_rank_content),
        }
        if self._is_stopping:
            _log.warning("the job got a signal to stop before step %d: leave the loop if step() returns true", step)
        if self._models is not None:
            self._models.begin_step()
        stops_now = self._is_stop_requested()
        self._is_stopping = stops_now or self._is_stopping
        if stops_now:
            self._save(f"step_{step}", forced=True)
        elif self._cadence.is_due(step, self._directory.ask_rank_0):
            with self._tolerance.tolerating(f"step_{step}", self._directory.ask_rank_0):
                self.save()
            self._cadence.restart()  # also after a failure: a save by time is tried again after the interval
        elif not self._is_prepared:
            self._prepare_staging()
        if self._models is not None and (stops_now or not self._is_stopping):
            self._models.save_if_due(step, metrics, self._tolerance.tolerating)
        return self._is_stopping

    def _prepare_staging(self) -> None:
        """Let the memory of the first save be prepared, unless only adapters are saved, which need little."""
        self._is_prepared = True
        if not self._directory.options.adapter_only:
            model, optimizer = self._components.get("model"), self._components.get("optimizer")
            self._directory.prepare_staging(partial(estimate_staged_bytes, model, optimizer))

    def save(self, tag: str | None = None, *, overwrite: bool = False) -> SaveHandle[CheckpointInfo]:
        """Save now, with the step, the metrics and the content that were last passed to :meth:`step`.

        If an earlier save in the background has failed, this one begins, and then the error is raised.

        Args:
            tag: The name of the checkpoint; ``step_N`` by default.
            overwrite: Whether to replace a checkpoint of this name.

        Returns:
            The handle of the save, as of :meth:`rankless.RunDirectory.save`.

        Raises:
            TagExistsError: There is a checkpoint of this name; and all other errors of
                :meth:`rankless.RunDirectory.save`.
        """
        failures, began = DeferredErrors(), time.perf_counter()
        failures.run_until_success(self._directory.wait_for_turn)  # here, so that the handle of this save is known
        with failures.raised_after(f"the save of step {self._last} has begun all the same"):
            handle = self._save(f"step_{self._last}" if tag is None else tag, overwrite=overwrite)
            self._cadence.restart(time.perf_counter() - began)
        return handle

    def _save(self, tag: str, *, overwrite: bool = False, forced: bool = False) -> SaveHandle[CheckpointInfo]:
        pending = dict(self._pending)
        self._keep_untaken(tag)
        handle = self._directory.save(
            tag,
            **self._components,
            stateful=self._registered or None,
            step=self._last,
            overwrite=overwrite,
            forced=forced,
            **pending,
        )
        self._has_saved = True
        if tag == f"step_{self._last}":
            self._saved, self._handle = self._last, handle
        return handle

    def list(self) -> list[CheckpointInfo]:
        """Return the checkpoints in the run directory, oldest first. See :func:`rankless.list_checkpoints`."""
        return self._directory.list()

    def finalize(self) -> None:
        """Wait for the background saves. See :func:`rankless.finalize`."""
        self._directory.finalize()
        if self._models is not None:
            self._models.wait()

    def close(self) -> None:
        """Restore the previous signal handlers. The end of a ``with`` block does it."""
        if self._stop is not None:
            self._stop.close()
            self._stop = None

    def __repr__(self) -> str:
        names = ", ".join([*self._components, *self._registered]) or "nothing"
        return f"<Checkpointer of {names} in {str(self.path)!r}, step {self._last}>"

    def __enter__(self) -> Self:
        self._is_in_block = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failures = DeferredErrors()
        try:
            if error is None or _LOOP_HAS_ENDED in getattr(error, "__notes__", ()):
                self._end_block(failures)
            else:
                failures.run_until_success(self._directory.wait)
            if self._models is not None:
                failures.run_until_success(self._models.end)
            if error is None:
                failures.raise_first(_LOOP_HAS_ENDED)
            else:
                failures.note_in(error)
        finally:
            self._is_in_block = False
            self.close()

    def _end_block(self, failures: DeferredErrors) -> None:
        """Save the last step, whichever save fails or has failed. Collect the errors."""
        failures.run(self._directory.wait)  # so that it is known whether the last save has failed
        failures.run(self._save_last_step)
        failures.run_until_success(self._directory.wait)
        is_drained = not failures.is_rank_missing and failures.run(self._drain)
        if is_drained and self._last == self._saved and not self._has_last_failed():
            failures.add_note(f"step {self._last} is saved all the same")
            self._tolerance.warn_instead(failures)

    def _drain(self) -> None:
        """Drain the newest checkpoint. If the tier has lost it, the step is saved again: its state is still here."""
        try:
            self._directory.drain()
        except (CorruptCheckpointError, StorageError) as error:
            if self._directory.has_undrained or self._last != self._saved or self._mark.has_changed():
                raise
            warn_caller(f"step_{self._last} is saved again, because the local tier has lost it: {error}")
            self._save(f"step_{self._last}", forced=True)
            self._directory.wait()

    def _save_last_step(self) -> None:
        """Save the last completed step if that was not done, and if the objects are still in its state."""
        if self._last <= self._saved and not self._has_last_failed():
            return
        if self._mark.has_changed():
            warn_caller(
                f"step {self._last} is not saved at the end of the block, because the model or an optimizer has "
                "changed since: leave the loop right after step()"
            )
        else:
            self._save(f"step_{self._last}", forced=True)

    def _has_last_failed(self) -> bool:
        return self._handle is not None and self._handle.has_failed()

    def _begin(self, *, resumes: bool) -> None:
        """Compare the settings of all ranks in the first call, and watch for signals from then on."""
        if not self._has_begun:
            settings = {
                "save_every": repr(self._save_every),
                "save_model_every": repr(self._save_model_every),
                "replica_groups": repr(self._directory.history.groups),
                "signals": repr(sorted(self._signals)),
                **self._tolerance.describe(),
            }
            check = partial(_check_resumable if resumes else _check_new, self.path)
            self._directory.compare_calls(CallDescription("Checkpointer", settings), check)
            if self._models is not None and not resumes:
                self._directory.compare_calls(CallDescription("Checkpointer", settings), self._models.check_new)
            if not resumes and self._directory.is_ahead_of_run():
                raise StateError(
                    f"the local tier has a checkpoint of {self.path}: call resume() before step(), or pass another "
                    "run directory and another folder"
                )
            self._has_begun = True
        if self._signals and self._stop is None:
            self._watch_signals()

    def _watch_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise InvalidArgumentError("a Checkpointer handles signals only in the main thread: pass signals=()")
        self._stop = preemption(*self._signals, process_group=self._process_group, timeout=self._timeout)
        weakref.finalize(self, self._stop.close).atexit = False

    def _is_stop_requested(self) -> bool:
        return self._stop is not None and not self._is_stopping and self._stop.requested()

    def _find_components(self, new_ok: Collection[str]) -> Iterable[str]:
        """Yield the components that ``new_ok`` names. Raises ``InvalidArgumentError``."""
        for name in _as_names("new_ok", new_ok):
            if name in self._registered:
                yield f"stateful/{name}"
            elif name.partition("/")[0] in self._components:
                yield name
            else:
                known = ", ".join([*self._registered, *self._component_names()]) or "nothing"
                raise InvalidArgumentError(f"new_ok has {name!r}, but this Checkpointer saves {known}")

    def _component_names(self) -> Iterable[str]:
        """Yield the names of the components; of several models or optimizers each.

        For example, ``model/gen`` and ``model/disc`` for a dict of two models.
        """
        for slot, given in self._components.items():
            if isinstance(given, Mapping) and slot in {"model", "optimizer", "scheduler"}:
                yield from (f"{slot}/{name}" for name in given)
            else:
                yield slot


def _as_names(argument: str, names: Collection[str]) -> Collection[str]:
    """Return the names that an argument has. Raises ``InvalidArgumentError`` if they are neither a list nor a text."""
    if not isinstance(names, Collection):
        raise InvalidArgumentError(f"{argument} must be a list of names, such as ['scheduler']; got {names!r:.80}")
    return {names} if isinstance(names, str) else names


def _check_resumable(path: Path) -> None:
    if is_native(path):
        raise InvalidArgumentError(f"{path} is a checkpoint itself: pass the run directory that it is in")


def _check_new(path: Path) -> None:
    """Raise ``StateError`` if a training begins where another one has saved."""
    _check_resumable(path)
    complete = [info for info in list_checkpoints_strictly(path) if info.status == "complete"]
    if complete:
        raise StateError(
            f"{path} has checkpoints, the latest is {complete[-1].tag!r}: call resume() before step(), or pass another "
            "run directory"
        )


def _step_of(restored: RestoreResult) -> int:
    step = restored.step
    if step is None or step != int(step):
        raise StateError(
            f"the checkpoint {restored.tag!r} has {'no step' if step is None else f'the step {step}'}, so it is not "
            "known where to resume. To begin a new run with its weights, call resume(init_from=...) with another run "
            "directory; to go on from it, load it with restore(), or convert it with a step (rankless convert --step)"
        )
    return int(step)
