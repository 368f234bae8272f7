"""``rankless verify --local``: reads all parts on a host, and checks every CRC.

:mod:`rankless.cli.verify` calls it, in one process of a host, while jobs may be running. Parts may be copies or
computed ones; parities are not read. Scripts read the status of the results: its words must stay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from rankless.cli.output import format_error_message
from rankless.cli.tier.select_generations import find_folder, format_parts, select_generations
from rankless.cli.verify_one import VerifyResult
from rankless.errors import RanklessError
from rankless.observe.terminal import show_progress
from rankless.storage.mapped_file import map_to_read
from rankless.tier.generation import layout_plan
from rankless.tier.host_folder import TierFolder
from rankless.tier.host_inspection import HostGeneration
from rankless.tier.part import PartTable, find_corrupt_ranges


def verify_tier(run: str, local: str, tag: str | None) -> Iterator[VerifyResult]:
    """Verify the parts of the generations on this host, oldest first. Parts that a job removes meanwhile are left out.

    Raises the errors of :func:`find_folder` and :func:`select_generations`.
    """
    path, folder = find_folder(run, local)
    for generation in select_generations(path, folder, tag):
        nbytes = sum(table.nbytes for table in generation.tables.values())
        with show_progress(f"verifying {generation.name}", nbytes) as done:
            yield _verify_generation(folder, generation, done)


def _verify_generation(folder: TierFolder, generation: HostGeneration, done: Callable[[int], None]) -> VerifyResult:
    started = time.perf_counter()
    problems = [*generation.problems]
    intact: set[int] = set()
    corrupt: set[int] = set()
    nbytes = 0
    for table in generation.tables.values():
        found, tensors = _verify_part(folder, generation, table)
        done(table.nbytes)
        problems += found
        corrupt |= tensors
        if not found:
            nbytes += table.nbytes
        intact |= set(table.rows.tensor.tolist())
    intact -= corrupt
    notes = []
    if generation.missing:
        here = format_parts(generation.tables, generation.size)
        notes = [f"parts of other hosts were not read; parts on this host: {here}"]
    return VerifyResult(
        path=f"{folder.path}: {generation.name}",
        status="damaged" if problems else "verified",
        tensors=len(intact),
        checksummed=len(intact),
        bytes=nbytes,
        own_bytes=nbytes,
        seconds=time.perf_counter() - started,
        problems=tuple(problems),
        notes=tuple(notes),
    )


def _verify_part(folder: TierFolder, generation: HostGeneration, table: PartTable) -> tuple[list[str], set[int]]:
    """Return the problems of a part, and the numbers of the tensors that are corrupt in it."""
    path = folder.path / table.data
    try:
        ranges = find_corrupt_ranges(table, map_to_read(path, table.nbytes))
    except RanklessError as error:
        return ([format_error_message(error)], set()) if folder.has_part(table.name) else ([], set())
    if not ranges or not folder.has_part(table.name):  # a job writes another part into the file
        return [], set()
    names = [] if generation.common is None else layout_plan(generation.common.groups).tensors
    problems = []
    for found in ranges:
        subject = "/".join(names[found.tensor]) if names else f"number {found.tensor}"
        stop = found.local + found.stop - found.start
        problems.append(
            f"tensor {subject} is corrupt in bytes {found.start} to {found.stop}: bytes {found.local} to {stop} of "
            f"{path}, with the part of rank {table.name.rank}"
        )
    return problems, {found.tensor for found in ranges}
