"""The saves of parts, and the ranks that they were made with."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from holdfast.components.operation import ComponentSave
from holdfast.components.request import ComponentRequest
from holdfast.engine.comm.session import RankGroup, current_process_group
from holdfast.save.background import background_saves
from holdfast.save.handle import SaveHandle


class PendingSaves:
    """One save of a path is under way at a time; the next one waits for it, and raises what went wrong with it."""

    def __init__(self) -> None:
        self._ranks: RankGroup | None = None

    def save(
        self, request: ComponentRequest, group: dist.ProcessGroup | None, timeout: float, *, use_async: bool
    ) -> SaveHandle[Path]:
        """Save one part, on all ranks. With ``use_async`` it is copied when this returns, and written afterwards."""
        path = request.place.path
        with background_saves.turn(path, group):
            save = ComponentSave(request, self.ranks(group), timeout)
            return background_saves.run(save, path, group, asynchronous=use_async)

    def ranks(self, process_group: dist.ProcessGroup | None) -> RankGroup:
        """The ranks of a group; the same as last time where it is the same group."""
        if self._ranks is None or self._ranks.group is not current_process_group(process_group):
            self._ranks = RankGroup(process_group)
        return self._ranks
