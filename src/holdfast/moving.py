"""The tensors of a save on their way from this rank's memory into files: proven equal, copied, written."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from holdfast.engine import replicas
from holdfast.engine.gather import write_stripes
from holdfast.engine.local import LocalPart
from holdfast.engine.plan import SavePlan
from holdfast.engine.ranks import Ranks, Session
from holdfast.engine.stage import Later, Staged, stage
from holdfast.engine.staging_memory import Arena
from holdfast.engine.streams import Accelerator, synchronize
from holdfast.engine.transfer import Fragments, Moved, untold
from holdfast.engine.wire import Wire
from holdfast.engine.write import write_pieces
from holdfast.errors import DisagreementError, ReplicaMismatchError
from holdfast.storage.local import is_folder


class Moving:
    """One rank's share of a plan. ``parts`` are its tensors.

    Each step first waits for what the caller has enqueued on the accelerators that hold them.
    """

    def __init__(
        self,
        ranks: Ranks,
        session: Session,
        plan: SavePlan,
        parts: Mapping[tuple[str, str], LocalPart],
        accelerator: Accelerator = torch.accelerator,
    ) -> None:
        self._ranks, self._session, self._plan = ranks, session, plan
        self._parts, self._accelerator = parts, accelerator

    def _part_of(self, tensor: int) -> LocalPart:
        return self._parts[self._plan.tensors[tensor]]

    def hash_replicas(self, save: int) -> tuple[bytes, float]:
        """Digests of what other ranks hold too: of all at save 0, of some of each tensor at others.

        The second is for how many seconds it has hashed.
        """
        synchronize(self._parts.values(), self._accelerator)
        started = time.perf_counter()
        return replicas.digests(self._plan, self._part_of, save), time.perf_counter() - started

    def differing(self) -> ReplicaMismatchError:
        """All ranks together, where some replicas differ: which."""
        _, message = self._session.vote(
            "comparing replicas",
            lambda: replicas.details(self._plan, self._part_of),
            lambda own: own,
            lambda posted: replicas.mismatch(self._plan, posted).encode(),
        )
        return ReplicaMismatchError(message.decode())

    def stage(self, arena: Arena, later: Later) -> Staged:
        """Copy what this rank will write, but for what may be copied later."""
        synchronize(self._parts.values(), self._accelerator)
        if not self._plan.exchanges:
            return stage(self._plan, self._part_of, arena, None, later)
        with Wire(self._ranks.gloo(self._session.timeout), self._session) as wire:
            return stage(self._plan, self._part_of, arena, wire, later)

    def write(self, folder: Path, names: Sequence[str], staged: Staged | None, moved: Moved = untold) -> Fragments:
        """Write this rank's stripes and pieces, or their copies, and return what was hashed.

        Raises ``DisagreementError`` where it cannot see ``folder``, which rank 0 has made, with the files in it.
        """
        files = [folder / name for name in names]
        if not is_folder(folder):
            raise DisagreementError(
                f"{folder}, which rank 0 has made, cannot be seen here: all ranks must save into a shared file system"
            )
        if staged is not None:
            return write_pieces(files, staged.pieces, staged.part_of, moved)
        synchronize(self._parts.values(), self._accelerator)
        found: Fragments = {}
        if self._plan.exchanges:
            with Wire(self._ranks.gloo(self._session.timeout), self._session) as wire:
                found = write_stripes(files, self._plan.crossings, self._part_of, wire, moved)
        return found | write_pieces(files, self._plan.pieces, self._part_of, moved)
