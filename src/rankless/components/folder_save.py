"""A save of one component on a disk: all ranks write into files in a pending directory, which rank 0 renames."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rankless.components.component_files import FileSet
from rankless.components.component_output import ComponentOutput
from rankless.components.component_request import ComponentRequest
from rankless.components.component_save import ComponentSave, OpenedOutput
from rankless.engine.comm.session import RankGroup
from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.engine.integrity.crc_gather import HashedResult, vote_with_fragments
from rankless.engine.io.requests import Fragments
from rankless.engine.io.upload_target import FileFrame
from rankless.engine.plan.writer_cells import CellGrain
from rankless.run.pending_lock import confirm_lock


class FolderComponentSave(ComponentSave):
    """A save of one component into a file or a folder of a file system."""

    def __init__(self, request: ComponentRequest, ranks: RankGroup, timeout: float) -> None:
        super().__init__(request, ranks, timeout)
        self._output: ComponentOutput | None = None

    def _open_files(self, files: FileSet, frames: Sequence[FileFrame]) -> OpenedOutput:
        """See :class:`ComponentSave`. Rank 0 writes the bytes of no tensor, so the others need not know them."""
        self._output = ComponentOutput(self._request.destination, files, frames)
        return OpenedOutput([FileFrame(frame.size) for frame in frames], folder=str(self._output.folder))

    def _choose_cells(self, host_of: Sequence[int]) -> tuple[Sequence[int], CellGrain | None]:
        """See :class:`ComponentSave`."""
        return host_of, None

    def write_and_commit(self) -> Path:
        """Write the tensors. Rank 0 publishes the files when all ranks have written."""
        layout = self._layout

        def write_shards() -> HashedResult:
            if self._session.rank != COORDINATOR_RANK:
                confirm_lock(Path(layout.opened.folder))
            return HashedResult(self._writer.write(Path(layout.opened.folder), layout.files, self._staged))

        def publish_files(fragments: Fragments, _: list[bytes]) -> bytes:
            if self._output is not None:
                self._output.publish(self._fragments_by_name(fragments))
            return b""

        vote_with_fragments(self._session, "writing", write_shards, publish_files, self._plan.rank_order)
        return self.path

    def _roll_back(self, error: BaseException) -> None:
        del error  # the caller raises it
        if self._output is not None:
            self._output.discard()
