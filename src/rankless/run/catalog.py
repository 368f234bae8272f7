"""The catalog of a run directory: its checkpoints, the latest one, and the identity of the next one.

A save calls :func:`next_identity` on rank 0, in its decision in the vote that opens the output; a load that resumes
calls :func:`claim_incarnation` on rank 0 after its last vote, where no error may be raised. Lists are called by anyone:
the public functions, commands, and rank 0 of loads.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from rankless.errors import NoCheckpointError, RanklessError, StateError
from rankless.formats.native import is_native
from rankless.observe.units import format_count
from rankless.observe.warning import warn_caller
from rankless.ondisk.data_files import WEIGHT_VERSIONS
from rankless.ondisk.manifest import LARGEST, EditRecord
from rankless.run.checkpoint_info import CheckpointInfo, RunScan, is_rankless_checkpoint
from rankless.run.claims import JobHistory, check_not_superseded, claim, is_of_earlier_job, warn_of_lost_history
from rankless.run.run_store import StaleDirectory, run_store_of
from rankless.storage.store import store_of

#: The most checkpoints that an error names.
_SHOWN_TAGS = 5


class CheckpointList(list[CheckpointInfo]):
    """A list of checkpoints that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        from rankless.run.checkpoints_html import describe_checkpoints  # noqa: PLC0415 - for notebooks

        return describe_checkpoints(self)


def list_checkpoints(path: Path) -> list[CheckpointInfo]:
    """Return the checkpoints in a run directory, oldest first. Unreadable ones come before all others.

    The objects are copies that the caller may change.
    """
    return CheckpointList(replace(info, metrics=dict(info.metrics)) for info in cached_checkpoints(path))


def cached_checkpoints(path: Path) -> list[CheckpointInfo]:
    """Return the checkpoints like :func:`list_checkpoints`, but as cached objects, which must not be changed."""
    return run_store_of(path).look(is_strict=False).checkpoints


def list_checkpoints_strictly(path: Path) -> list[CheckpointInfo]:
    """Return the checkpoints like :func:`cached_checkpoints`, but raise ``StorageError`` if one cannot be read.

    The latest checkpoint is unknown then.
    """
    return run_store_of(path).look(is_strict=True).checkpoints


def is_run_directory(path: Path) -> bool:
    """Return whether a directory contains rankless checkpoints. If so, it is a run directory."""
    return any(map(is_rankless_checkpoint, cached_checkpoints(path)))


def find_checkpoint(path: Path, tag: str) -> Path:
    """Return the directory of the rankless checkpoint ``tag`` in a run.

    Raises ``NoCheckpointError``, which names the existing tags, if there is none.

    A load calls it on rank 0, in the vote "finding the checkpoint to load".
    """
    if (folder := run_store_of(path).find_named(tag)) is not None:
        return folder
    if is_native(path / tag):
        return path / tag
    infos = cached_checkpoints(path)
    if matches := [info.path for info in infos if info.tag == tag]:
        return matches[-1]
    if not infos and is_native(path):
        raise NoCheckpointError(
            f"{path} is a checkpoint itself, and has no {tag!r}: leave out the tag, or pass its run"
        )
    raise NoCheckpointError(f"there is no checkpoint {tag!r} in {path}; {describe_tags(infos)}")


def describe_tags(infos: Sequence[CheckpointInfo]) -> str:
    """Say which checkpoints there are: the latest ones by name, earlier and abandoned ones by number."""
    if not infos:
        return "there is none at all"
    current = [info.tag for info in infos if info.is_current]
    shown, earlier, abandoned = current[-_SHOWN_TAGS:], len(current) - _SHOWN_TAGS, len(infos) - len(current)
    more = [format_count(earlier, "earlier one")] if earlier > 0 else []
    more += [f"{abandoned:,} abandoned"] if abandoned else []
    return f"there {'is' if len(infos) == 1 else 'are'} {', '.join([*shown, *more])}"


class CheckpointIdentity(msgspec.Struct, frozen=True):
    """The identity of a checkpoint: its sequence number, the ids of its run and its own, and its incarnation.

    ``edits`` are the edits that its training began with.
    """

    sequence: int
    run: str
    id: str
    incarnation: int = 0
    edits: tuple[EditRecord, ...] = ()


def next_identity(path: Path, job: JobHistory, step: float | None) -> CheckpointIdentity:
    """Return the identity of the next checkpoint that a job saves into a run directory, on rank 0.

    Before its first one, the job claims an incarnation. Raises ``SupersededError`` or ``StateError`` if another job has
    continued the run, ``InvalidArgumentError`` if the directory has published weights instead of checkpoints, and
    ``StorageError`` if the existing checkpoints cannot be read.
    """
    scan = _look_at_run(path)
    history, found = scan.history, scan.checkpoints
    check_not_superseded(path, history, job)
    claimed = job.claim
    if claimed is None:
        if not found and store_of(path).is_directory(path / WEIGHT_VERSIONS):
            from rankless.formats.weights.version_files import check_no_versions  # noqa: PLC0415 - rarely needed

            check_no_versions(path)
        claimed, history = claim(path, job, found, seen=(history, scan.highest_entry))
        if job.groups and job.base is None and step is not None and is_of_earlier_job(path, claimed, job):
            _check_not_behind(path, job, [info for info in found if info.run == claimed.run], step)
    elif claimed.run not in history.runs and history.number < claimed.incarnation:
        warn_of_lost_history(path, claimed)
    sequence = max(history.next_sequence(found, claimed.run), job.sequence + 1, job.numbering.highest + 1)
    if job.groups and step is not None and math.isfinite(step) and claimed.run in history.runs:
        # Several groups may save at a time, and none sees the saves that another one has begun: their steps order their
        # checkpoints.
        sequence = history.runs[claimed.run].sequence + max(0, int(step))
    return CheckpointIdentity(min(sequence, LARGEST), claimed.run, secrets.token_hex(8), claimed.incarnation, job.edits)


def _check_not_behind(path: Path, job: JobHistory, saved: Sequence[CheckpointInfo], step: float) -> None:
    """Raise ``StateError`` if a replica group that has loaded nothing begins at a step before the others' checkpoints.

    Its training has begun anew, under the name of an earlier job.
    """
    steps = [info.step for info in saved if info.step is not None]
    if step < max(steps, default=step):
        raise StateError(
            f"the replica groups {job.groups!r} have saved step {max(steps)} in {path}, and this group has loaded "
            f"nothing, and saves step {step}: load the latest checkpoint, or give the groups of a new job another name"
        )


def claim_incarnation(path: Path, job: JobHistory, *, warns: bool = True) -> None:
    """Claim an incarnation for a job that has just loaded the checkpoint that it continues, on rank 0.

    So an older job that is still alive learns it before the first save. If the claim fails, that save tries again.
    ``warns``: warn of the checkpoints that are abandoned.
    """
    if job.claim is None:
        try:
            scan = _look_at_run(path)
            job.claim, _ = claim(path, job, scan.checkpoints, seen=(scan.history, scan.highest_entry), warns=warns)
        except StateError:  # another job has continued the run meanwhile: the first save raises it, on all ranks
            return
        except RanklessError as error:  # the load has succeeded on all ranks: this one must not fail alone
            warn_caller(f"{path} cannot be written now, so other jobs do not know that this one continues: {error}")


def _look_at_run(path: Path) -> RunScan:
    """Return the checkpoints of a run directory that can be read, oldest first, and its history, on rank 0.

    In an object store, checkpoints that no pointer names get theirs now: see :func:`name_checkpoints`. Raises
    ``StorageError`` if a checkpoint cannot be read now.
    """
    scan = run_store_of(path).look(is_strict=True)
    if scan.unnamed:
        from rankless.run.unnamed_checkpoints import name_checkpoints  # noqa: PLC0415 - few runs were copied so

        name_checkpoints(path, scan.unnamed)
    complete = [info for info in scan.checkpoints if info.status == "complete"]
    return msgspec.structs.replace(scan, checkpoints=complete)


def independent_identity(path: Path) -> CheckpointIdentity:
    """Return the identity of a checkpoint that continues nothing, and that no job continues: of a conversion.

    A conversion calls it on rank 0 in its commit.
    """
    scan = _look_at_run(path)
    return CheckpointIdentity(scan.history.next_sequence(scan.checkpoints), secrets.token_hex(8), secrets.token_hex(8))


def list_stale_directories(run: Path) -> list[StaleDirectory]:
    """Return the hidden directories of saves and removals in a run, except those that still are its checkpoints."""
    return run_store_of(run).list_stale()
