"""The writer of one rank's shards: compares replicas, copies tensors into staging memory, writes files.

A :class:`~rankless.save.save_operation.SaveOperation` makes one on every rank for each step. Replicas are compared
before anything is written, and exchanges have the same order on all ranks.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rankless.engine.comm.session import RankGroup, Session
from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.engine.integrity import replica_comparison
from rankless.engine.io.device_streams import begin_copies
from rankless.engine.io.requests import (
    Fragments,
    OnBytesMoved,
    ShardOf,
    hash_fragments,
    ignore_progress,
    merge_fragments,
)
from rankless.engine.io.staging import DeferredCopies, StagedTensors, stage_tensors
from rankless.engine.io.staging_memory import Arena, StagingMemory
from rankless.engine.io.tensor_bytes import TensorBytes
from rankless.engine.io.write import write_file_ranges
from rankless.engine.plan.cell_transfers import cut_out
from rankless.engine.plan.file_ranges import FileRange, count_bytes
from rankless.engine.plan.save_plan import SavePlan
from rankless.errors import RankMismatchError, ReplicaMismatchError, StorageError
from rankless.observe.spans import traced
from rankless.ondisk.block_crcs import Fragment
from rankless.storage.filesystem_kind import forget_missing
from rankless.storage.posix import is_directory

if TYPE_CHECKING:
    from rankless.engine.io.p2p import P2PExchange

#: The most bytes of a save by one rank that are not synced before their headers are written: the save then waits for
#: one commit of the journal less, because rank 0 syncs each file after its header. Linux reports an error of writing
#: back to the next process that syncs the file, also if it was closed meanwhile, until it drops the file from memory.
#: For a few bytes and milliseconds it does not; a large save gains nothing.
_UNSYNCED_BYTES = 16 * 2**20


class ShardWriter:
    """The writer of one rank's share of a save plan. ``tensors`` are the rank's shards, by group and name.

    ``attempt`` counts the writes in a session: an earlier write may have left messages.

    The reads of the methods come after the work that the caller has enqueued on the accelerators with the tensors.
    """

    def __init__(
        self,
        ranks: RankGroup,
        session: Session,
        plan: SavePlan,
        tensors: Mapping[tuple[str, str], TensorBytes],
        attempt: int = 0,
    ) -> None:
        self._ranks, self._session, self._plan, self._tensors = ranks, session, plan, tensors
        self._attempt = attempt

    def _shard_of(self, tensor: int) -> TensorBytes:
        return self._tensors[self._plan.tensors[tensor]]

    @traced("compare replicas", "hash")
    def hash_replicas(self, save: int) -> tuple[bytes, float]:
        """Return digests of the tensors that other ranks hold too, and the number of seconds that hashing took.

        In save number 0 everything is hashed, in others samples of each tensor.

        Each rank calls it in the vote that opens the output, a save of one component in the vote "comparing replicas".
        """
        started = time.perf_counter()
        return replica_comparison.digest_replicas(self._plan, self._shard_of, save), time.perf_counter() - started

    def describe_replica_mismatch(self) -> ReplicaMismatchError:
        """Return an error that names the replicas that differ. All ranks must call this."""
        _, message = self._session.vote(
            "comparing replicas",
            lambda: replica_comparison.replica_details(self._plan, self._shard_of),
            lambda details: details,
            lambda posted: replica_comparison.describe_mismatch(self._plan, posted).encode(),
        )
        return ReplicaMismatchError(message.decode())

    @traced("copy", "copy")
    def stage(self, arena: Arena, deferred: DeferredCopies) -> StagedTensors:
        """Copy the tensors that this rank writes into ``arena``, except those that may be copied later.

        Each rank calls it in the vote "copying what is to be saved", or, for stripes that are uploaded, in the vote
        "writing".
        """
        if not self._plan.needs_exchange:
            return stage_tensors(self._plan, self._shard_of, arena, None, deferred)
        begin_copies(self._tensors.values())  # of stripes
        with self._open_exchange() as p2p:
            return stage_tensors(self._plan, self._shard_of, arena, p2p, deferred)

    def _open_exchange(self, attempt: int = 0) -> P2PExchange:
        from rankless.engine.io.p2p import P2PExchange  # noqa: PLC0415 - saves of one host without stripes do not need it

        return P2PExchange(self._ranks.gloo_group(self._session.timeout), self._session, attempt)

    def _look_again(self, folder: Path) -> None:
        """Look once more for a directory that this host takes for missing, or raise: see :meth:`write`.

        A client of a network file system that has looked for the run directory before rank 0 has made it remembers for
        half a minute that it was missing. It asks the server again if the directory above is listed.
        """
        forget_missing(folder)
        if is_directory(folder):
            return
        if self._session.rank == COORDINATOR_RANK:
            raise StorageError(errno.ENOENT, f"{folder} was removed while this save wrote into it: save again")
        raise RankMismatchError(
            f"{folder}, which rank 0 created, does not exist on this rank: all ranks must save to a shared file system"
        )

    def write(
        self, folder: Path, names: Sequence[str], staged: StagedTensors | None, on_moved: OnBytesMoved = ignore_progress
    ) -> Fragments:
        """Write this rank's stripes and file ranges, or their staged copies, and return the CRCs of the fragments.

        Raises ``RankMismatchError`` if this rank does not see ``folder``, which rank 0 created with its files;
        ``StorageError`` if rank 0 does not.

        Each rank calls it in the vote "writing". Unless it is alone and has few bytes, its files are synced before it
        returns.
        """
        files = [folder / name for name in names]
        if not is_directory(folder):
            self._look_again(folder)
        if staged is None:
            begin_copies(self._tensors.values())
        if self._plan.needs_exchange:
            with self._open_exchange(self._attempt) as p2p:
                return self._write_and_exchange(files, staged, p2p, on_moved)
        file_ranges, shard_of = self.ranges_in_memory(staged)
        is_synced_later = self._session.size == 1 and count_bytes(file_ranges) <= _UNSYNCED_BYTES
        return write_file_ranges(files, file_ranges, shard_of, on_moved, sync=not is_synced_later)

    def ranges_to_upload(self, staged: StagedTensors | None) -> tuple[Sequence[FileRange], ShardOf]:
        """Return the bytes that this rank uploads or passes on, and where these are.

        Stripes are assembled in memory first, and with them all that this rank has.

        Each rank calls it in the vote on the writing.
        """
        if staged is None and self._plan.stripe_tasks:
            staged = self.stage(Arena(StagingMemory()), DeferredCopies())
        elif staged is None:
            begin_copies(self._tensors.values())
        return self.ranges_in_memory(staged)

    def ranges_in_memory(self, staged: StagedTensors | None) -> tuple[Sequence[FileRange], ShardOf]:
        """Return the bytes that this rank has, of its shards or their staged copies, and where these are."""
        if staged is None:
            return self._plan.file_ranges, self._shard_of
        return staged.file_ranges, staged.shard_of

    def _write_and_exchange(
        self, files: Sequence[Path], staged: StagedTensors | None, p2p: P2PExchange, on_moved: OnBytesMoved
    ) -> Fragments:
        """Write the bytes that this rank assembles and holds, but send those in cells that another host writes."""
        from rankless.engine.comm.store_messages import StoreMessages  # noqa: PLC0415 - see _open_exchange
        from rankless.engine.io.cell_exchange import CellExchange  # noqa: PLC0415
        from rankless.engine.io.write_stripes import write_stripes  # noqa: PLC0415

        cells = CellExchange(self._plan.sent, self._plan.received, p2p, StoreMessages(self._session, self._attempt))
        striped: Fragments = {}
        if staged is None:
            striped = write_stripes(files, self._plan.stripe_tasks, self._shard_of, cells, on_moved)
        file_ranges, shard_of = self.ranges_in_memory(staged)
        kept, cut = cut_out(file_ranges, self._plan.sent)
        packed: list[tuple[int, Fragment]] = []
        for transfer, file_range in (
            (transfer, sent_range) for transfer, sent_ranges in cut for sent_range in sent_ranges
        ):
            data = cells.pack_range(transfer, file_range, shard_of(file_range.tensor))
            packed += hash_fragments(file_range, data)
            on_moved(len(data))
        cells.start()
        written = write_file_ranges(files, kept, shard_of, on_moved)
        cells.finish(files)
        hashed = ((tensor, fragment) for part in (striped, written) for tensor, row in part.items() for fragment in row)
        return merge_fragments([packed, hashed])
