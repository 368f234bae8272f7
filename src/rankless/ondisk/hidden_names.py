"""Names of hidden directories, lock files and pins in a run. They are no checkpoints; their name says what they are.

``run/`` makes the names on rank 0, and clean-ups of any job parse them. Names in run directories are of all versions: a
form that is not parsed any more stays there for ever, and a new one is not recognized by older jobs.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

#: ``partial``: a save in progress, or an interrupted one. ``replaced``: a checkpoint that another save replaced.
#: ``removed``: a checkpoint that is being deleted. ``corrupt``: one that a load found corrupt, or that has no manifest,
#: kept for inspection. ``lock``: no directory, but the lock file of the ``partial`` one. ``pin``: a file too, of a
#: process that needs the checkpoint; its id is the id of the pin.
State = Literal["partial", "replaced", "removed", "corrupt", "lock", "pin"]

#: The file with statistics of a checkpoint, which is put into its folder after the save, and is not in its manifest.
STATISTICS = ".statistics"

#: The object in a folder in an object store that is being deleted, because its save seems to be dead.
REMOVED = ".removed"

_NAME = re.compile(
    r"\.(?P<tag>.+)\.(?P<run>[0-9a-f]{16})\.(?P<id>[0-9a-f]{16})\.(?P<state>partial|replaced|removed|corrupt|lock|pin)"
)


class HiddenName(NamedTuple):
    """The tag, run, checkpoint id and state of a hidden directory, or of a lock file."""

    tag: str
    run: str
    id: str
    state: State

    @property
    def name(self) -> str:
        """The name of the directory or file, for example ``.step_100.RUN.ID.partial`` with 16 digits for RUN and ID."""
        return f".{self.tag}.{self.run}.{self.id}.{self.state}"

    def with_state(self, state: State) -> HiddenName:
        """Return the same name in another state."""
        return self._replace(state=state)


def parse_hidden_name(name: str) -> HiddenName | None:
    """Parse a ``HiddenName.name``. Return ``None`` for any other name."""
    match = _NAME.fullmatch(name)
    return HiddenName(match["tag"], match["run"], match["id"], match["state"]) if match else None  # type: ignore[arg-type]
