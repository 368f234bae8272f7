"""The generations of the local tier that a host has, as a process sees them that is not one of the job's.

The commands of the tier and drains without a job (:mod:`rankless.save.offline_drain`) list with it, in one process of a
host, while jobs may be running. It changes nothing, and files that a job removes meanwhile are no error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankless.errors import CorruptCheckpointError, StorageError
from rankless.run.catalog import list_checkpoints
from rankless.run.stored_history import read_history
from rankless.tier.generation import Common, check_table
from rankless.tier.host_folder import TierFolder
from rankless.tier.part import PartTable
from rankless.tier.part_names import GenerationKey, PartName
from rankless.tier.parts_in_run import CollectedParts


@dataclass(frozen=True)
class HostGeneration:
    """A generation. ``tables`` are the tables of the parts on this host, ``collected`` of those in the run, by rank.

    ``common`` is its label; ``None`` if neither place has that, or if it is corrupt. ``size`` is the
    number of parts. ``problems`` describe corrupt files.

    ``is_durable``: the checkpoint is in the run directory. ``is_superseded``: a newer one is. ``is_outdated``: a newer
    generation is complete on this host. ``is_retired``: a later job has continued from an older checkpoint.
    ``is_unknown``: it is retired because the run directory does not know its run. ``is_used``: a living process has
    parts of it.
    """

    key: GenerationKey
    size: int
    common: Common | None
    tables: Mapping[int, PartTable]
    collected: Mapping[int, PartTable]
    is_durable: bool = False
    is_superseded: bool = False
    is_outdated: bool = False
    is_retired: bool = False
    is_unknown: bool = False
    is_used: bool = False
    problems: Sequence[str] = ()

    @property
    def name(self) -> str:
        """The tag, or the name of the generation if its label is not known."""
        return self.key.name if self.common is None else self.common.label.manifest.tag

    @property
    def missing(self) -> list[int]:
        """The ranks of the parts that are neither on this host nor in the run directory."""
        return sorted(set(range(self.size)) - self.tables.keys() - self.collected.keys())

    @property
    def is_complete(self) -> bool:
        """True if this host can read all parts."""
        return self.common is not None and not self.missing

    @property
    def is_pending(self) -> bool:
        """True if the run directory lacks the checkpoint, and should get it."""
        return not (self.is_durable or self.is_superseded or self.is_retired)


def list_generations(run: Path, folder: TierFolder, *, adopts: bool = False) -> list[HostGeneration]:
    """Return the generations of a host's folder and of the parts in the run directory, oldest first.

    Generations that a job removes meanwhile are left out. With ``adopts``, generations of runs that the directory does
    not know are not retired.
    """
    collected = CollectedParts.of(run).folder
    own, others, living = folder.list_parts(), collected.list_parts(), folder.living_writers()
    infos = [info for info in list_checkpoints(run) if info.status == "complete"]
    ids, newest = {info.id for info in infos}, max((info.sequence for info in infos), default=0)
    history = read_history(run)
    generations: list[HostGeneration] = []
    is_outdated = False
    for key in sorted({*own, *others, *folder.list_commons()}, reverse=True):
        problems: list[str] = []
        common = _read_common(key, (folder, collected), problems)
        names = [*own.get(key, ()), *others.get(key, ())]
        size = common.label.size if common is not None else max((name.size for name in names), default=0)
        tables = _read_tables(folder, own.get(key, ()), common, problems)
        is_retired = not history.is_current_number(key.incarnation, key.sequence)
        is_unknown = is_retired and common is not None and common.label.manifest.run not in history.runs
        generation = HostGeneration(
            key,
            size,
            common,
            tables,
            _read_tables(collected, others.get(key, ()), common, problems),
            is_durable=key.id in ids,
            is_superseded=key.sequence < newest,
            is_outdated=is_outdated,
            is_retired=is_retired and not (adopts and is_unknown),
            is_unknown=is_unknown and not adopts,
            is_used=_is_used(tables, living, problems),
            problems=problems,
        )
        is_outdated |= generation.is_complete and not generation.is_retired
        if common is not None or tables or generation.collected or problems:
            generations.append(generation)
    return generations[::-1]


def _is_used(tables: Mapping[int, PartTable], living: Collection[str], problems: Sequence[str]) -> bool:
    """Return whether a living process has parts. Of a corrupt one that is unknown."""
    return bool(living and problems) or any(table.data.partition("-")[0] in living for table in tables.values())


def _read_common(key: GenerationKey, folders: Sequence[TierFolder], problems: list[str]) -> Common | None:
    for folder in folders:
        try:
            if (common := folder.read_common(key)) is not None:
                return common
        except CorruptCheckpointError as error:
            problems.append(str(error))
        except StorageError as error:
            problems.append(str(error.args[-1]))
    return None


def _read_tables(
    folder: TierFolder, names: Sequence[PartName], common: Common | None, problems: list[str]
) -> dict[int, PartTable]:
    tables = {}
    for name in names:
        try:
            table = folder.read_part(name)
            if common is not None:
                check_table(common, table, str(folder.path / name.name))
            tables[name.rank] = table
        except CorruptCheckpointError as error:
            problems.append(str(error))
        except StorageError as error:
            if folder.has_part(name):  # else a job has removed it meanwhile
                problems.append(str(error.args[-1]))
    return tables
