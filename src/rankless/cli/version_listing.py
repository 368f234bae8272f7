"""The versions of published weights as a table of the terminal, for ``rankless ls``. It only reads, in one process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rankless.cli.table import Cell, Column, Table
from rankless.errors import CorruptCheckpointError, NoCheckpointError
from rankless.formats.weights.version_files import list_numbers, read_manifest
from rankless.observe.terminal import escape_control_characters
from rankless.observe.units import format_age, format_metrics, format_size, format_time
from rankless.ondisk.weight_versions import VersionManifest

_COLUMNS = (
    Column("version", right=True),
    Column("step", right=True),
    Column("published"),
    Column("age", right=True),
    Column("based on"),
    Column("size", right=True),
    Column("written", right=True),
    Column("run"),
    Column("status"),
    Column("metrics", elastic="end"),
)

#: How many characters of the id of a run are shown.
_RUN_CHARACTERS = 6


class VersionListing:
    """The versions of a weights directory, oldest first: the manifest of each, or the error of a corrupt one."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self.versions: list[tuple[int, VersionManifest | CorruptCheckpointError]] = []
        for number in list_numbers(directory):
            try:
                self.versions.append((number, read_manifest(directory, number)))
            except NoCheckpointError:  # it was removed meanwhile
                continue
            except CorruptCheckpointError as error:
                self.versions.append((number, error))

    @property
    def is_corrupt(self) -> bool:
        """True if a manifest is corrupt."""
        return any(isinstance(version, CorruptCheckpointError) for _, version in self.versions)

    @property
    def problems(self) -> Sequence[str]:
        """The errors of corrupt manifests."""
        return [str(version) for _, version in self.versions if isinstance(version, CorruptCheckpointError)]

    def build_table(self) -> Table:
        """Return the table."""
        now = time.time()
        return Table(_COLUMNS, [_format_row(number, version, now) for number, version in self.versions])

    def as_record(self) -> dict[str, object]:
        """Return the list as values of JSON."""
        return {
            "path": str(self.path),
            "latest": self.versions[-1][0] if self.versions else None,
            "versions": [_as_record(number, version) for number, version in self.versions],
        }


def _format_row(number: int, version: VersionManifest | CorruptCheckpointError, now: float) -> list[Cell]:
    if isinstance(version, CorruptCheckpointError):
        return [str(number), *[""] * 7, ("damaged", "bold red"), ""]
    bases = ", ".join(str(delta.base.number) for delta in version.deltas)
    return [
        str(number),
        "" if version.step is None else str(version.step),
        format_time(version.time),
        format_age(now - version.time),
        bases,
        format_size(version.nbytes),
        format_size(version.written_bytes),
        "" if version.training is None else escape_control_characters(version.training.run[:_RUN_CHARACTERS]),
        ("anchor", "green") if version.is_anchor else "delta",
        escape_control_characters(format_metrics(version.metrics)),
    ]


def _as_record(number: int, version: VersionManifest | CorruptCheckpointError) -> dict[str, object]:
    if isinstance(version, CorruptCheckpointError):
        return {"version": number, "status": "damaged", "problem": str(version)}
    training = version.training
    return {
        "version": number,
        "status": "anchor" if version.is_anchor else "delta",
        "id": version.id,
        "step": version.step,
        "metrics": version.metrics,
        "time": version.time,
        "bases": [delta.base.number for delta in version.deltas],
        "bytes": version.nbytes,
        "written_bytes": version.written_bytes,
        "run": None if training is None else training.run,
        "incarnation": None if training is None else training.incarnation,
        "checkpoint": None if training is None else training.checkpoint or None,
    }
