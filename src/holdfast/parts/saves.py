"""The saves of parts that this process has under way, with what is kept from one to the next."""

from __future__ import annotations

import time
from pathlib import Path

import torch.distributed as dist

from holdfast.engine.ranks import Ranks, current_group
from holdfast.engine.stage import Arena
from holdfast.garbage import uncollected
from holdfast.handle import SaveHandle, ended, in_background
from holdfast.parts.request import PartRequest
from holdfast.parts.saving import PartSave


class Saves:
    """One save of a path is under way at a time; the next one waits for it, and raises what went wrong with it.

    There are as many arenas as saves were ever under way together, each for one of them at a time.
    """

    def __init__(self) -> None:
        self._flights: dict[Path, SaveHandle[Path]] = {}
        self._arenas: list[tuple[Arena, SaveHandle[Path]]] = []
        self._ranks: Ranks | None = None

    def save(
        self, request: PartRequest, group: dist.ProcessGroup | None, timeout: float, *, use_async: bool
    ) -> SaveHandle[Path]:
        """Save one part, on all ranks. With ``use_async`` it is copied when this returns, and written afterwards."""
        started = time.perf_counter()
        self.finish(request.place.path)
        save = PartSave(request, self.ranks(group), timeout)
        with uncollected(), save.undone_on_failure():
            save.begin()
            if not use_async:
                path = save.finish()
                save.part()
                return SaveHandle(save.path, time.perf_counter() - started, ended(path))
            arena = self._free_arena()
            save.stage(arena)
            done = in_background(save)
        handle = SaveHandle(save.path, time.perf_counter() - started, done)
        self._arenas = [(one, user) for one, user in self._arenas if one is not arena] + [(arena, handle)]
        self._flights[save.path] = handle
        return handle

    def _free_arena(self) -> Arena:
        return next((arena for arena, user in self._arenas if user.done()), Arena())

    def finish(self, path: Path) -> None:
        """Wait for the save of a path that is under way. Raises what went wrong with it, once."""
        handle = self._flights.get(path)
        if handle is None:
            return
        try:
            handle.wait()
        finally:
            if handle.done():  # and not where the wait was interrupted
                del self._flights[path]

    def finish_all(self) -> None:
        """Wait for all. When they have ended, raises what went wrong with the first that failed."""
        errors: list[Exception] = []
        for path in list(self._flights):
            try:
                self.finish(path)
            except Exception as error:  # noqa: BLE001 - raised when all have ended
                errors.append(error)
        if errors:
            raise errors[0]

    def ranks(self, process_group: dist.ProcessGroup | None) -> Ranks:
        """The ranks of a group; the same as last time where it is the same group."""
        if self._ranks is None or self._ranks.group is not current_group(process_group):
            self._ranks = Ranks(process_group)
        return self._ranks
