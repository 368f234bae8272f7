"""The output of a conversion on a disk: all ranks write into files in a pending directory, which rank 0 renames.

:class:`~rankless.conversion.pipeline.Conversion` has one on every rank, in the thread of the caller. The rename is the
last step, after all bytes were written, and read back if that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from rankless.conversion.conversion_output import ConvertedContent, RankShare, ReadBack
from rankless.conversion.target import ConversionTarget, FileLayout
from rankless.conversion.work_shares import share_by_cells, share_evenly
from rankless.engine.comm.session import Session
from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.engine.integrity.crc_gather import HashedResult, vote_with_fragments
from rankless.engine.io.requests import Fragments, KnownFragments, OnBytesMoved, ProviderOf
from rankless.engine.io.write import write_file_ranges
from rankless.engine.plan.file_ranges import FileRange
from rankless.errors import CorruptCheckpointError, StorageError
from rankless.process.prepared_types import prepared
from rankless.process.worker_threads import run_in_threads
from rankless.run.cleanup import clean_up
from rankless.run.pending_dir import PendingDirectory
from rankless.run.pending_lock import confirm_lock
from rankless.storage.direct_io import BufferedWriter
from rankless.storage.links_and_clones import FileIdentity, identify_file, make_read_only
from rankless.storage.posix import file_size, fsync_path, sync_tree


@prepared
class _CreatedFiles(msgspec.Struct, frozen=True, array_like=True):
    """The pending directory, and the numbers of the files in it that are complete before anything is written."""

    pending_path: str
    complete: list[int]


class FolderConversionOutput:
    """A :class:`rankless.conversion.conversion_output.ConversionOutput` on a file system."""

    def __init__(self, final: Path, session: Session) -> None:
        self._session, self._pending = session, PendingDirectory(final)  # rank 0's is used
        self._share = RankShare(FileLayout([], {}, []), [])
        #: On rank 0, the files that are links, and their identities when they were linked.
        self._links: dict[Path, FileIdentity | None] = {}
        #: The entry of the pending directory that gets the final path.
        self._entry = ""

    @property
    def pending(self) -> Path:
        """See :class:`ConversionOutput`."""
        return self._pending.path

    def clean_up(self) -> None:
        """See :class:`ConversionOutput`."""
        clean_up(self._pending.final.parent, tag=self._pending.final.name)

    def create(self, target: ConversionTarget, nbytes: int, host_of: Sequence[int]) -> RankShare:
        """See :class:`ConversionOutput`."""
        is_spread = len({*host_of}) > 1
        self._entry = target.output_name

        def create_files(_: list[bytes]) -> bytes:
            self._pending.create_new(nbytes)
            complete = target.create_files()
            self._links = self._identify(target, complete)
            if is_spread:
                # Pages that rank 0 has written must not be written back after other hosts have written next to them.
                sync_tree(self._pending.path)
            return msgspec.msgpack.encode(_CreatedFiles(str(self._pending.path), list(complete)))

        def locate_tensors() -> tuple[FileLayout, FileLayout]:
            if self._session.rank != COORDINATOR_RANK:
                confirm_lock(Path(created.pending_path))
            return target.locate_tensors().split(created.complete)

        _, raw = self._session.vote("preparing", lambda: None, lambda _: b"", create_files)
        created = msgspec.msgpack.decode(raw, type=_CreatedFiles)
        layout, linked = self._session.run_on_all("reading the layout of the new files", locate_tensors)
        rank, size = self._session.rank, self._session.size
        shares = (
            share_by_cells(layout, [file_size(file) for file in layout.files], host_of, rank)
            if is_spread
            else share_evenly(layout, rank, size)
        )
        self._share = RankShare(layout, shares, share_evenly(linked, rank, size))
        return self._share

    def write(self, content: ConvertedContent, on_moved: OnBytesMoved, read_back: ReadBack | None) -> None:
        """See :class:`ConversionOutput`."""
        # Bytes that are read back are written through the page cache, and read from there while the disk gets them.
        open_writer, syncs = (None, True) if read_back is None else (BufferedWriter, False)

        def write_share() -> HashedResult:
            written: Fragments = {}

            def move(file_ranges: Sequence[FileRange], bytes_of: ProviderOf) -> Fragments:
                files = self._share.layout.files
                written.update(write_file_ranges(files, file_ranges, bytes_of, on_moved, open_writer, sync=syncs))
                return written

            report = content.move_share(move)
            if read_back is not None:
                self._sync_beside(read_back)
            return HashedResult(written, report)

        def finish(fragments: KnownFragments, reports: list[bytes]) -> bytes:
            content.finish(fragments, reports)
            return b""

        vote_with_fragments(self._session, "converting", write_share, finish)

    def _sync_beside(self, read_back: ReadBack) -> None:
        """Make the files that this rank has written durable, and read its bytes back meanwhile."""
        files = [self._share.layout.files[file] for file in {share.file for share in self._share.file_ranges}]
        jobs: list[Callable[[], None]] = [read_back, *(partial(fsync_path, file) for file in files)]
        run_in_threads(lambda job: job(), jobs)

    def check_valid(self, target: ConversionTarget) -> None:
        """See :class:`ConversionOutput`."""
        target.open_reader()

    def publish(self) -> None:
        """See :class:`ConversionOutput`."""

        def rename(_: list[bytes]) -> bytes:
            self._check_links()
            self._pending.publish(self._entry)
            for path in self._links:
                with suppress(StorageError):  # the output is there: who writes into it may change its source
                    make_read_only(self._pending.final / path.relative_to(self._pending.path))
            return b""

        self._session.vote("finishing", lambda: None, lambda _: b"", rename)

    def _identify(self, target: ConversionTarget, complete: Collection[int]) -> dict[Path, FileIdentity | None]:
        """Return the identities of the files that are links, on rank 0."""
        files = target.locate_tensors().files if complete else ()
        return {files[number]: identify_file(files[number]) for number in complete}

    def _check_links(self) -> None:
        """Raise ``CorruptCheckpointError`` if a link was changed since it was made: the last step before the rename."""
        for path, identity in self._links.items():
            if identify_file(path) != identity:
                raise CorruptCheckpointError(
                    f"{path.name} was changed by another program while the new checkpoint was about to share it. "
                    "Nothing was written"
                )

    def discard(self) -> None:
        """See :class:`ConversionOutput`."""
        if self._pending.is_locked:
            self._pending.discard()
