"""``rankless drain``: writes checkpoints that a job has left in the local tier of a host into the run directory.

An epilog of a job calls it on each host, in one process each; :mod:`rankless.save.offline_drain` does the work. It must
not drain a generation that a running job still writes.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from rankless.cli.command_process import leave_on_interrupt
from rankless.cli.output import print_json, print_warning
from rankless.observe.events import ignore_event
from rankless.observe.reporter import with_progress_bar
from rankless.observe.terminal import escape_control_characters, terminal_console

if TYPE_CHECKING:
    from rankless.save.offline_drain import DrainResult

#: The exit code if parts of other hosts are missing.
INCOMPLETE = 3


def drain(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder.")],
    local: Annotated[str, typer.Option("--local", metavar="FOLDER", help="The folder of the local tier on this host.")],
    adopt: Annotated[
        bool, typer.Option("--adopt", help="Write it also if the run's folder was removed, and does not know its run.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Write the newest checkpoint in the local tier of this host into the run's folder, after the job has ended.

    Call it on each host of the job, for example in an epilog. If other hosts have parts of the checkpoint, this one
    puts its own into the run's folder, and the exit code is 3. The last host writes the checkpoint. It may be called
    again, and on all hosts at once. If the job still runs on this host, nothing is done, and the exit code is 1.
    """
    with leave_on_interrupt():
        from rankless.save.offline_drain import drain as drain_host  # noqa: PLC0415 - torch is slow to import
    with with_progress_bar("draining the local tier", ignore_event) as on_event:
        result = drain_host(run, local, adopt=adopt, on_event=on_event)
    for problem in result.problems:
        print_warning(problem)
    if as_json:
        path = None if result.path is None else str(result.path)
        print_json({**asdict(result), "tag": result.tag or None, "path": path})
    else:
        _print_result(result)
    raise typer.Exit(INCOMPLETE if result.status == "waiting" else 0)


def _print_result(result: DrainResult) -> None:
    from rankless.cli.tier.select_generations import format_parts  # noqa: PLC0415 - NumPy is slow to import

    out, tag = terminal_console(), escape_control_characters(result.tag)
    if result.status == "published":
        out.print(f"wrote {escape_control_characters(str(result.path))}")
    elif result.status == "durable":
        out.print(f"{tag} is in the run directory already" if tag else "there is nothing to write")
    else:
        size = len(result.collected) + len(result.missing)
        out.print(f"{tag} waits for parts of other hosts: {format_parts(result.missing, size)} are missing")
        out.print("run this command on the other hosts; the last one writes the checkpoint", style="dim")
