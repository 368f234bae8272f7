"""The saves of weights alone that a ``Checkpointer`` makes besides its checkpoints, in a run directory of their own.

The weights have a history of their own: a job that goes on from step 500 continues the newest weights of step 500 or
before, and abandons later ones, as the training does. Evaluations, followers and engines read this run directory.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec

from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.errors import InvalidArgumentError
from rankless.observe.warning import warn_caller
from rankless.run.catalog import claim_incarnation, list_checkpoints_strictly
from rankless.run.claims import LoadedBase, read_history
from rankless.run.scan import CheckpointInfo
from rankless.run_directory import RunDirectory
from rankless.save.cadence import Ask, Cadence, as_cadence

#: What is added to the path of a run directory for that of its weights.
_SUFFIX = "-models"

#: Runs a save of a tag, and decides what becomes of its error.
Tolerating = Callable[[str, Ask], AbstractContextManager[None]]


class ModelSaves:
    """Saves a model at a cadence of its own. All ranks make the same calls."""

    def __init__(self, directory: RunDirectory, cadence: Cadence, model: Any) -> None:
        self._directory, self._cadence, self._model = directory, cadence, model

    def continue_from(self, step: int) -> None:
        """Continue the newest weights of a step, or before it, after the training was resumed from there."""
        raw = self._directory.ask_rank_0(partial(_find_base, self._directory.path, step))
        if raw:
            base = msgspec.msgpack.decode(raw, type=LoadedBase)
            self._directory.history.note_loaded(base, resumes=True)
            if self._directory.rank == COORDINATOR_RANK:
                claim_incarnation(self._directory.path, self._directory.history)
        self._cadence.restart()

    def save_if_due(self, step: int, metrics: Mapping[str, Any], tolerating: Tolerating) -> None:
        """Save the model if that is due after a step. A later training of the same step replaces what it saved."""
        directory = self._directory
        if not self._cadence.is_due(step, directory.ask_rank_0):
            return
        began, tag = time.perf_counter(), f"step_{step}"
        with tolerating(f"{directory.path / tag}", directory.ask_rank_0):
            directory.save(tag, self._model, step=step, metrics=metrics, overwrite=True, rng=False)
        self._cadence.restart(time.perf_counter() - began)

    def wait(self) -> None:
        """Wait for the saves in the background. Raises the error of one that has failed."""
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
        models = main.path.with_name(main.path.name + _SUFFIX)
    directory = models if isinstance(models, RunDirectory) else open_directory(models)
    if directory.path == main.path:
        raise InvalidArgumentError(f"models must be another run directory than {main.path}")
    return ModelSaves(directory, as_cadence(every, directory.path), model)


def _find_base(path: Path, step: int) -> bytes:
    """Return what the saves continue after a step, on rank 0; nothing if there is no such checkpoint."""
    infos = [info for info in list_checkpoints_strictly(path) if info.status == "complete" and info.is_current]
    before = [info for info in infos if info.step is not None and info.step <= step]
    if not before:
        if infos:
            warn_caller(
                f"{path} has weights of later steps only, up to {infos[-1].tag!r}, than step {step}, from which the "
                "training goes on: they are replaced when their steps are saved again"
            )
        return b""
    return msgspec.msgpack.encode(_as_base(path, before[-1], infos))


def _as_base(path: Path, info: CheckpointInfo, current: list[CheckpointInfo]) -> LoadedBase:
    """Return a checkpoint as what a job has loaded: by its name, if later ones are to be abandoned."""
    newest = max(one.sequence for one in current if one.run == info.run)
    branch = read_history(path).runs.get(info.run)
    seen = 0 if branch is None else branch.incarnation
    is_latest = newest == info.sequence
    return LoadedBase.of(info, info.tag, newest if is_latest else None, secrets.token_hex(8), seen)
