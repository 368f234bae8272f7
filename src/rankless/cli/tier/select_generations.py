"""The generations that a command with ``--local`` works on, and their description.

The commands with ``--local`` call it, in one process of a host.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from rankless.errors import NoCheckpointError
from rankless.storage.location import parse_location
from rankless.storage.posix import local_path
from rankless.tier.host_folder import TierFolder
from rankless.tier.host_inspection import HostGeneration, list_generations


def find_folder(run: str, local: str) -> tuple[Path, TierFolder]:
    """Return the path of a run, and the folder of its tier on this host.

    Raises ``InvalidArgumentError``, ``NoCheckpointError`` or ``StorageError``.
    """
    path = parse_location(run)
    return path, TierFolder.find(local_path(local), path)


def select_generations(run: Path, folder: TierFolder, tag: str | None) -> list[HostGeneration]:
    """Return the generations with a tag, or all, oldest first. Raises ``NoCheckpointError`` if there is none."""
    generations = list_generations(run, folder)
    selected = [one for one in generations if tag in {None, one.name}]
    if not selected:
        existing = ", ".join(one.name for one in generations) or "nothing"
        wanted = "no checkpoint" if tag is None else f"no checkpoint {tag!r}"
        raise NoCheckpointError(f"there is {wanted} in {folder.path}; it has {existing}")
    return selected


def format_parts(ranks: Iterable[int], size: int) -> str:
    """Format the ranks of parts: ``all 4``, ``0-2, 5 of 8`` or ``none of 4``."""
    known = sorted(ranks)
    if size and known == list(range(size)):
        return f"all {size:,}"
    numbered = groupby(enumerate(known), key=lambda pair: pair[1] - pair[0])
    runs = [[rank for _, rank in run] for _, run in numbered]
    shown = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{shown or 'none'} of {size:,}"


def describe_state(generation: HostGeneration) -> str:
    """Say where a generation is, and whether it is still needed."""
    if generation.is_durable:
        state = "in both"
    elif generation.is_retired:
        state = "retired"
    elif generation.is_superseded or generation.is_outdated:
        state = "superseded"
    elif generation.common is None:
        state = "unfinished, or its label is on other hosts"
    else:
        state = "in the tier only"
    return f"{state}, in use" if generation.is_used else state


def checkpoint_bytes(generation: HostGeneration) -> int | None:
    """Return the size of the checkpoint in bytes, without its manifest; ``None`` if its label is not known."""
    common = generation.common
    if common is None:
        return None
    data = sum(file.size for files in common.groups.values() for file in files)
    return data + sum(map(len, common.small_files.values()))
