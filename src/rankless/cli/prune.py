"""``rankless prune``: removes old checkpoints and leftovers of interrupted saves.

It runs in one process, next to jobs that save: :mod:`rankless.run` decides about removals, and holds the locks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from rankless.cli.checkpoint_argument import Local, check_run
from rankless.cli.command_process import leave_on_interrupt
from rankless.cli.output import print_json
from rankless.errors import InvalidArgumentError, RanklessError
from rankless.observe.terminal import escape_control_characters, terminal_console
from rankless.observe.units import format_count, format_size
from rankless.run.catalog import list_stale_directories
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.cleanup import clean_up, delete_checkpoints, expired_checkpoints, seems_alive
from rankless.run.protection import find_protection
from rankless.run.retention import KeepLast
from rankless.run.run_store import StaleDirectory
from rankless.storage.location import parse_location
from rankless.storage.store import store_of


@dataclass(frozen=True)
class _Removable:
    """The checkpoints and leftovers to remove. ``kept`` are leftovers that a process may still use."""

    checkpoints: list[CheckpointInfo]
    leftovers: list[StaleDirectory]
    kept: tuple[StaleDirectory, ...] = ()

    @property
    def nbytes(self) -> int:
        """The size on disk in bytes."""
        return sum(info.nbytes for info in self.checkpoints) + sum(leftover.nbytes for leftover in self.leftovers)


def prune(  # noqa: PLR0917 - options of the command
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder.")],
    keep: Annotated[
        int | None, typer.Option(help="Keep the newest N checkpoints, over all runs in the folder.")
    ] = None,
    remains: Annotated[
        bool, typer.Option("--leftovers", help="Remove what interrupted saves left, of any run.")
    ] = False,
    local: Local = None,
    undrained: Annotated[
        bool, typer.Option("--undrained", help="With --local: also remove what only the tier has.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="With --leftovers: also whole checkpoints in a bucket without a tag.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Remove old checkpoints of a run, or leftovers of interrupted saves in its folder.

    The newest complete checkpoint is never removed. Neither are checkpoints that have an alias, or that a process has
    pinned, and files of a running save.

    With --local, remove from the local tier of this host what is in the run's folder, superseded or retired, and not in
    use. The newest checkpoint that only the tier has stays, unless --undrained is passed.
    """
    if local is not None and (keep is not None or remains):
        raise InvalidArgumentError("--local cannot be used with --keep or --leftovers: call prune twice")
    if force and not remains:
        raise InvalidArgumentError("--force needs --leftovers")
    if undrained and local is None:
        raise InvalidArgumentError("--undrained needs --local")
    if local is not None:
        _prune_tier(run, local, with_undrained=undrained, dry_run=dry_run, as_json=as_json)
        return
    path = parse_location(run)
    check_run(path)
    if keep is None and not remains:
        raise InvalidArgumentError(
            "pass what to remove: --keep N for old checkpoints, --leftovers for interrupted saves"
        )
    if keep is not None and keep < 1:
        raise InvalidArgumentError(
            f"--keep must be a number above 0; got {keep}: the newest checkpoint is never removed"
        )
    expired = expired_checkpoints(path, None, KeepLast(keep)) if keep is not None else []
    protected = {info.tag: reason for info in expired if (reason := find_protection(info))}
    found = list_stale_directories(path) if remains else []
    kept_leftovers = tuple(
        leftover for leftover in found if seems_alive(leftover.path, leftover.time) or (leftover.is_whole and not force)
    )
    removable = _Removable(
        [info for info in expired if info.tag not in protected],
        [leftover for leftover in found if leftover not in kept_leftovers],
        kept_leftovers,
    )
    failures: list[RanklessError] = []
    if not dry_run:
        removable = _remove_all(path, removable, failures, with_leftovers=remains, with_whole=force)
    if as_json:
        names = [info.tag for info in removable.checkpoints], [leftover.name for leftover in removable.leftovers]
        kept = [*protected, *(leftover.name for leftover in removable.kept)]
        print_json(
            {
                "checkpoints": names[0],
                "leftovers": names[1],
                "kept": kept,
                "bytes": removable.nbytes,
                "dry_run": dry_run,
            }
        )
    else:
        _print_removed(removable, protected, "would remove" if dry_run else "removed")
    if failures:
        raise failures[0]


def _prune_tier(run: str, local: str, *, with_undrained: bool, dry_run: bool, as_json: bool) -> None:
    with leave_on_interrupt():
        from rankless.cli.tier.prune_local import prune_tier  # noqa: PLC0415 - NumPy is slow to import
    prune_tier(run, local, with_undrained=with_undrained, dry_run=dry_run, as_json=as_json)


def _remove_all(
    path: Path, removable: _Removable, failures: list[RanklessError], *, with_leftovers: bool, with_whole: bool
) -> _Removable:
    """Return the removed parts. The error of a checkpoint that cannot be removed is added to ``failures``."""
    deleted = []
    try:
        for info in delete_checkpoints(removable.checkpoints):
            deleted.append(info)  # noqa: PERF402 - those before an error count, too
    except RanklessError as error:
        failures.append(error)
    cleaned = {folder.name for folder in clean_up(path, None, with_whole=with_whole)} if with_leftovers else set()
    kept = (leftover for leftover in removable.leftovers if leftover.name not in cleaned)
    return _Removable(
        deleted,
        [leftover for leftover in removable.leftovers if leftover.name in cleaned],
        (*removable.kept, *(leftover for leftover in kept if store_of(path).path_exists(path / leftover.name))),
    )


def _print_removed(removable: _Removable, protected: Mapping[str, str], action: str) -> None:
    out = terminal_console()
    for name in (*(info.tag for info in removable.checkpoints), *(leftover.name for leftover in removable.leftovers)):
        out.print(f"{action} {escape_control_characters(name)}")
    for tag, reason in protected.items():
        out.print(f"kept {escape_control_characters(tag)}: {reason}")
    for leftover in removable.kept:
        out.print(f"kept {escape_control_characters(leftover.name)}: {_reason_to_keep(leftover)}")
    total = format_count(len(removable.checkpoints), "checkpoint"), format_count(len(removable.leftovers), "leftover")
    out.print(f"{action} {total[0]} and {total[1]}, {format_size(removable.nbytes)}", style="dim")


def _reason_to_keep(leftover: StaleDirectory) -> str:
    if seems_alive(leftover.path, leftover.time):
        return "something of it has changed in the last 24 hours, so a process may still write it"
    if leftover.is_whole:
        name = f"{leftover.tag}-copy"
        return (
            "it is a whole checkpoint, and no tag means it: copy it to a name without the id to keep it, such as "
            f"{escape_control_characters(name)}, or remove it with --force"
        )
    return "a process uses it or may use it, or it cannot be locked or removed"
