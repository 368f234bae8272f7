"""The training that saved weights belong to, and the weights that a resumed training continues.

Each save of weights alone (:mod:`rankless.model_saves`) has its origin in its user content: where the run directory of
the training is, seen from the weights, and the incarnation of the training that saved them. So weights of another
training are recognised, and weights of a branch that the training has left.

Rank 0 asks it, in the vote "continuing the saved weights". The keys of an origin are on disks: they keep their names.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rankless.errors import CorruptCheckpointError, StateError
from rankless.formats.native import STATE, NativeReader
from rankless.observe.warning import warn_caller
from rankless.process.prepared_types import prepared
from rankless.run.catalog import list_checkpoints_strictly
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.claims import JobHistory, LoadedBase
from rankless.run.stored_history import find_entry, read_history

#: The suffix that is added to the path of a run directory for its weights: for example, ``runs/a-models``.
SUFFIX = "-models"

#: The key of the origin in the user content.
_TRAINING = "training"


@prepared
class Origin(msgspec.Struct, frozen=True):
    """The origin of saved weights.

    ``run_directory`` is the run directory of the training, seen from the weights. ``incarnation`` is the training's
    incarnation that saved them; 0 if it had not claimed one yet. ``job`` is the token of its job. ``after_incarnation``
    and ``after_sequence`` name the last checkpoint of the training before them.
    """

    run_directory: str
    incarnation: int = 0
    job: str = ""
    after_incarnation: int = 0
    after_sequence: int = 0


def place_of(run: Path, weights: Path) -> str:
    """Return where a run directory is, seen from the run directory of its weights: both may be moved together.

    For example, ``../a`` for ``runs/a`` and ``runs/a-models``.
    """
    ours, theirs = (str(path.resolve()).split("/") for path in (run, weights))
    common = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))])
    return "/".join([*[".."] * (len(theirs) - common), *ours[common:]]) if common else str(run)


def describe_origin(place: str, training: JobHistory) -> dict[str, Any]:
    """Return the user content of weights that are saved after the next step.

    Rank 0 alone passes it: only rank 0 knows the incarnation.
    """
    incarnation = training.claim.incarnation if training.claim else 0
    return {_TRAINING: msgspec.to_builtins(Origin(place, incarnation, training.token, *training.point))}


class TrainingLine(msgspec.Struct, frozen=True):
    """The line of a training up to its present ``step``: its incarnations, each with the last sequence number in it.

    ``line`` is ``None`` if nothing is known of its run: then every incarnation counts. ``first_job`` is the token of
    the job that began the run, if it is known.
    """

    step: float
    line: Mapping[int, float] | None = None
    first_job: str = ""

    @classmethod
    def of(cls, run: Path, training: JobHistory, step: float) -> TrainingLine:
        """Return the line of a training that was just resumed from a step, or begins at step 0."""
        loaded = training.base or training.claim
        branch = read_history(run).runs.get(loaded.run) if step and loaded is not None else None
        if branch is None:
            return cls(step)
        line = {**dict(branch.line), branch.incarnation: math.inf}
        first = find_entry(run, min(line))
        return cls(step, line, "" if first is None else first.job.token)

    def has(self, step: float, origin: Origin) -> bool:
        """Return whether the training has come by weights of a step.

        It has left an incarnation at the last checkpoint in its line: that has saved weights after it for nothing.
        """
        if step > self.step:
            return False
        if self.line is None:
            return True
        if not origin.incarnation:  # before the first checkpoint of its job, which may have saved none
            return bool(origin.after_incarnation) or origin.job == self.first_job or not self.first_job
        last = self.line.get(origin.incarnation)
        return last is not None and (origin.after_incarnation != origin.incarnation or origin.after_sequence < last)


def list_current(path: Path) -> list[CheckpointInfo]:
    """Return the complete checkpoints of a run directory that are not abandoned, oldest first."""
    return [info for info in list_checkpoints_strictly(path) if info.status == "complete" and info.is_current]


def find_base(path: Path, place: str, line: TrainingLine) -> LoadedBase | None:
    """Return the weights that the saves of a training at ``place`` continue; ``None`` if there are no weights.

    They are the newest that the training has come by, also if they are abandoned: a rollback may lead to a checkpoint
    that the training had left. If it has come by none, all are abandoned. Weights whose values are corrupt are passed
    over, with a warning: no training resumes from them. Raises ``StateError`` if the run directory is not one of
    weights of this training alone.
    """
    infos = [info for info in list_checkpoints_strictly(path) if info.status == "complete"]
    if not infos:
        return None
    base, token = _find_newest(infos, place, line), secrets.token_hex(8)
    if base is None:
        if not line.step and infos[-1].is_current:
            warn_caller(
                f"the training begins anew, and {path} has weights of an earlier one, the latest are "
                f"{infos[-1].tag!r}: they are abandoned"
            )
        return LoadedBase(id="", run=infos[-1].run, incarnation=0, sequence=0, tag="", newest=None, token=token)
    newest = max((one.sequence for one in infos if one.run == base.run and one.is_current), default=0)
    branch = read_history(path).runs.get(base.run)
    seen = 0 if branch is None else branch.incarnation
    # By its name, as it were, if later ones are to be abandoned.
    is_latest = base.is_current and newest == base.sequence
    return LoadedBase.of(base, base.tag, newest if is_latest else None, token, seen)


def _find_newest(infos: Sequence[CheckpointInfo], place: str, line: TrainingLine) -> CheckpointInfo | None:
    """Return the newest weights that the training at ``place`` has come by.

    The newest that can be read are checked in any case: weights of another training must not be abandoned.
    """
    is_checked = False
    for info in sorted(infos, key=lambda info: (info.step or 0, info.sequence), reverse=True):
        is_past = info.step is not None and info.step <= line.step
        if is_checked and not is_past:
            continue
        origin = _read_origin(info)
        if origin is None:
            continue
        _check_owner(info, origin, place)
        is_checked = True
        if info.step is not None and line.has(info.step, origin):
            return info
    if not is_checked and not _is_default(infos[-1].path.parent, place):
        raise StateError(
            f"none of the weights in {infos[-1].path.parent} can be read, so it is not known whose they are: move them "
            "elsewhere, or pass another run directory as models="
        )
    return None


def _read_origin(info: CheckpointInfo) -> Origin | None:
    """Return the origin of weights, an empty one if they have none; ``None``, with a warning, if they are corrupt.

    Raises ``StateError`` if they are a checkpoint with an optimizer.
    """
    try:
        state = msgspec.json.decode(NativeReader(info.path).read_small_file(STATE), type=dict[str, Any])
        content = state.get("user_content")
        known = content.get(_TRAINING) if isinstance(content, dict) else None
        origin = Origin("") if known is None else msgspec.convert(known, Origin)
    except (CorruptCheckpointError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        warn_caller(f"the weights {info.path} are corrupt, and passed over: {error}")
        return None
    if "optimizer" in state:
        raise StateError(
            f"{info.path.parent} is a run directory of checkpoints: {info.tag!r} has an optimizer, and not only "
            "weights. Pass another one as models="
        )
    return origin


def _check_owner(info: CheckpointInfo, origin: Origin, place: str) -> None:
    """Raise ``StateError`` if weights are not of the training at ``place``."""
    where = info.path.parent
    if origin.run_directory == place or (not origin.run_directory and _is_default(where, place)):
        return
    owner = f"the training in {origin.run_directory}, seen from there" if origin.run_directory else "something else"
    raise StateError(
        f"the weights {info.tag!r} in {where} are of {owner}, and this training is in {place}. Pass another run "
        "directory as models=, or move these weights elsewhere"
    )


def _is_default(where: Path, place: str) -> bool:
    """Return whether weights are in the default place of a training, which belongs to it: also without an origin."""
    return where.name.endswith(SUFFIX) and place == f"../{where.name.removesuffix(SUFFIX)}"
