"""``rankless rollback``: lets a run go on from an older checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from rankless.cli.checkpoint_argument import check_run
from rankless.cli.completion import complete_checkpoints
from rankless.cli.output import print_json
from rankless.observe.terminal import escape_control_characters, terminal_console
from rankless.observe.units import format_count
from rankless.run.rollback import roll_back
from rankless.storage.object_path import parse_location


def rollback(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder.", autocompletion=complete_checkpoints)],
    tag: Annotated[str, typer.Argument(metavar="TAG", help="The checkpoint to go on from.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Let a run go on from an older checkpoint: the next job resumes there.

    Later checkpoints of the run are abandoned. They stay, and can be loaded, until a retention policy or prune removes
    them. If their steps are saved again, they get other tags: "step_20" becomes "step_20@3". A job that is still
    running fails at its next save.
    """
    path = parse_location(run)
    check_run(path)
    latest, later = roll_back(path, tag)
    abandoned = [info.tag for info in later]
    if as_json:
        print_json({"latest": latest.tag, "abandoned": abandoned})
        return
    shown = escape_control_characters(", ".join(abandoned[:5])) + (", ..." if abandoned[5:] else "")
    count = format_count(len(abandoned), "later checkpoint")
    more = f"; {count} abandoned: {shown}" if abandoned else ""
    terminal_console().print(f"the run goes on from {escape_control_characters(latest.tag)}{more}")
