"""``rankless show --local``: opens a generation of the local tier to show it. No part is read.

:mod:`rankless.cli.show.show_command` calls it, in one process of a host.
"""

from __future__ import annotations

from rankless.cli.tier.select_generations import describe_state, find_folder, format_parts, select_generations
from rankless.errors import CorruptCheckpointError, NoCheckpointError
from rankless.inspection.inspected_checkpoint import InspectedCheckpoint
from rankless.tier.generation import Generation, describe_layout
from rankless.tier.generation_reader import GenerationReader


def inspect_tier(run: str, local: str, tag: str | None) -> InspectedCheckpoint:
    """Return the newest generation with a tag, or the newest one, also if this host has only some of its parts.

    Raises ``CorruptCheckpointError``, and the errors of :func:`find_folder` and :func:`select_generations`.
    """
    path, folder = find_folder(run, local)
    generations = select_generations(path, folder, tag)
    labelled = [(one, one.common) for one in generations if one.common is not None]
    if not labelled:
        if problems := [problem for one in generations for problem in one.problems]:
            raise CorruptCheckpointError("\n".join(problems))
        raise NoCheckpointError(f"no checkpoint in {folder.path} was completed by all ranks")
    newest, common = labelled[-1]
    layout = describe_layout(common)
    reader = GenerationReader(path / newest.name, Generation(common, {layout.name.rank: layout}), {})
    note = f"{describe_state(newest)}; parts on this host: {format_parts(newest.tables, newest.size)}"
    return InspectedCheckpoint(reader.path, reader, reader.manifest, (note, *newest.problems))
