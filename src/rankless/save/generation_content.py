"""The content of a drain: a generation that an earlier job has left in the local tier, after this one has loaded it.

The ranks of this job may be others, in another number. So each part is written by a rank of a host that holds it, as
the table of the part says. Pages of files that lie in parts of several hosts are sent to rank 0, which writes them: two
hosts must not write one page.

:class:`~rankless.run_directory.RunDirectory` runs it on all ranks, in the background, after a load from the tier and in
``finalize()``; :mod:`rankless.save.offline_drain` runs it in one process. The bytes must be those that the tables of
the parts have CRCs of: the commit compares.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace

from rankless.engine.comm.session import RankGroup, WritingRanks
from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.engine.integrity.crc_gather import HashedResult
from rankless.engine.io.requests import Fragments, MoveRanges, OnBytesMoved
from rankless.engine.io.staging_memory import Arena
from rankless.engine.io.write import write_file_ranges
from rankless.engine.plan.file_ranges import FileRange
from rankless.engine.plan.save_plan import SavePlan
from rankless.engine.plan.writer_cells import CellGrain
from rankless.engine.plan.writer_cells_of_parts import CellLayout, HeldBytes, plan_transfers
from rankless.errors import CorruptCheckpointError, RanklessError, StorageError
from rankless.observe.events import Event, OnEvent
from rankless.observe.reporter import EventReporter
from rankless.ondisk.manifest import FileRecord, Manifest
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.journal import append_entry, describe_event
from rankless.run.retention import Retention
from rankless.save.base_checkpoint import KnownRun
from rankless.save.drain_attempts import begin_attempt, retry_drain, warn_of_drain
from rankless.save.run_output import NewTag, RunOutput, open_output
from rankless.save.save_operation import SavedShare
from rankless.storage.aligned_memory import Bytes
from rankless.storage.direct_io import SECTOR_BYTES, BufferedWriter
from rankless.storage.mapped_file import map_to_read
from rankless.storage.writer_pool import WriterPool
from rankless.tier.assembled_generation import Assembly
from rankless.tier.held_parts import HeldParts
from rankless.tier.job import TierJob
from rankless.tier.slots import Slot

#: Bytes of a file: its number, the offset, the bytes.
_Edge = tuple[int, int, bytes]

_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True)
class DrainOptions:
    """The options of a drain: the reaction to a failure, the checkpoints that are kept after it, and the listener."""

    on_failure: str
    keep: Retention | None
    on_event: OnEvent


class GenerationContent:
    """An assembled generation that becomes a checkpoint of the run: a save without tensors of the caller."""

    completed_locally: None = None

    def __init__(
        self, ranks: RankGroup, timeout: float, tier: TierJob, assembly: Assembly, options: DrainOptions
    ) -> None:
        self.share = SavedShare(ranks, timeout)
        #: Whether the parts are mapped: they are written after the call has returned.
        self.has_follow_up = False
        self._tier, self._assembly, self._generation = tier, assembly, assembly.generation
        self._options = options
        self._label = assembly.generation.common.label
        self._reporter = EventReporter(
            self.path,
            self._forward_event,
            is_coordinator=self.share.session.rank == COORDINATOR_RANK,
            began=time.perf_counter(),
        )
        #: The slots of this process with parts of the generation.
        self._slots: list[Slot] = []
        self._output = self._open_output(0)
        #: The bytes of the parts that this rank writes: they stay mapped if a newer generation replaces this one.
        self._memory: dict[int, Bytes] = {}
        self._held = HeldParts({}, {})
        self._is_draining = False
        self.share.copied.set()

    def _open_output(self, attempt: int) -> RunOutput:
        label, tier = self._label, self._tier
        new = NewTag(
            tier.run,
            label.manifest.tag,
            label.replaces,
            keep=self._options.keep,
            tier=tier,
            incremental=label.keep_full_every > 1,
            keep_full_every=label.keep_full_every,
        )
        # Whether the store honours conditions was asked by the job that has saved.
        ranks, known = WritingRanks(self.share.ranks, self.share.session, attempt), KnownRun(has_checked_store=True)
        return open_output(new, ranks, known)

    @property
    def path(self) -> Path:
        """The path of the checkpoint in the run directory."""
        return self._tier.run / self._label.manifest.tag

    def _forward_event(self, event: Event) -> None:
        """Write an event into the journal, on rank 0, and call the listener."""
        entry = describe_event(event, time.time()) if self.share.session.rank == COORDINATOR_RANK else None
        if entry is not None:
            manifest, size = self._label.manifest, self.share.session.size
            append_entry(
                self._tier.run,
                msgspec.structs.replace(
                    entry,
                    step=manifest.step,
                    run=manifest.run,
                    world_size=size,
                    incarnation=manifest.incarnation,
                    sequence=manifest.sequence,
                ),
            )
        self._options.on_event(event)

    def prepare(self) -> None:
        """Map the parts that this rank writes.

        Called in the thread of the caller.
        """
        self._tier.begin_drain()
        self._is_draining = True
        self._slots = self._tier.pin_generation(self._label.key)
        self.has_follow_up = True
        self.share.session.run_on_all("preparing the drain", self._map_parts)

    def _map_parts(self) -> None:
        for part, table in self._generation.tables.items():
            if self._assembly.rank_that_drains(part) == self.share.session.rank:
                try:
                    self._memory[part] = map_to_read(self._assembly.path_of(part), table.nbytes)
                except StorageError:
                    self._tier.check_not_replaced()  # a later job removes generations that it does not load
                    raise
        self._held = HeldParts(self._generation.tables, self._memory)

    def choose_copies(self, arena: Arena) -> None:
        """See :class:`Content`: all bytes are in the tier."""

    def verify_copies(self) -> None:
        """See :class:`Content`: nothing was copied."""

    def write_and_commit(self) -> CheckpointInfo:
        """Return the description of the checkpoint, which is complete in the tier."""
        return CheckpointInfo.of(self.path, self._label.manifest)

    def mark_returned(self) -> float:
        """See :class:`Content`."""
        return self._reporter.mark_returned()

    def roll_back(self, error: BaseException) -> None:
        """See :class:`Content`."""
        self._output.discard()
        if self._is_draining:
            self._end_drain(None)
        self._reporter.report_failed(error)

    def follow_up(self) -> CheckpointInfo:
        """Write the assembled bytes into the run directory, and try again if that fails.

        Called on all ranks, in the thread of the drain.
        """
        drained: CheckpointInfo | None = None
        warn = partial(warn_of_drain, self.path, self.share.session) if self._options.on_failure == "warn" else None
        try:
            drained = retry_drain(self._drain_once, self._note_failure, warn)
        finally:
            self._end_drain(drained)
        return drained or CheckpointInfo.of(self.path, self._label.manifest)

    def _end_drain(self, drained: CheckpointInfo | None) -> None:
        self._is_draining = False
        self._memory.clear()
        self._held = HeldParts({}, {})
        for slot in self._slots:
            self._tier.slots.unpin(slot)
        self._slots = []
        self._tier.end_drain(None if drained is None else self._label.key, drained)

    def _note_failure(self, error: RanklessError, attempt: int) -> None:
        self._output.discard()
        self._reporter.report_drain_failed(error, attempt, self._tier.undrained_seconds)

    def _drain_once(self, attempt: int) -> CheckpointInfo:
        """Write all parts into an output that no other attempt has, and commit it, unless the checkpoint is there."""
        label, output = self._label.manifest, self._open_output(attempt)
        self._output = output

        def prepare() -> bytes:
            held, plan = self._held, self._plan_parts(output.grain)
            return output.prepare(plan, witness=self._find_witness(), bytes_of=lambda _: held)

        if not begin_attempt(self.share.session, output, label, prepare, lambda: self._generation.manifest.files):
            return CheckpointInfo.of(self.path, label)
        self.share.plan = output.omit_unchanged(trusts_versions=False)
        self._reporter.begin_phase("write")
        nbytes = sum(self._generation.tables[part].nbytes for part in self._memory)
        info = output.write(self, self._reporter.progress_counter("save", nbytes).add)
        self._reporter.report_saved(self.path, info.step, info.nbytes, output.shared_nbytes)
        output.remove_old()
        return info

    def _find_witness(self) -> int | None:
        """Return the first rank on another host than rank 0, if there is one."""
        host_of = self._assembly.host_of
        return next((rank for rank, host in enumerate(host_of) if host != host_of[0]), None)

    def _plan_parts(self, grain: CellGrain | None) -> SavePlan:
        """Return the plan of this rank: its ranges and, for pieces with one writer, the bytes that ranks pass on."""
        session = self.share.session
        plan = replace(self._generation.plan, file_ranges=self._held.file_ranges, rank_order=range(session.size))
        if grain is None:
            return plan
        moved = plan_transfers(self._list_held(), CellLayout(plan.files, grain, session.size), session.rank)
        return replace(
            plan,
            sent=moved.sent,
            received=moved.received,
            needs_exchange=moved.needs_exchange,
        )

    def _list_held(self) -> HeldBytes:
        """Return which rank holds which bytes of files."""
        rows = [table.rows for table in self._generation.tables.values()]
        holders = [self._assembly.rank_that_drains(part) for part in self._generation.tables]
        files, starts, sizes = (
            np.concatenate([column.astype(np.int64) for column in columns])
            for columns in (
                [row.file for row in rows],
                [row.offset for row in rows],
                [row.stop - row.start for row in rows],
            )
        )
        return HeldBytes(files, starts, sizes, np.repeat(np.array(holders, np.int64), [len(row.file) for row in rows]))

    def write_files(self, folder: Path, on_moved: OnBytesMoved) -> HashedResult:
        """See :class:`SavedContent`. The payload has the bytes in pages that other hosts write, too."""
        ranges, edges, held = self.share.plan.file_ranges, list[FileRange](), self._held
        if self._assembly.is_spread:
            ranges, edges = split_at_pages(ranges)
        write_file_ranges(self._list_files(folder), ranges, lambda _: held, on_moved)
        fragments: Fragments = {}
        for part in self._memory:
            for tensor, of_tensor in self._generation.tables[part].rows.to_fragments().items():
                fragments.setdefault(tensor, []).extend(of_tensor)
        edge_bytes: list[_Edge] = [
            (edge.file, edge.offset, held.view(edge.local, edge.local + edge.stop - edge.start).tobytes())
            for edge in edges
        ]
        return HashedResult(fragments, _encode(edge_bytes))

    def begin_commit(self, folder: Path | None = None, payloads: Sequence[bytes] = ()) -> None:
        """See :class:`SavedContent`."""
        self._reporter.begin_phase("commit")
        if folder is not None:
            of_ranks = [msgspec.msgpack.decode(raw, type=list[_Edge]) for raw in payloads]
            self._write_edges(folder, list(itertools.chain(*of_ranks)))

    def _write_edges(self, folder: Path, edges: Sequence[_Edge]) -> None:
        with WriterPool(self._list_files(folder), BufferedWriter) as writers:
            for number, offset, data in edges:
                writers.write(number, offset, memoryview(data))
            writers.sync()

    def _list_files(self, folder: Path) -> list[Path]:
        return [folder / file.path for file in self._generation.plan.files]

    def move_share(self, move: MoveRanges) -> bytes:
        """See :class:`SavedContent`."""
        held = self._held
        move(self.share.plan.file_ranges, lambda _: held)
        return b""

    def build_small_files(self, payloads: Sequence[bytes]) -> Mapping[str, bytes]:
        """See :class:`SavedContent`."""
        del payloads
        return self._generation.common.small_files

    def make_manifest(self, files: dict[str, FileRecord]) -> Manifest:
        """See :class:`SavedContent`. Raises ``CorruptCheckpointError`` if the tables say other bytes."""
        if self._output.grain is None:  # the records are made from the tables
            return msgspec.structs.replace(self._label.manifest, files=files)
        expected = self._generation.manifest
        wrong = [name for name, record in files.items() if expected.files.get(name) != record]
        if wrong:
            raise CorruptCheckpointError(f"{wrong[0]} of {self.path} has changed in the local tier")
        return expected


def split_at_pages(ranges: Sequence[FileRange]) -> tuple[list[FileRange], list[FileRange]]:
    """Return the parts of ranges in pages of files that they fill, and the other parts.

    For example, with pages of 4096 bytes, bytes 4000 to 9000 of a file fill the page from 4096 to 8192.
    """
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
