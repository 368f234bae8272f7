"""``rankless rollback``: lets a run go on from an older checkpoint.

It runs in one process, and claims an incarnation as a job does. The checkpoint is verified before the claim.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankless.cli.checkpoint_argument import check_run
from rankless.cli.completion import complete_checkpoints
from rankless.cli.output import print_json
from rankless.cli.verify_one import verify_checkpoint
from rankless.errors import CorruptCheckpointError, StorageError
from rankless.observe.terminal import escape_control_characters, terminal_console
from rankless.observe.units import format_count
from rankless.run.catalog import find_checkpoint
from rankless.run.rollback import roll_back
from rankless.run.tag_arguments import resolve_tag
from rankless.storage.location import parse_location


def rollback(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder.", autocompletion=complete_checkpoints)],
    tag: Annotated[str, typer.Argument(metavar="TAG", help="The checkpoint to go on from.")],
    verifies: Annotated[bool, typer.Option("--verify/--no-verify", help="Read all of it before.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Let a run go on from an older checkpoint: the next job resumes there.

    All of the checkpoint is read before: if it is corrupt, nothing changes.

    Later checkpoints of the run are abandoned. They stay, and can be loaded, until a retention policy or prune removes
    them. If their steps are saved again, they get other tags: "step_20" becomes "step_20@3". A job that is still
    running fails at its next save.
    """
    path = parse_location(run)
    check_run(path)
    if verifies:
        _check_intact(path, tag)
    latest, later = roll_back(path, tag)
    abandoned = [info.tag for info in later]
    if as_json:
        print_json({"latest": latest.tag, "abandoned": abandoned})
        return
    shown = escape_control_characters(", ".join(abandoned[:5])) + (", ..." if abandoned[5:] else "")
    count = format_count(len(abandoned), "later checkpoint")
    more = f"; {count} abandoned: {shown}" if abandoned else ""
    terminal_console().print(f"the run goes on from {escape_control_characters(latest.tag)}{more}")


def _check_intact(run: Path, tag: str) -> None:
    """Raise ``CorruptCheckpointError`` if the checkpoint is corrupt, or ``StorageError`` if it cannot be read.

    Else the next job would find it out, when the later checkpoints are abandoned already.
    """
    result = verify_checkpoint(find_checkpoint(run, resolve_tag(run, tag)))
    if not result.ok:
        message = (
            f"the run does not go back to {tag!r}: {result.problems[0]}. Choose another checkpoint: `rankless verify "
            "--all` says which are intact. Or pass --no-verify"
        )
        raise CorruptCheckpointError(message) if result.status == "damaged" else StorageError(None, message)
