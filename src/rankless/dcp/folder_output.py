"""The output of a DCP save on a file system: a staging directory that all ranks write into, and rank 0 renames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from torch.distributed.checkpoint.storage import WriteResult

from rankless.dcp.staging import create_staging, find_staging
from rankless.dcp.write_results import WrittenItem, check_all_present
from rankless.errors import StorageError
from rankless.formats.dcp import checksums
from rankless.formats.dcp.folder import METADATA
from rankless.run.staging_dir import StagingDirectory
from rankless.storage import posix


class FolderOutput:
    """The folder of one save. See :class:`rankless.dcp.output.SaveOutput`."""

    def __init__(self, path: Path, *, sync_files: bool) -> None:
        self._path, self._sync_files = path, sync_files
        self._staging: StagingDirectory | None = None

    @property
    def is_begun(self) -> bool:
        """True on rank 0 between :meth:`begin` and :meth:`publish` or :meth:`discard`."""
        return self._staging is not None

    def begin(self, *, overwrite: bool) -> None:
        """Create the staging directory."""
        self._staging = create_staging(self._path, overwrite=overwrite)

    @contextmanager
    def open_folder(self, nbytes: int) -> Iterator[Path]:
        """Give the staging directory that rank 0 has created."""
        del nbytes
        yield find_staging(self._path)

    def keep_files(self, folder: Path, results: Sequence[WriteResult]) -> list[WriteResult]:
        """Make the files of this rank durable."""
        for name in sorted({result.storage_data.info.relative_path for result in results}) if self._sync_files else ():
            posix.sync_tree(folder / name)
        return list(results)

    def check_files(self, written: Sequence[WrittenItem]) -> None:
        """Raise ``RankMismatchError`` if this host does not see a file that some rank has written."""
        check_all_present(self._require_staging().path, written)

    def publish(self, metadata: bytes, encoded_checksums: bytes) -> None:
        """Write the metadata, and rename the staging directory."""
        staging = self._require_staging()
        posix.write_small(staging.path / METADATA, metadata)
        posix.write_small(staging.path / checksums.NAME, encoded_checksums)
        posix.fsync_directory(staging.path)
        staging.replace()
        self._staging = None
        with suppress(StorageError):  # the save is complete; the old checkpoint is hidden, and the next save removes it
            staging.remove_displaced()

    def discard(self, results: Sequence[WriteResult] = ()) -> None:
        """Remove the staging directory, with the files of all ranks."""
        del results
        if self._staging is not None:
            self._staging.discard()
            self._staging = None

    def _require_staging(self) -> StagingDirectory:
        if self._staging is None:
            raise StorageError(f"the save to {self._path} was not started: call prepare_global_plan first")
        return self._staging
