"""The pending saves of components, and the ranks that they use.

:mod:`rankless.components.component_calls` has one for the process. Every rank calls it, in the thread of the caller.
Two saves of a path at once would replace each other's files.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from rankless.components.component_content import ComponentContent
from rankless.components.component_output import open_component_output
from rankless.components.component_request import ComponentRequest
from rankless.components.destination import Destination
from rankless.engine.comm.process_group_argument import (
    ProcessGroupArgument,
    check_ranks_are_joined,
    current_process_group,
)
from rankless.engine.comm.session import RankGroup
from rankless.observe.spans import span
from rankless.save.background import background_saves
from rankless.save.handle import SaveHandle
from rankless.save.run_save import run_save


class PendingSaves:
    """Runs at most one save of a path at a time. The next one waits for it, and raises its error in the end."""

    def __init__(self) -> None:
        self._ranks: RankGroup | None = None

    def save(
        self, destination: Destination, request: ComponentRequest, group: ProcessGroupArgument, timeout: float
    ) -> SaveHandle[Path]:
        """Save one component to the destination of the request, on all ranks."""
        path = destination.path
        check_ranks_are_joined(group)
        with span("save", "call", path.name), background_saves.path_turn(path, group):
            open_output = partial(open_component_output, destination)
            content = ComponentContent(request, self.rank_group(group), timeout, open_output)
            return run_save(content, path, group, asynchronous=request.async_save)

    def rank_group(self, process_group: ProcessGroupArgument) -> RankGroup:
        """Return the ranks of a process group: the previous object if it is the same group."""
        if self._ranks is None or self._ranks.process_group is not current_process_group(process_group):
            self._ranks = RankGroup(process_group)
        return self._ranks
