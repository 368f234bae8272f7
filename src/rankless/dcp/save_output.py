"""The output of a DCP save: a folder on a file system, or objects in a store.

:class:`~rankless.dcp.storage_writer.FileSystemWriter` has one on every rank. torch calls the writer, so there are no
votes of rankless: errors are sent to rank 0 as results. The metadata must appear last: from then on readers see the
checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from torch.distributed.checkpoint.storage import WriteResult

from rankless.dcp.save_output_folder import FolderOutput
from rankless.dcp.save_output_objects import ObjectOutput
from rankless.dcp.write_results import WrittenItem
from rankless.storage.object_path import ObjectPath


class SaveOutput(Protocol):
    """The output of one save. Rank 0 begins it, each rank adds its files, and rank 0 publishes all of them."""

    @property
    def is_begun(self) -> bool:
        """True on rank 0 between :meth:`begin` and :meth:`publish` or :meth:`discard`."""

    def begin(self, *, overwrite: bool) -> None:
        """Begin the save (rank 0 only). Raises ``TagExistsError`` if something is in the way."""

    def open_folder(self, nbytes: int) -> AbstractContextManager[Path]:
        """Give a folder that this rank writes its files into, with tensors of ``nbytes`` bytes.

        Each rank calls it in torch's ``write_data``.
        """

    def keep_files(self, folder: Path, results: Sequence[WriteResult]) -> list[WriteResult]:
        """Make the files of this rank durable, and return the results with the final names of the files.

        Each rank calls it in torch's ``write_data``.
        """

    def check_files(self, written: Sequence[WrittenItem]) -> None:
        """Raise ``RankMismatchError`` if a file that some rank has written is missing (rank 0 only)."""

    def publish(self, metadata: bytes, encoded_checksums: bytes) -> None:
        """Write the metadata: from then on readers see the checkpoint (rank 0 only)."""

    def discard(self, results: Sequence[WriteResult] = ()) -> None:
        """Remove the written files, after a failure (rank 0 only). ``results`` are the results of all ranks."""


def make_output(path: Path, *, sync_files: bool) -> SaveOutput:
    """Return the output of a save to a path; nothing is created."""
    return ObjectOutput(path) if isinstance(path, ObjectPath) else FolderOutput(path, sync_files=sync_files)
