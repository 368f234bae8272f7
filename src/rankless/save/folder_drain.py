"""The drain of a generation into a run directory on a file system.

Pages of files that lie in parts of several hosts are sent to rank 0, which writes them: two hosts must not write one
page.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from rankless.engine.comm.session import RankGroup
from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.engine.integrity.crc_gather import HashedResult, vote_with_fragments
from rankless.engine.io.checkpoint_files import CheckpointFiles
from rankless.engine.io.requests import Fragments
from rankless.engine.io.tensor_bytes import TensorBytes
from rankless.engine.io.write import write_file_ranges
from rankless.engine.plan.file_ranges import FileRange
from rankless.errors import (
    CorruptCheckpointError,
    FormatError,
    NoCheckpointError,
    TagExistsError,
)
from rankless.formats.native import read_manifest
from rankless.observe.warning import warn_caller
from rankless.ondisk import manifest
from rankless.ondisk.hidden_names import HiddenName
from rankless.ondisk.manifest import Manifest
from rankless.run.cleanup import clean_up, delete_checkpoints, expired_checkpoints
from rankless.run.history import is_newer
from rankless.run.ownership import checkpoint_of
from rankless.run.pending_dir import PendingDirectory
from rankless.run.pending_lock import confirm_lock
from rankless.run.scan import CheckpointInfo
from rankless.save.generation_drain import DrainOptions, GenerationDrain
from rankless.storage.aligned_memory import Bytes
from rankless.storage.direct_io import SECTOR_BYTES, BufferedWriter
from rankless.storage.filesystem_kind import forget_names
from rankless.storage.writer_pool import WriterPool
from rankless.tier.assembled_generation import Assembly
from rankless.tier.generation import Generation
from rankless.tier.job import TierJob

#: Bytes of a file: its number, the offset, the bytes.
_Edge = tuple[int, int, bytes]

_encode = msgspec.msgpack.Encoder().encode


class FolderDrain(GenerationDrain):
    """The drain of an assembled generation into a run directory on a file system."""

    def __init__(
        self, ranks: RankGroup, timeout: float, tier: TierJob, assembly: Assembly, options: DrainOptions
    ) -> None:
        super().__init__(ranks, timeout, tier, assembly, options)
        self._pending = PendingDirectory(self.path)

    def _discard_attempt(self) -> None:
        if self._pending.is_locked:
            self._pending.discard()

    def _drain_once(self, attempt: int) -> CheckpointInfo:
        """See :class:`GenerationDrain`. Each attempt has a pending directory of its own."""
        del attempt
        _, raw = self._session.vote("preparing the drain", lambda: None, lambda _: b"", lambda _: self._open_pending())
        if not raw:  # it is there already
            return CheckpointInfo.of(self.path, self._label.manifest)
        self._set_attempt(raw.decode())
        committed = self._write_files()
        info = CheckpointInfo.of(self.path, committed)
        self._reporter.report_saved(info.path, info.step, info.nbytes, 0)
        return info

    def _open_pending(self) -> bytes:
        if self._is_written():
            return b""
        self._tier.check_not_fenced(self._label.manifest.tag)
        attempt = secrets.token_hex(8)
        self._set_attempt(attempt)
        clean_up(self._tier.run, self._label.manifest.run)
        self._pending.create(sum(file.size for file in self._generation.plan.files))
        self._files.create_files()
        return attempt.encode()

    def _set_attempt(self, attempt: str) -> None:
        if self._pending.name.id != attempt:
            self._pending = PendingDirectory(
                self.path, HiddenName(self._label.manifest.tag, self._label.manifest.run, attempt, "partial")
            )

    @property
    def _files(self) -> CheckpointFiles:
        return CheckpointFiles(self._pending.path, self._generation.plan)

    def _write_files(self) -> Manifest:
        self._reporter.begin_phase("write")

        def write_parts() -> HashedResult:
            if self._session.rank != COORDINATOR_RANK:
                confirm_lock(self._pending.path)
            fragments: Fragments = {}
            edges: list[_Edge] = []
            for part, memory in self._memory.items():
                edges += self._write_part(self._generation, part, memory)
                for tensor, of_tensor in self._generation.tables[part].rows.to_fragments().items():
                    fragments.setdefault(tensor, []).extend(of_tensor)
            return HashedResult(fragments, _encode(edges))

        def commit(fragments: Fragments, payloads: list[bytes]) -> bytes:
            self._reporter.begin_phase("commit")
            edges = [edge for raw in payloads for edge in msgspec.msgpack.decode(raw, type=list[_Edge])]
            self._write_edges(edges)
            label = self._label.manifest
            finished = self._files.finalize(
                fragments,
                self._generation.common.small_files,
                lambda files: msgspec.structs.replace(label, files=files),
            )
            self._publish(CheckpointInfo.of(self.path, finished))
            self._remove_old_checkpoints()
            return manifest.encode_manifest(finished)

        order = range(self._session.size)
        decision = vote_with_fragments(self._session, "writing", write_parts, commit, order)
        return manifest.decode_manifest(decision, manifest.NAME)

    def _write_part(self, generation: Generation, part: int, memory: Bytes) -> list[_Edge]:
        """Write the bytes of a part, and return those in pages that other hosts may write, too."""
        ranges = [file_range for file_range, _ in generation.tables[part].rows.iter_ranges()]
        edges: list[FileRange] = []
        if self._assembly.is_spread:
            ranges, edges = split_at_pages(ranges)
        provider = TensorBytes(torch.from_numpy(memory))
        files = [self._pending.path / file.path for file in generation.plan.files]
        on_moved = self._reporter.progress_counter("save", generation.tables[part].nbytes).add
        write_file_ranges(files, ranges, lambda _: provider, on_moved)
        return [
            (edge.file, edge.offset, memory[edge.local : edge.local + edge.stop - edge.start].tobytes())
            for edge in edges
        ]

    def _write_edges(self, edges: Sequence[_Edge]) -> None:
        paths = [self._pending.path / file.path for file in self._generation.plan.files]
        with WriterPool(paths, BufferedWriter) as writers:
            for number, offset, data in edges:
                writers.write(number, offset, memoryview(data))
            writers.sync()

    def _publish(self, info: CheckpointInfo) -> None:
        # This process may have been stopped while another job continued the run.
        self._tier.check_not_fenced(self._label.manifest.tag)
        try:
            if self._label.replaces:
                self._pending.replace_tag(info, self._check_newest)
                self._pending.remove_displaced()
            else:
                self._pending.publish_tag(info)
            self._tier.check_published(info)
        except TagExistsError:
            if not self._is_written():
                raise
            self._pending.discard()

    def _is_written(self) -> bool:
        """Return whether the run directory has the checkpoint. Raises ``StorageError`` if that cannot be found out."""
        forget_names(self.path.parent)
        try:
            return read_manifest(self.path).id == self._label.manifest.id
        except (CorruptCheckpointError, FormatError, NoCheckpointError):
            return False

    def _remove_old_checkpoints(self) -> None:
        """Remove the checkpoints that are not kept. Failures only warn: the new one is committed."""
        if self._options.keep is None:
            return
        try:
            label = self._label.manifest
            expired = expired_checkpoints(self._tier.run, label.run, self._options.keep, incarnation=label.incarnation)
            list(delete_checkpoints(expired))
        except Exception as error:  # noqa: BLE001 - the checkpoint is committed, whatever a policy or the disk raises
            warn_caller(f"the checkpoint is saved, but an old one could not be removed: {error}")

    def _check_newest(self, folder: Path) -> None:
        """Raise ``TagExistsError`` if the checkpoint in ``folder`` is newer than this one, or this one."""
        self._tier.check_replaces(self.path, folder)
        checkpoint_of(self._label.manifest.tag).check(folder)
        with suppress(CorruptCheckpointError, FormatError, NoCheckpointError):
            existing = CheckpointInfo.of(folder, read_manifest(folder))
            own = CheckpointInfo.of(self.path, self._label.manifest)
            if existing.id == own.id or is_newer(existing, own):
                raise TagExistsError(f"{self.path} is a newer checkpoint; it was left as it is")


def split_at_pages(ranges: Sequence[FileRange]) -> tuple[list[FileRange], list[FileRange]]:
    """Return the parts of ranges in pages of files that they fill, and the other parts."""
    whole: list[FileRange] = []
    edges: list[FileRange] = []
    for run in _contiguous_runs(ranges):
        first = -(-run[0].offset // SECTOR_BYTES) * SECTOR_BYTES
        last = (run[-1].offset + run[-1].stop - run[-1].start) // SECTOR_BYTES * SECTOR_BYTES
        for file_range in run:
            low, high = file_range.offset, file_range.offset + file_range.stop - file_range.start
            for start, stop, into in (
                (low, min(high, first), edges),
                (max(low, first), min(high, last), whole),
                (max(low, first, last), high, edges),
            ):
                if start < stop:
                    into.append(file_range.slice_bytes(start - low, stop - start))
    return whole, edges


def _contiguous_runs(ranges: Sequence[FileRange]) -> Iterator[list[FileRange]]:
    """Yield ranges that follow each other in a file, in lists."""
    run: list[FileRange] = []
    for file_range in sorted(ranges, key=lambda one: (one.file, one.offset)):
        if run:
            last = run[-1]
            if (last.file, last.offset + last.stop - last.start) != (file_range.file, file_range.offset):
                yield run
                run = []
        run.append(file_range)
    if run:
        yield run
