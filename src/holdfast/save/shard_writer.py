"""The tensors of a save on their way from this rank's memory into files: proven equal, copied, written."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from holdfast.engine.comm.session import RankGroup, Session
from holdfast.engine.integrity import replicas
from holdfast.engine.io.device_streams import Accelerator, synchronize_devices
from holdfast.engine.io.p2p import P2PExchange
from holdfast.engine.io.requests import Fragments, Moved, ignore_progress
from holdfast.engine.io.staging import DeferredCopies, StagedTensors, stage_tensors
from holdfast.engine.io.staging_memory import Arena
from holdfast.engine.io.tensor_bytes import TensorBytes
from holdfast.engine.io.write import write_pieces
from holdfast.engine.io.write_stripes import write_stripes
from holdfast.engine.plan.save_plan import SavePlan
from holdfast.errors import RankMismatchError, ReplicaMismatchError
from holdfast.storage.posix import is_directory


class ShardWriter:
    """One rank's share of a plan. ``parts`` are its tensors.

    Each step first waits for what the caller has enqueued on the accelerators that hold them.
    """

    def __init__(
        self,
        ranks: RankGroup,
        session: Session,
        plan: SavePlan,
        parts: Mapping[tuple[str, str], TensorBytes],
        accelerator: Accelerator = torch.accelerator,
    ) -> None:
        self._ranks, self._session, self._plan = ranks, session, plan
        self._parts, self._accelerator = parts, accelerator

    def _part_of(self, tensor: int) -> TensorBytes:
        return self._parts[self._plan.tensors[tensor]]

    def hash_replicas(self, save: int) -> tuple[bytes, float]:
        """Digests of what other ranks hold too: of all at save 0, of some of each tensor at others.

        The second is for how many seconds it has hashed.
        """
        synchronize_devices(self._parts.values(), self._accelerator)
        started = time.perf_counter()
        return replicas.digest_replicas(self._plan, self._part_of, save), time.perf_counter() - started

    def differing(self) -> ReplicaMismatchError:
        """All ranks together, where some replicas differ: which."""
        _, message = self._session.vote(
            "comparing replicas",
            lambda: replicas.replica_details(self._plan, self._part_of),
            lambda own: own,
            lambda posted: replicas.describe_mismatch(self._plan, posted).encode(),
        )
        return ReplicaMismatchError(message.decode())

    def stage(self, arena: Arena, later: DeferredCopies) -> StagedTensors:
        """Copy what this rank will write, but for what may be copied later."""
        synchronize_devices(self._parts.values(), self._accelerator)
        if not self._plan.exchanges:
            return stage_tensors(self._plan, self._part_of, arena, None, later)
        with P2PExchange(self._ranks.gloo(self._session.timeout), self._session) as wire:
            return stage_tensors(self._plan, self._part_of, arena, wire, later)

    def write(
        self, folder: Path, names: Sequence[str], staged: StagedTensors | None, moved: Moved = ignore_progress
    ) -> Fragments:
        """Write this rank's stripes and pieces, or their copies, and return what was hashed.

        Raises ``RankMismatchError`` where it cannot see ``folder``, which rank 0 has made, with the files in it.
        """
        files = [folder / name for name in names]
        if not is_directory(folder):
            raise RankMismatchError(
                f"{folder}, which rank 0 has made, cannot be seen here: all ranks must save into a shared file system"
            )
        if staged is not None:
            return write_pieces(files, staged.pieces, staged.part_of, moved)
        synchronize_devices(self._parts.values(), self._accelerator)
        found: Fragments = {}
        if self._plan.exchanges:
            with P2PExchange(self._ranks.gloo(self._session.timeout), self._session) as wire:
                found = write_stripes(files, self._plan.crossings, self._part_of, wire, moved)
        return found | write_pieces(files, self._plan.pieces, self._part_of, moved)
