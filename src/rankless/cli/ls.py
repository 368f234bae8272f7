"""``rankless ls``: lists the checkpoints of a run.

It only reads, in one process. Programs read the JSON: keys keep their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from rankless.cli.checkpoint_argument import Local, check_run
from rankless.cli.command_process import leave_on_interrupt
from rankless.cli.live_view import LiveView, show_live
from rankless.cli.output import print_error, print_json
from rankless.cli.run_listing import RunListing, build_table
from rankless.cli.table import Table
from rankless.errors import InvalidArgumentError
from rankless.formats.weights.version_files import find_newest
from rankless.observe.terminal import escape_control_characters, terminal_console
from rankless.observe.units import format_count
from rankless.run.catalog import list_checkpoints
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.run_store import StaleDirectory
from rankless.storage.location import parse_location

if TYPE_CHECKING:
    from rankless.cli.ls_tree import TreeListing
    from rankless.cli.tier.ls_local import TierListing


def ls(  # noqa: PLR0917 - options of the command
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder.")],
    show_all: Annotated[bool, typer.Option("--all", "-a", help="Also list what interrupted saves left.")] = False,
    best: Annotated[
        str | None, typer.Option(metavar="METRIC[:max]", help="Mark the best checkpoint by a metric.")
    ] = None,
    tree: Annotated[bool, typer.Option("--tree", help="Show which job continued which checkpoint.")] = False,
    local: Local = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show the list again when it changes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """List the checkpoints of a run, oldest first.

    "own" is the disk space that no other checkpoint shares; it is shown if checkpoints share files. Corrupt checkpoints
    are listed before all others, then "abandoned" ones, from which the run went back. "complete" means that the
    save was completed; only verify reads the tensors. The exit code is 1 if there is no checkpoint, or a corrupt one.
    With --tree show the history: the job that saved each checkpoint, what it continued, and where the run went back.
    With --local also list what the local tier has on this host.
    Of a weights directory, list the published versions: what each is based on, and what was written for it.
    """
    path = parse_location(run)
    if local is None:
        _check_run(path, {"--tree": tree, "--best": best is not None, "--watch": watch}, as_json=as_json)
    if watch:
        _check_alone("--watch", {"--json": as_json, "--local": local is not None, "--tree": tree})
    tier = None if local is None else _list_tier(run, local)
    if watch:
        _watch(path, best, show_all=show_all)
    listing = RunListing.of(path, list_checkpoints(path), best)
    checkpoints, shown = listing.checkpoints, listing.leftovers if show_all else []
    trees = _list_trees(path, checkpoints) if tree else None
    if as_json:
        _print_json(listing, shown, tier, trees)
    elif trees is not None and checkpoints:
        _print_tree(trees, listing, shown)
    elif checkpoints or shown:
        _print_table(listing, shown)
    if tier is not None and not as_json:
        for part in tier.build():
            terminal_console().print(part, end="" if isinstance(part, Table) else "\n")
    if not checkpoints and not (tier is not None and tier.generations):
        hidden = len(listing.leftovers) - len(shown)
        hint = f"--all also lists {format_count(hidden, 'interrupted save')}." if hidden else ""
        parts = ", ".join(map(escape_control_characters, listing.parts))
        hint = f"A part of one, without its manifest: {parts}. {hint}".strip() if parts else hint
        print_error(f"there is no checkpoint in {path}", hint)
        raise typer.Exit(1)
    is_corrupt = any(info.status != "complete" for info in checkpoints) or (tier is not None and tier.is_corrupt)
    raise typer.Exit(1 if is_corrupt else 0)


def _check_run(path: Path, others: Mapping[str, bool], *, as_json: bool) -> None:
    """Check that the path can be a run's folder. If it is a weights directory, list its versions instead, and exit."""
    try:
        check_run(path)
    except InvalidArgumentError:  # looked at only now: a run in a bucket costs no request more
        if find_newest(path) is None:
            raise
        _check_alone("a weights directory", others)
        _list_versions(path, as_json=as_json)


def _list_versions(path: Path, *, as_json: bool) -> None:
    """List the versions of a weights directory, and end the command."""
    from rankless.cli.version_listing import VersionListing  # noqa: PLC0415 - a run needs none of it

    listing = VersionListing(path)
    if as_json:
        print_json(listing.as_record())
    else:
        out = terminal_console()
        out.print(listing.build_table(), end="")
        for problem in listing.problems:
            out.print(escape_control_characters(problem), style="red")
    raise typer.Exit(1 if listing.is_corrupt else 0)


def _check_alone(option: str, others: Mapping[str, bool]) -> None:
    """Raise ``InvalidArgumentError`` if one of other options is given, too."""
    for other in (name for name, is_given in others.items() if is_given):
        raise InvalidArgumentError(f"{option} and {other} cannot be used together: leave one of them out")


def _list_tier(run: str, local: str) -> TierListing:
    with leave_on_interrupt():
        from rankless.cli.tier.ls_local import TierListing  # noqa: PLC0415 - NumPy is slow to import
    return TierListing.of(run, local)


def _list_trees(path: Path, checkpoints: Sequence[CheckpointInfo]) -> TreeListing:
    with leave_on_interrupt():
        from rankless.cli.ls_tree import TreeListing  # noqa: PLC0415 - a plain list needs none of it
    return TreeListing.of(path, checkpoints)


def _watch(path: Path, best: str | None, *, show_all: bool) -> NoReturn:
    def build() -> LiveView:
        listing = RunListing.of(path, list_checkpoints(path), best)
        table = build_table(listing, listing.leftovers if show_all else [])
        return LiveView(table, listing.state)

    show_live(path, build)


def _print_json(
    listing: RunListing, leftovers: Sequence[StaleDirectory], tier: TierListing | None, trees: TreeListing | None
) -> None:
    checkpoints = listing.checkpoints
    table: dict[str, object] = {
        "path": str(listing.path),
        "latest": next((info.tag for info in checkpoints[-1:] if info.status == "complete"), None),
        "best": listing.best or None,
        "checkpoints": [_as_record(listing, info) for info in checkpoints],
        "leftovers": [
            {
                "name": leftover.name,
                "tag": leftover.tag,
                "path": str(leftover.path),
                "time": leftover.time,
                "bytes": leftover.nbytes,
                "whole": leftover.is_whole,
            }
            for leftover in leftovers
        ],
        "parts": listing.parts,
    }
    if trees is not None:
        table["tree"] = trees.as_record()
    if tier is not None:
        table["local"] = tier.as_record()
    print_json(table)


def _as_record(listing: RunListing, info: CheckpointInfo) -> dict[str, object]:
    readable = info.status == "complete"
    return {
        "tag": info.tag,
        "path": str(info.path),
        "status": info.status,
        "problem": info.problem or None,
        "step": info.step,
        "metrics": dict(info.metrics),
        "aliases": listing.aliases_of(info),
        "sequence": info.sequence if readable else None,
        "incarnation": info.incarnation if readable else None,
        "current": info.is_current if readable else None,
        "time": info.time if readable else None,
        "run": info.run if readable else None,
        "world_size": info.world_size or None,
        "bytes": info.nbytes if readable else None,
        "own_bytes": listing.own[info.tag] if readable else None,
    }


def _print_tree(trees: TreeListing, listing: RunListing, leftovers: Sequence[StaleDirectory]) -> None:
    """Print the graph, after a table of the rest: corrupt checkpoints, and leftovers."""
    unread = replace(listing, checkpoints=[info for info in listing.checkpoints if info.status != "complete"])
    if unread.checkpoints or leftovers:
        _print_table(unread, leftovers)
    trees.print_graph(terminal_console(), listing)


def _print_table(listing: RunListing, leftovers: Sequence[StaleDirectory]) -> None:
    out = terminal_console()
    out.print(build_table(listing, leftovers), end="")
    for info in listing.checkpoints:
        if info.problem:
            out.print(f"{escape_control_characters(info.tag)}: {escape_control_characters(info.problem)}", style="red")
    for leftover in listing.leftovers:
        if leftover.is_whole:
            name = escape_control_characters(leftover.name)
            out.print(
                f"{name}: a whole checkpoint that no tag means; prune --leftovers says how to keep it", style="dim"
            )
    for name in listing.parts:
        out.print(
            f"{escape_control_characters(name)}: a part of a checkpoint, without its manifest: a copy or a removal was "
            "interrupted",
            style="dim",
        )
    if leftovers:
        out.print("unfinished: a save that is still running, or was interrupted", style="dim")
