"""Names of folders in a run that are not checkpoints: hidden, with what they are in the name."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

#: A save under way or dead; a checkpoint that another took the place of; one that is being removed; one that a load
#: found corrupt, and that is kept for people to look at.
State = Literal["partial", "replaced", "removed", "corrupt"]

_NAME = re.compile(
    r"\.(?P<tag>.+)\.(?P<run>[0-9a-f]{16})\.(?P<id>[0-9a-f]{16})\.(?P<state>partial|replaced|removed|corrupt)"
)


class HiddenName(NamedTuple):
    """Of which tag, run and checkpoint a hidden folder is, and why it is there."""

    tag: str
    run: str
    id: str
    state: State

    @property
    def name(self) -> str:
        """The folder's name."""
        return f".{self.tag}.{self.run}.{self.id}.{self.state}"

    def now(self, state: State) -> HiddenName:
        """The same in another state."""
        return self._replace(state=state)


def parse_hidden_name(name: str) -> HiddenName | None:
    """The inverse of ``HiddenName.name``; ``None`` for any other name."""
    found = _NAME.fullmatch(name)
    return HiddenName(found["tag"], found["run"], found["id"], found["state"]) if found else None  # type: ignore[arg-type]
