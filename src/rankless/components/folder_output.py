"""The output of a component on a disk: all ranks write into files in a pending directory, which rank 0 renames."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rankless.components.component_files import FileSet
from rankless.components.component_output import SavedComponent
from rankless.components.destination import Destination
from rankless.components.pending_files import PendingFiles
from rankless.engine.comm.session import Session
from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.engine.integrity.crc_gather import HashedResult, vote_with_fragments
from rankless.engine.io.requests import Fragments
from rankless.engine.io.upload_target import FileFrame
from rankless.run.pending_lock import confirm_lock


class FolderComponentOutput:
    """A :class:`rankless.components.component_output.ComponentOutput` on a file system."""

    #: Any ranks of a host may write next to each other.
    grain = None

    def __init__(self, destination: Destination, session: Session) -> None:
        self._destination, self._session = destination, session
        self._folder = Path()
        #: On rank 0, the files.
        self._pending: PendingFiles | None = None

    def begin(self, files: FileSet, frames: Sequence[FileFrame]) -> bytes:
        """See :class:`ComponentOutput`."""
        self._pending = PendingFiles(self._destination, files, frames)
        return os.fsencode(self._pending.folder)

    def join(self, begun: bytes) -> None:
        """See :class:`ComponentOutput`."""
        self._folder = Path(os.fsdecode(begun))

    def write(self, component: SavedComponent) -> None:
        """See :class:`ComponentOutput`. Rank 0 publishes the files when all ranks have written theirs."""

        def write_share() -> HashedResult:
            if self._session.rank != COORDINATOR_RANK:
                confirm_lock(self._folder)
            return component.write_files(self._folder)

        def publish(fragments: Fragments, _: list[bytes]) -> bytes:
            if self._pending is not None:
                self._pending.publish(component.build_headers(fragments))
            return b""

        vote_with_fragments(self._session, "writing", write_share, publish, component.plan.rank_order)

    def discard(self) -> None:
        """See :class:`ComponentOutput`."""
        if self._pending is not None:
            self._pending.discard()
