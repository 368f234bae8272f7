"""The folder of a run of torchtitan: the contents of folders ``step-N``, starts of runs, replaced folders.

torchtitan's own manager saves under the same names, so there may be checkpoints of both, and exports of the weights.

:class:`~rankless.torchtitan.manager.CheckpointManager` asks it on rank 0, in votes, so that all ranks start with the
same checkpoint. A folder that is not proved to be replaceable stays.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rankless.dcp.reader.dcp_directory import is_dcp
from rankless.errors import CorruptCheckpointError, NoCheckpointError, TagExistsError
from rankless.process.prepared_types import prepared
from rankless.run.catalog import list_checkpoints_strictly
from rankless.run.checkpoint_info import CheckpointInfo, is_rankless_checkpoint
from rankless.run.interrupted_copy import is_interrupted_copy
from rankless.run.ownership import EXPORT, replaced_by_export
from rankless.run.pending_dir import PendingDirectory
from rankless.storage.directory_trees import remove_directory
from rankless.storage.store import store_of

#: torchtitan's name of a checkpoint, and its parts.
_TAG, _STEP = "step-{}", re.compile(r"step-(0|[1-9]\d*)")

#: The most names in a message.
_SHOWN = 5


@prepared
class StartPoint(msgspec.Struct, frozen=True):
    """The checkpoint of the run folder that a run starts with.

    ``tag`` is ``None`` if it is the newest one of rankless: then a load may fall back to an intact one. ``is_dcp``: it
    is one of torchtitan's own manager.
    """

    step: int
    tag: str | None
    is_dcp: bool = False


def tag_of(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return _TAG.format(step)


def _step_of(name: str) -> int:
    """Return the step of a name, such as 10 of ``step-10``; -1 if no checkpoint of torchtitan has such a name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else -1


@dataclass(frozen=True)
class RunFolder:
    """The contents of a run folder.

    ``infos`` are rankless's checkpoints, oldest first. All others are known by their steps: ``dcp`` are checkpoints of
    torchtitan, ``exports`` are weights that rankless has exported, ``others`` is anything else with such a name, but
    for interrupted copies, which a save hides.
    """

    path: Path
    infos: Sequence[CheckpointInfo]
    dcp: frozenset[int]
    exports: frozenset[int]
    others: frozenset[int]

    @classmethod
    def scan(cls, path: Path) -> RunFolder:
        """List a folder. Raises ``StorageError`` if that is not possible."""
        infos = [info for info in list_checkpoints_strictly(path) if is_rankless_checkpoint(info)]
        store = store_of(path)
        steps = {step for name in store.list_names(path) if (step := _step_of(name)) >= 0}
        steps -= {_step_of(info.tag) for info in infos}
        dcp = {step for step in steps if is_dcp(path / tag_of(step))}
        replaceable = {step for step in steps - dcp if is_replaceable(path / tag_of(step))}
        exports = {step for step in replaceable if store.list_names(path / tag_of(step))}
        hidden = {step for step in steps - dcp - replaceable if is_interrupted_copy(path / tag_of(step))}
        return cls(path, infos, frozenset(dcp), frozenset(exports), frozenset(steps - dcp - replaceable - hidden))

    def find_start(self, step: int) -> StartPoint | None:
        """Return the checkpoint of a step, or of the highest step if it is -1; ``None`` if there is none at all.

        A checkpoint that a run has abandoned when it went back to an older one is only loaded by its step.

        Raises ``NoCheckpointError`` if there is none of this step or if there are only exports, and
        ``CorruptCheckpointError`` if a checkpoint of a higher step is corrupt and no fallback is possible.
        """
        if step != -1:
            return self._find_step(step)
        complete = [info for info in self.infos if info.status == "complete" and info.is_current]
        highest = max({*map(_step_of, (info.tag for info in complete)), *self.dcp}, default=-1)
        if highest == -1 and self.infos:  # they are corrupt, or have other names: the load reports it
            return StartPoint(-1, None)
        if highest == -1:
            self._check_no_exports()
            return None
        if highest not in self.dcp and complete[-1].tag == tag_of(highest):
            return StartPoint(highest, None)
        for info in self.infos:
            if info.status != "complete" and _step_of(info.tag) > highest:
                raise CorruptCheckpointError(
                    f"{info.problem}; it has the highest step: remove it, or pass the load_step of another checkpoint"
                )
        return StartPoint(highest, tag_of(highest), is_dcp=highest in self.dcp)

    def _find_step(self, step: int) -> StartPoint:
        known = sorted({_step_of(info.tag) for info in self.infos} - {-1} | self.dcp)
        if step in known:
            return StartPoint(step, tag_of(step), is_dcp=step in self.dcp)
        existing = f"there are {_list_tags(known)}" if known else "there is none at all"
        raise NoCheckpointError(f"there is no checkpoint {tag_of(step)!r} in {self.path}; {existing}")

    def _check_no_exports(self) -> None:
        if self.exports:
            raise NoCheckpointError(
                f"{self.path} has only exported weights ({_list_tags(sorted(self.exports))}), with which a run cannot "
                "go on: use another folder, and to start from these weights set initial_load_in_hf=True and "
                "initial_load_path"
            )

    def check_free(self, step: int) -> None:
        """Raise ``TagExistsError`` if a run that goes on after a step would meet a folder that it cannot replace."""
        blocking = sorted(other for other in self.dcp | self.others if other > step)
        if blocking:
            raise TagExistsError(
                f"{self.path} has {_list_tags(blocking)}, which are not checkpoints of rankless and would be in the "
                f"way of its saves after step {max(step, 0)}: move them away, or use another folder"
            )


def _list_tags(steps: Sequence[int]) -> str:
    more = f" and {len(steps) - _SHOWN} more" if len(steps) > _SHOWN else ""
    return ", ".join(map(tag_of, steps[:_SHOWN])) + more


def is_replaceable(folder: Path) -> bool:
    """Return whether a folder is empty, or has nothing but weights that rankless has exported."""
    return store_of(folder).is_directory(folder) and EXPORT.find_foreign(folder) is None


def remove_replaceable(folder: Path) -> bool:
    """Remove an empty folder or an export. Return whether it was one. In an object store it is in no save's way."""
    if store_of(folder).is_remote or not is_replaceable(folder):
        return False
    remove_directory(folder, PendingDirectory(folder).removal_path)
    return True


def check_replaceable(folder: Path) -> None:
    """Raise ``TagExistsError`` if a folder has something that an export must not replace."""
    if replaced_by_export(folder.name).find_foreign(folder) is not None:
        raise TagExistsError(
            f"{folder} is neither a checkpoint nor an export of rankless, and is not replaced: move it away"
        )
