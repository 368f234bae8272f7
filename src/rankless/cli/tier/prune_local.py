"""``rankless prune --local``: removes generations of the local tier of a host that nothing needs any more.

:mod:`rankless.cli.prune` calls it, in one process of a host, while jobs may be running.
"""

from __future__ import annotations

from rankless.cli.output import print_json
from rankless.cli.tier.select_generations import describe_state, find_folder
from rankless.observe.terminal import escape_control_characters, terminal_console
from rankless.observe.units import format_count, format_size
from rankless.tier.host_inspection import HostGeneration, list_generations


def prune_tier(run: str, local: str, *, with_undrained: bool, dry_run: bool, as_json: bool) -> None:
    """Remove the generations that are in the run directory, retired or superseded, and the slots of dead processes.

    Generations stay if a living process has parts of them. ``with_undrained``: remove generations that are only here,
    too. Raises the errors of :func:`find_folder`.
    """
    path, folder = find_folder(run, local)
    own = {*folder.list_parts(), *folder.list_commons()}
    generations = [one for one in list_generations(path, folder) if one.key in own]
    removable = [one for one in generations if not one.is_used and (with_undrained or _is_superfluous(one))]
    kept = [one for one in generations if one not in removable]
    keys = {one.key for one in kept}
    slots = folder.find_abandoned_slots(lambda key: key in keys)
    if not dry_run:
        gone = {one.key for one in removable}
        folder.remove_generations(lambda key: key not in gone)
    names = [one.name for one in removable]
    if as_json:
        report = {"generations": names, "slots": sorted(slots), "kept": [one.name for one in kept]}
        print_json({**report, "bytes": sum(slots.values()), "dry_run": dry_run})
        return
    out, action = terminal_console(), "would remove" if dry_run else "removed"
    for one in removable:
        why = "the run directory has it" if one.is_durable else describe_state(one)
        out.print(f"{action} {escape_control_characters(one.name)}: {why}")
    for one in kept:
        why = "a living process uses it" if one.is_used else "the run directory has neither it nor a newer one"
        out.print(f"kept {escape_control_characters(one.name)}: {why}")
    total = format_count(len(removable), "checkpoint"), format_count(len(slots), "file")
    out.print(f"{action} {total[0]} and {total[1]}, {format_size(sum(slots.values()))}", style="dim")


def _is_superfluous(generation: HostGeneration) -> bool:
    return generation.is_durable or generation.is_retired or generation.is_superseded or generation.is_outdated
