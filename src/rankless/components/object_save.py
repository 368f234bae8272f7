"""A save of one component into an object store: all ranks upload parts of the files, as in saves of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rankless.components.component_files import FileSet
from rankless.components.component_request import ComponentRequest
from rankless.components.component_save import ComponentSave, OpenedOutput
from rankless.components.object_output import ObjectComponentOutput, component_files
from rankless.engine.comm.session import RankGroup
from rankless.engine.io import upload_parts
from rankless.engine.io.requests import Fragments, ignore_progress
from rankless.engine.io.upload_target import FileFrame
from rankless.engine.plan.writer_cells import CellGrain
from rankless.save.run_output import RankBytes, WritingRanks
from rankless.save.shared_upload import SharedUpload, abort_uploads
from rankless.storage.object_path import ObjectPath
from rankless.storage.store import Upload


class ObjectComponentSave(ComponentSave):
    """A save of one component to ``path``. No rank needs a disk."""

    def __init__(self, request: ComponentRequest, path: ObjectPath, ranks: RankGroup, timeout: float) -> None:
        super().__init__(request, ranks, timeout)
        self._final = path
        #: On rank 0, the output, and its uploads.
        self._output: ObjectComponentOutput | None = None
        self._begun: list[Upload] = []

    def _open_files(self, files: FileSet, frames: Sequence[FileFrame]) -> OpenedOutput:
        """See :class:`ComponentSave`."""
        self._output = ObjectComponentOutput(self._final, self._request.destination, files)
        ids = self._output.begin(frames)
        paths = component_files(self._final, files.names, folder=self._request.destination.folder)
        self._begun = [Upload(path, upload) for path, upload in zip(paths, ids, strict=True) if upload]
        return OpenedOutput(list(frames), uploads=ids)

    def _choose_cells(self, host_of: Sequence[int]) -> tuple[Sequence[int], CellGrain | None]:
        """See :class:`ComponentSave`. Each rank is a host of its own: a part has one sender."""
        return range(len(host_of)), upload_parts.GRAIN

    def write_and_commit(self) -> Path:
        """Upload the tensors. Rank 0 completes the files when all ranks have uploaded."""
        opened, ranks = self._layout.opened, WritingRanks(self._ranks, self._session)
        paths = component_files(self._final, self._layout.files, folder=self._request.destination.folder)
        upload = SharedUpload(self._plan, ranks, dict(zip(paths, opened.frames, strict=True)), opened.uploads)
        upload.send_parts(self._read_bytes, self._build_headers, ignore_progress)

        def complete() -> bytes:
            upload.complete_uploads()
            if self._output is not None:
                self._output.finish(upload.check_files)
            return b""

        upload.finish(complete)
        return self.path

    def _read_bytes(self) -> RankBytes:
        return RankBytes(*self._writer.ranges_to_upload(self._staged))

    def _build_headers(self, fragments: Fragments, _: Sequence[bytes]) -> list[bytes]:
        """Return the headers of the files, on rank 0. From now on files may become visible."""
        fragments_of = self._fragments_by_name(fragments)
        headers = [file.build_header(fragments_of) for file in self._files]
        if self._output is not None:
            self._output.remove_indexes()
        return headers

    def _roll_back(self, error: BaseException) -> None:
        del error  # the caller raises it
        abort_uploads(self._begun)
