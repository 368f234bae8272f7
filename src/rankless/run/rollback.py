"""A rollback without a job: the next job continues an older checkpoint, and the later ones are abandoned."""

from __future__ import annotations

import secrets
from pathlib import Path

from rankless.errors import NoCheckpointError
from rankless.run.catalog import list_checkpoints_strictly
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.claims import JobHistory, LoadedBase, claim
from rankless.run.tag_arguments import Best, resolve_tag

#: The name of the command in the history, and in messages of the jobs that it supersedes.
_COMMAND = "rankless rollback"


def roll_back(run: Path, tag: str | Best) -> tuple[CheckpointInfo, list[CheckpointInfo]]:
    """Make a checkpoint the latest of its run. Return it, and the checkpoints that are abandoned by that.

    ``rankless rollback`` calls it, in a process of its own. A job that is still running gets ``SupersededError`` at its
    next save. Raises ``NoCheckpointError``.
    """
    resolved = resolve_tag(run, tag)
    complete = [info for info in list_checkpoints_strictly(run) if info.status == "complete"]
    info = next((info for info in complete if info.tag == resolved), None)
    if info is None:
        known = ", ".join(info.tag for info in complete) or "none"
        raise NoCheckpointError(f"there is no checkpoint {resolved!r} in {run} that can be read; there are: {known}")
    base = LoadedBase.of(info, info.tag, None, secrets.token_hex(8))
    claim(run, JobHistory(base=base, command=_COMMAND), complete, warns=False)
    current = {info.id for info in list_checkpoints_strictly(run) if info.is_current}
    return info, [info for info in complete if info.is_current and info.id not in current]
