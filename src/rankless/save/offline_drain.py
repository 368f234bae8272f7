"""The drain of a host's local tier by a process of its own, after the job has ended.

If all parts of the newest checkpoint are on this host, it is written into the run directory. Else the host puts its
parts there (:mod:`rankless.tier.parts_in_run`), and the process that finds all of them writes the checkpoint. For
example, ranks 0-7 have left their parts on host a, and ranks 8-15 on host b: both hosts put theirs into the run
directory, and the second one writes the checkpoint.

``rankless drain`` and :func:`rankless.drain` call it in one process for each host. A load calls
:func:`publish_collected` on rank 0, in the vote "finding the checkpoint to load". The lock of the folder is taken
before a look for living processes, and parts are removed only after the checkpoint is in the run directory.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Literal

from rankless.engine.comm.process_group_argument import SELF
from rankless.engine.comm.session import RankGroup
from rankless.errors import InvalidArgumentError, StateError, StorageError
from rankless.observe.events import OnEvent, ignore_event
from rankless.run.catalog import list_checkpoints
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.save.background import background_saves
from rankless.save.generation_content import DrainOptions, GenerationContent
from rankless.save.run_save import run_save
from rankless.storage.file_lock import FileLock
from rankless.storage.location import parse_location
from rankless.storage.mapped_file import map_to_read
from rankless.storage.posix import wrap_os_errors
from rankless.storage.store import store_of
from rankless.tier.assembled_generation import Assembly
from rankless.tier.generation import Generation
from rankless.tier.host_folder import TierFolder
from rankless.tier.host_inspection import HostGeneration, list_generations
from rankless.tier.job import TierJob
from rankless.tier.part import PartTable, find_corrupt_range
from rankless.tier.parts_in_run import CollectedParts
from rankless.tier.tier_options import LocalTier, as_local_tier

#: The file in a host's folder that the process locks that drains it. It is no lock of a writer of slots.
_LOCK = "drain.guard"

#: Seconds between two looks whether another host has written the checkpoint.
_POLL_SECONDS = 0.2

#: The seconds that one process waits for itself: no other rank can be late.
_TIMEOUT = 600.0


@dataclass(frozen=True)
class DrainResult:
    """The outcome of :func:`drain`.

    Attributes:
        status: ``"published"``: the checkpoint was written into the run directory. ``"durable"``: the run directory has
            the newest checkpoint, or this host has none. ``"waiting"``: other hosts have parts of it.
        tag: The tag of the checkpoint; empty if this host has none.
        path: The path of the checkpoint in the run directory.
        collected: The ranks of the parts that are in the run directory, if it waits for others.
        missing: The ranks of the parts that it waits for.
        problems: Descriptions of corrupt files that were not used.
    """

    status: Literal["published", "durable", "waiting"]
    tag: str = ""
    path: Path | None = None
    collected: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    problems: tuple[str, ...] = ()


def drain(
    path: str | PathLike[str],
    local: LocalTier | str | PathLike[str],
    *,
    adopt: bool = False,
    on_event: OnEvent | None = None,
) -> DrainResult:
    """Write the newest checkpoint in the local tier of this host into the run directory, after its job has ended.

    If other hosts have parts of it, this host puts its own ones into the run directory. Call this on each host of the
    job: the last call writes the checkpoint. It may be called again, and on several hosts at a time.

    Args:
        path: The run directory.
        local: The folder of the local tier on this host, or the :class:`rankless.LocalTier` of the job.
        adopt: Write it also if its run is not known in the run directory, because that was removed or replaced.
        on_event: A function that is called with each event.

    Returns:
        A report of the drain, with the parts that are missing.

    Raises:
        NoCheckpointError: No job has used the folder.
        StateError: The job still runs on this host, or another process drains the folder.
        TagExistsError: The run directory has another checkpoint with its tag.
        StorageError: The file system, or the object store, reported an error.
        InvalidArgumentError: The folder belongs to another run.
    """
    run, tier = parse_location(path), as_local_tier(local)
    if tier is None:
        raise InvalidArgumentError(f"there is no local tier for {run}: pass local=")
    folder = TierFolder.find(tier.path, run)
    try:
        with wrap_os_errors("lock", folder.path):
            lock = FileLock(folder.path / _LOCK)
    except StorageError as error:
        if not isinstance(error.__cause__, BlockingIOError):
            raise
        raise StateError(f"another process drains {folder.path}: wait for it") from error
    try:
        if folder.living_writers():
            raise StateError(f"a process of the job that uses {folder.path} is alive, and drains it by itself")
        return _HostDrain(run, folder, on_event or ignore_event, adopts=adopt).run()
    finally:
        lock.remove()


def publish_collected(run: Path, on_event: OnEvent = ignore_event) -> CheckpointInfo | None:
    """Write the newest checkpoint that has all its parts in the run directory, unless a newer checkpoint is there."""
    collected = CollectedParts.of(run)
    return _HostDrain(run, collected.folder, on_event).publish_complete() if collected.exist else None


class _HostDrain:
    """The drain of one folder. ``problems`` are those found so far."""

    def __init__(self, run: Path, folder: TierFolder, on_event: OnEvent, *, adopts: bool = False) -> None:
        store_of(run).make_folder(run)
        self._run, self._folder, self._on_event, self._adopts = run, folder, on_event, adopts
        self._collected = CollectedParts.of(run)
        self._state = TierJob(folder.path, run)
        self._state.follow()
        self.problems: dict[str, None] = {}

    def run(self) -> DrainResult:
        """Publish the newest checkpoint, or put this host's parts of it into the run directory."""
        result = self._drain_newest()
        self._collected.remove_outdated(self._run)
        return replace(result, problems=tuple(self.problems))

    def publish_complete(self) -> CheckpointInfo | None:
        """Publish the newest checkpoint that has all its parts there, if one is pending."""
        for generation in self._list_pending():
            own = {} if store_of(self._run).is_remote else self._find_intact(generation)
            if generation.is_complete and (info := self._publish(generation, own)):
                self._collected.remove_outdated(self._run)
                return info
        return None

    def _list_generations(self) -> list[HostGeneration]:
        return list_generations(self._run, self._folder, adopts=self._adopts)

    def _list_pending(self) -> list[HostGeneration]:
        """Return the generations that the run directory lacks, newest first."""
        return [one for one in reversed(self._list_generations()) if one.is_pending]

    def _drain_newest(self) -> DrainResult:
        waiting: HostGeneration | None = None
        for generation in self._list_pending():
            intact = self._find_intact(generation)
            is_here = generation.common is not None and not _find_missing(generation, intact)
            current = generation if is_here else self._put(generation, intact)
            if current.is_complete and (info := self._publish(current, intact)):
                return DrainResult("published", info.tag, info.path)
            if waiting is None or waiting.common is None:
                waiting = self._refresh(current)
            if generation.common is not None and len(intact) == len(generation.tables):
                break  # all ranks have completed it, and this host has lost nothing of it
        if waiting is None:
            return self._describe_durable()
        missing = tuple(sorted(set(range(waiting.size)) - waiting.collected.keys()))
        return DrainResult("waiting", waiting.name, None, tuple(sorted(waiting.collected)), missing)

    def _describe_durable(self) -> DrainResult:
        generations = self._list_generations()
        unknown = [one for one in generations if one.is_unknown and not one.is_durable]
        if unknown:
            self.problems[
                f"{self._folder.path} has the checkpoint {unknown[-1].name!r} of a run that {self._run} does not know: "
                "was that directory removed, or is its file system not mounted? To write it there, pass --adopt"
            ] = None
        durable = [one for one in generations if one.is_durable]
        tag = durable[-1].name if durable else ""
        return DrainResult("durable", tag, self._run / tag if tag else None)

    def _refresh(self, generation: HostGeneration) -> HostGeneration:
        found = [one for one in self._list_generations() if one.key == generation.key]
        return found[0] if found else generation

    def _find_intact(self, generation: HostGeneration) -> dict[int, PartTable]:
        """Return the tables of the parts on this host that have intact bytes."""
        self.problems.update(dict.fromkeys(generation.problems))
        tables, folder = generation.tables, self._folder.path
        return {rank: table for rank, table in tables.items() if self._is_intact(folder / table.data, table)}

    def _is_intact(self, path: Path, table: PartTable) -> bool:
        try:
            corrupt = find_corrupt_range(table, map_to_read(path, table.nbytes))
        except StorageError as error:
            self.problems[str(error.args[-1])] = None
            return False
        if corrupt is not None:
            self.problems[f"{path}, with the part of rank {table.name.rank}, is corrupt"] = None
        return corrupt is None

    def _put(self, generation: HostGeneration, intact: Mapping[int, PartTable]) -> HostGeneration:
        """Put the parts of this host into the run directory. Return the generation with the parts there now."""
        try:
            for rank in sorted(intact.keys() - generation.collected.keys()):
                table = intact[rank]
                memory = map_to_read(self._folder.path / table.data, table.nbytes)
                self._collected.put_part(table, memory, self._folder.identity)
            if generation.common is not None:
                self._collected.put_common(generation.common, self._folder.identity)
        except StorageError as error:
            current = self._refresh(generation)
            if error.errno != errno.ENOENT or current.is_pending:
                raise  # else another host has written the checkpoint meanwhile, and removed the parts
            return current
        return self._refresh(generation)

    def _publish(self, generation: HostGeneration, intact: Mapping[int, PartTable]) -> CheckpointInfo | None:
        """Write a checkpoint into the run directory. Return ``None`` if a part of it turns out to be corrupt."""
        if not _find_missing(generation, intact):
            return self._write(generation, intact, {}, {})
        while True:
            with self._collected.try_lock() as is_locked:
                current = self._refresh(generation)
                if current.is_durable:
                    return _find_info(self._run, current)
                if not current.is_complete:
                    return None
                if is_locked:
                    others = {rank: table for rank, table in current.collected.items() if rank not in intact}
                    try:
                        with self._collected.open_parts(others) as paths:
                            return self._write_with(current, intact, others, paths)
                    except StorageError as error:
                        if error.errno != errno.ENOENT or not self._refresh(current).is_durable:
                            raise  # else another host has written the checkpoint, and removed the parts
            time.sleep(_POLL_SECONDS)

    def _write_with(
        self,
        generation: HostGeneration,
        own: Mapping[int, PartTable],
        others: Mapping[int, PartTable],
        paths: Mapping[int, Path],
    ) -> CheckpointInfo | None:
        """Write a checkpoint from own parts, and from others in the run directory: their bytes are at ``paths``."""
        broken = [table for rank, table in others.items() if not self._is_intact(paths[rank], table)]
        for table in broken:  # its host may put it again
            self._collected.folder.remove_table(table.name.name)
        if broken or _find_missing(generation, {**own, **others}):
            return None
        return self._write(generation, own, others, paths)

    def _write(
        self,
        generation: HostGeneration,
        own: Mapping[int, PartTable],
        others: Mapping[int, PartTable],
        paths: Mapping[int, Path],
    ) -> CheckpointInfo | None:
        if generation.common is None:
            return None
        tables = dict(sorted({**others, **own}.items()))
        path_of = {**paths, **{rank: self._folder.path / table.data for rank, table in own.items()}}
        places = {rank: {0: str(path_of[rank])} for rank in tables}
        assembly = Assembly(Generation(generation.common, tables), places, [0], 0)
        options = DrainOptions("raise", None, self._on_event)
        content = GenerationContent(RankGroup(SELF), _TIMEOUT, self._state, assembly, options)
        with background_saves.path_turn(self._run, None):
            return run_save(content, self._run, None, asynchronous=False).wait()


def _find_missing(generation: HostGeneration, tables: Mapping[int, PartTable]) -> set[int]:
    return set(range(generation.size)) - tables.keys()


def _find_info(run: Path, generation: HostGeneration) -> CheckpointInfo | None:
    return next((info for info in list_checkpoints(run) if info.id == generation.key.id), None)
