"""Names of hidden directories in a run. They are not checkpoints; their name says in which state they are."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

#: ``partial``: a save in progress, or an interrupted one. ``replaced``: a checkpoint that another save replaced.
#: ``removed``: a checkpoint that is being deleted. ``corrupt``: one that a load found corrupt, kept for inspection.
State = Literal["partial", "replaced", "removed", "corrupt"]

_NAME = re.compile(
    r"\.(?P<tag>.+)\.(?P<run>[0-9a-f]{16})\.(?P<id>[0-9a-f]{16})\.(?P<state>partial|replaced|removed|corrupt)"
)


class HiddenName(NamedTuple):
    """The tag, run, checkpoint id and state of a hidden directory."""

    tag: str
    run: str
    id: str
    state: State

    @property
    def name(self) -> str:
        """The directory's name."""
        return f".{self.tag}.{self.run}.{self.id}.{self.state}"

    def with_state(self, state: State) -> HiddenName:
        """Return the same name in another state."""
        return self._replace(state=state)


def parse_hidden_name(name: str) -> HiddenName | None:
    """Parse a ``HiddenName.name``. Return ``None`` for any other name."""
    match = _NAME.fullmatch(name)
    return HiddenName(match["tag"], match["run"], match["id"], match["state"]) if match else None  # type: ignore[arg-type]
