"""The saves of weights alone that a ``Checkpointer`` makes besides its checkpoints, in a run directory of their own.

The weights have a history of their own: a job that goes on from step 500 continues the newest weights of step 500 or
before, and abandons later ones, as the training does. Evaluations, followers and engines read this run directory.

:class:`rankless.Checkpointer` has one on every rank, and calls it in the thread of the training. Which weights are
continued is decided on rank 0, in a vote, so that all ranks continue the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec

from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.errors import InvalidArgumentError, StateError
from rankless.run.catalog import claim_incarnation
from rankless.run.claims import LoadedBase, check_not_superseded
from rankless.run.model_origins import SUFFIX, TrainingLine, describe_origin, find_base, list_current, place_of
from rankless.run.stored_history import read_history
from rankless.run_directory import RunDirectory
from rankless.save.cadence import Ask, Cadence, as_cadence
from rankless.storage.store import store_of

#: Runs a save of a tag, and raises its error or warns of it.
Tolerating = Callable[[str, Ask], AbstractContextManager[None]]


class ModelSaves:
    """Saves a model at a cadence of its own. All ranks make the same calls."""

    def __init__(self, directory: RunDirectory, main: RunDirectory, cadence: Cadence, model: Any) -> None:
        self._directory, self._main, self._cadence, self._model = directory, main, cadence, model
        self._place = place_of(main.path, directory.path)
        self._origin: Mapping[str, Any] = {}
        #: The error of the newest save, if its call has failed.
        self._failure: Exception | None = None

    def check_new(self) -> None:
        """Raise ``StateError``, on rank 0 in a vote of the caller, if a training begins where another one has saved."""
        path = self._directory.path
        if infos := list_current(path):
            raise StateError(
                f"{path} has weights, the latest are {infos[-1].tag!r}: call resume() before step(), or pass another "
                "run directory as models="
            )

    def continue_from(self, step: int) -> None:
        """Continue the newest weights of a step, or before it, after the training was resumed from there.

        Later ones are abandoned, and weights that the training has left by going back. So they are if there are no
        earlier ones. Raises ``StateError`` if the weights are of another training, ``SupersededError`` if another job
        has continued this one meanwhile.

        :meth:`rankless.Checkpointer.resume` calls it on every rank.
        """
        history, main = self._directory.history, self._main

        def claim() -> bytes:
            # Of two jobs that start at a time, the one that has claimed the training last has its weights, too.
            check_not_superseded(main.path, read_history(main.path), main.history)
            base = find_base(self._directory.path, self._place, TrainingLine.of(main.path, main.history, step))
            if base is None:
                return b""
            history.note_loaded(base, resumes=True)
            claim_incarnation(self._directory.path, history, warns=False)
            return msgspec.msgpack.encode(base)

        raw = self._directory.ask_rank_0(claim, "continuing the saved weights")
        if raw and self._directory.rank != COORDINATOR_RANK:
            history.note_loaded(msgspec.msgpack.decode(raw, type=LoadedBase), resumes=True)
        self._cadence.restart()

    def begin_step(self) -> None:
        """Note the last checkpoint before a step. :meth:`rankless.Checkpointer.step` calls it before it saves one."""
        self._origin = describe_origin(self._place, self._main.history)

    def save_if_due(self, step: int, metrics: Mapping[str, Any], tolerating: Tolerating) -> None:
        """Save the model if that is due after a step.

        :meth:`rankless.Checkpointer.step` calls it on every rank.
        """
        directory = self._directory
        if not self._cadence.is_due(step, directory.ask_rank_0):
            return
        began, tag = time.perf_counter(), f"step_{step}"
        # Only rank 0 knows the incarnation. Values that ranks have differently would be stored for each.
        origin = self._origin if directory.rank == COORDINATOR_RANK else None
        with tolerating(f"{directory.path / tag}", directory.ask_rank_0):
            self._failure = None
            try:
                directory.save(tag, self._model, step=step, metrics=metrics, rng=False, user_content=origin)
            except Exception as error:
                self._failure = error
                raise
        self._cadence.restart(time.perf_counter() - began)

    def wait(self) -> None:
        """Wait for the saves in the background. Raises the error of one that has failed.

        :meth:`rankless.Checkpointer.finalize` calls it on every rank.
        """
        self._directory.wait()

    def end(self) -> None:
        """Wait for the saves, and raise the error of the newest one, also if it was a warning: no later one follows.

        :class:`rankless.Checkpointer` calls it at the end of its block, on every rank, until it raises nothing.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        self._directory.wait()


def plan_model_saves(
    every: int | timedelta | None,
    models: RunDirectory | str | PathLike[str] | None,
    model: Any,
    main: RunDirectory,
    open_directory: Callable[[Path | str | PathLike[str]], RunDirectory],
) -> ModelSaves | None:
    """Return the saves of weights for the arguments of a ``Checkpointer``; ``None`` if it makes none.

    ``open_directory`` makes a run directory with the settings of ``main``. Raises ``InvalidArgumentError``.
    """
    if every is None:
        if models is not None:
            raise InvalidArgumentError("models needs save_model_every: how often the weights are saved")
        return None
    if model is None:
        raise InvalidArgumentError("save_model_every saves a model: pass model= as well")
    if main.history.groups:
        raise InvalidArgumentError("save_model_every is not for replica_groups: several groups would save the weights")
    if every == "auto":
        raise InvalidArgumentError("save_model_every must be a number of steps or a timedelta; got 'auto'")
    if models is None:
        if store_of(main.path).is_bucket(main.path):
            raise InvalidArgumentError(
                f"{main.path} is a whole bucket: pass the run directory of the weights as models="
            )
        models = main.path.with_name(main.path.name + SUFFIX)
    directory = models if isinstance(models, RunDirectory) else open_directory(models)
    if directory.path.resolve() == main.path.resolve():
        raise InvalidArgumentError(f"models must be another run directory than {main.path}")
    return ModelSaves(directory, main, as_cadence(every, directory.path), model)
