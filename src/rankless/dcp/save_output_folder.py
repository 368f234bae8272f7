"""The output of a DCP save on a file system: a pending directory that all ranks write into, and rank 0 renames.

:class:`~rankless.dcp.storage_writer.FileSystemWriter` calls it in the steps of ``dcp.save``. Files are durable before
the metadata is written, and all of it before the rename.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from torch.distributed.checkpoint.storage import WriteResult

from rankless.dcp.pending_dcp import create_pending, find_pending
from rankless.dcp.reader import checksums_json
from rankless.dcp.reader.dcp_directory import METADATA
from rankless.dcp.write_results import WrittenItem, check_all_present
from rankless.errors import StorageError
from rankless.run.ownership import DCP_FOLDER
from rankless.run.pending_dir import PendingDirectory
from rankless.run.pending_lock import confirm_lock
from rankless.storage import posix


class FolderOutput:
    """The folder of one save. See :class:`rankless.dcp.save_output.SaveOutput`."""

    def __init__(self, path: Path, *, sync_files: bool) -> None:
        self._path, self._sync_files = path, sync_files
        self._pending: PendingDirectory | None = None

    @property
    def is_begun(self) -> bool:
        """True on rank 0 between :meth:`begin` and :meth:`publish` or :meth:`discard`."""
        return self._pending is not None

    def begin(self, *, overwrite: bool) -> None:
        """Create the pending directory."""
        self._pending = create_pending(self._path, overwrite=overwrite)

    @contextmanager
    def open_folder(self, nbytes: int) -> Iterator[Path]:
        """Give the pending directory that rank 0 has created."""
        del nbytes
        folder = find_pending(self._path)
        confirm_lock(folder)
        yield folder

    def keep_files(self, folder: Path, results: Sequence[WriteResult]) -> list[WriteResult]:
        """Make the files of this rank durable."""
        for name in sorted({result.storage_data.info.relative_path for result in results}) if self._sync_files else ():
            posix.sync_tree(folder / name)
        return list(results)

    def check_files(self, written: Sequence[WrittenItem]) -> None:
        """Raise ``RankMismatchError`` if this host does not see a file that some rank has written."""
        check_all_present(self._require_pending().path, written)

    def publish(self, metadata: bytes, encoded_checksums: bytes) -> None:
        """Write the metadata, and rename the pending directory."""
        pending = self._require_pending()
        posix.write_small(pending.path / METADATA, metadata)
        posix.write_small(pending.path / checksums_json.NAME, encoded_checksums)
        posix.fsync_directory(pending.path)
        pending.replace(DCP_FOLDER.check)
        self._pending = None
        with suppress(StorageError):  # the save is complete; the old checkpoint is hidden, and the next save removes it
            pending.remove_displaced()

    def discard(self, results: Sequence[WriteResult] = ()) -> None:
        """Remove the pending directory, with the files of all ranks."""
        del results
        if self._pending is not None:
            self._pending.discard()
            self._pending = None

    def _require_pending(self) -> PendingDirectory:
        if self._pending is None:
            raise StorageError(f"the save to {self._path} was not started: call prepare_global_plan first")
        return self._pending
