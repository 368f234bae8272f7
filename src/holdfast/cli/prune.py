"""``holdfast prune``: remove old checkpoints, and what dead saves left."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.output import format_count, print_json
from holdfast.cli.target import check_run
from holdfast.errors import InvalidArgumentError
from holdfast.observe.terminal import escape_control_characters, terminal_console
from holdfast.observe.units import format_size
from holdfast.run.catalog import StaleDirectory, list_stale_directories
from holdfast.run.cleanup import clean_up, delete_checkpoints, expired_checkpoints
from holdfast.run.retention import KeepLast
from holdfast.run.scan import CheckpointInfo
from holdfast.storage.posix import local_path


@dataclass(frozen=True)
class _Found:
    """What there is to remove; of leftovers, those of living saves are left where they are."""

    checkpoints: list[CheckpointInfo]
    leftovers: list[StaleDirectory]

    @property
    def nbytes(self) -> int:
        """What it takes of the disk."""
        return sum(info.nbytes for info in self.checkpoints) + sum(one.nbytes for one in self.leftovers)


def prune(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder.")],
    keep: Annotated[int | None, typer.Option(help="Keep the newest so many checkpoints.")] = None,
    remains: Annotated[
        bool, typer.Option("--leftovers", help="Remove what dead saves left, of this run or others.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would be removed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON, for programs.")] = False,
) -> None:
    """Remove old checkpoints of a run, or what dead saves left in its folder.

    The newest complete checkpoint always stays, and so does what a living process works on.
    """
    path = local_path(run)
    check_run(path)
    if keep is None and not remains:
        raise InvalidArgumentError("say what to remove: --keep N for old checkpoints, --leftovers for dead saves")
    if keep is not None and keep < 1:
        raise InvalidArgumentError(f"--keep takes a number above 0, not {keep}: the newest checkpoint always stays")
    found = _Found(
        expired_checkpoints(path, None, KeepLast(keep)) if keep is not None else [],
        list_stale_directories(path) if remains else [],
    )
    if not dry_run:
        found = _remove(path, found)
    if as_json:
        names = [info.tag for info in found.checkpoints], [one.name for one in found.leftovers]
        print_json({"checkpoints": names[0], "leftovers": names[1], "bytes": found.nbytes, "dry_run": dry_run})
    else:
        _print(found, "would remove" if dry_run else "removed")


def _remove(path: Path, found: _Found) -> _Found:
    gone = list(delete_checkpoints(found.checkpoints))
    cleaned = {folder.name for folder in clean_up(path, None)} if found.leftovers else set()
    return _Found(gone, [one for one in found.leftovers if one.name in cleaned])


def _print(found: _Found, did: str) -> None:
    out = terminal_console()
    for name in (*(info.tag for info in found.checkpoints), *(one.name for one in found.leftovers)):
        out.print(f"{did} {escape_control_characters(name)}")
    total = format_count(len(found.checkpoints), "checkpoint"), format_count(len(found.leftovers), "leftover")
    out.print(f"{did} {total[0]} and {total[1]}, {format_size(found.nbytes)}", style="dim")
