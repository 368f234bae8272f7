"""``rankless ls --local``: lists the generations of the local tier of a host.

:mod:`rankless.cli.ls` and :mod:`rankless.cli.top` call it, in one process of a host, while jobs may be running.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from rankless.cli.table import Cell, Column, Table
from rankless.cli.tier.select_generations import checkpoint_bytes, describe_state, find_folder, format_parts
from rankless.observe.terminal import escape_control_characters
from rankless.observe.units import format_age, format_size, format_time
from rankless.tier.host_inspection import HostGeneration, list_generations

_STYLES = {"in both": "green", "in the tier only": "bold green"}


class TierListing:
    """The generations in the folder of a host, oldest first."""

    def __init__(self, path: Path, generations: Sequence[HostGeneration]) -> None:
        self._path, self.generations = path, generations

    @classmethod
    def of(cls, run: str, local: str) -> TierListing:
        """List the generations. Raises the errors of :func:`find_folder`."""
        path, folder = find_folder(run, local)
        return cls(folder.path, list_generations(path, folder))

    @property
    def is_corrupt(self) -> bool:
        """True if files are corrupt."""
        return any(generation.problems for generation in self.generations)

    def as_record(self) -> dict[str, Any]:
        """Return the listing for programs."""
        return {"folder": str(self._path), "generations": list(map(_as_record, self.generations))}

    @property
    def state(self) -> list[tuple[str, str]]:
        """The ids and states of the generations, which change with the listing."""
        return [(generation.key.id, describe_state(generation)) for generation in self.generations]

    def build(self) -> list[RenderableType]:
        """Return the table under its title, and the corrupt parts."""
        title = Text(f"in the local tier {escape_control_characters(str(self._path))}:", style="dim")
        if not self.generations:
            return [title, Text("no checkpoint")]
        now = time.time()
        columns = [
            Column("tag", elastic="middle"),
            Column("step", right=True),
            Column("saved"),
            Column("age", right=True),
            Column("size", right=True),
            Column("parts here"),
            Column("in the run"),
            Column("state"),
        ]
        rows = [_format_row(generation, now) for generation in self.generations]
        problems = [problem for generation in self.generations for problem in generation.problems]
        return [title, Table(columns, rows), *(Text(escape_control_characters(text), style="red") for text in problems)]


def _as_record(generation: HostGeneration) -> dict[str, Any]:
    manifest = None if generation.common is None else generation.common.label.manifest
    return {
        "tag": None if manifest is None else manifest.tag,
        "step": None if manifest is None else manifest.step,
        "time": None if manifest is None else manifest.time,
        "run": None if manifest is None else manifest.run,
        "id": generation.key.id,
        "incarnation": generation.key.incarnation,
        "sequence": generation.key.sequence,
        "bytes": checkpoint_bytes(generation),
        "parts": generation.size,
        "here": sorted(generation.tables),
        "collected": sorted(generation.collected),
        "missing": generation.missing,
        "complete": generation.is_complete,
        "durable": generation.is_durable,
        "retired": generation.is_retired,
        "superseded": generation.is_superseded or generation.is_outdated,
        "used": generation.is_used,
        "problems": list(generation.problems),
    }


def _format_row(generation: HostGeneration, now: float) -> list[Cell]:
    manifest = None if generation.common is None else generation.common.label.manifest
    nbytes, state = checkpoint_bytes(generation), describe_state(generation)
    style = "bold red" if generation.problems else _STYLES.get(state.partition(",")[0], "yellow")
    return [
        escape_control_characters(generation.name),
        "" if manifest is None or manifest.step is None else str(manifest.step),
        "" if manifest is None else format_time(manifest.time),
        "" if manifest is None else format_age(now - manifest.time),
        "" if nbytes is None else format_size(nbytes),
        format_parts(generation.tables, generation.size),
        format_parts(generation.collected, generation.size) if generation.collected else "",
        (state, style),
    ]
