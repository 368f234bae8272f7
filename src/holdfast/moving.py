"""The tensors of a save on their way from this rank's memory into files: proven equal, copied, written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from holdfast.engine import replicas
from holdfast.engine.gather import write_stripes
from holdfast.engine.plan import SavePlan
from holdfast.engine.ranks import Ranks, Session
from holdfast.engine.stage import Arena, Later, Staged, stage
from holdfast.engine.transfer import Fragments, Moved, PartOf, untold
from holdfast.engine.wire import Wire
from holdfast.engine.write import write_pieces
from holdfast.errors import DisagreementError, ReplicaMismatchError
from holdfast.storage.local import is_folder


class Moving:
    """One rank's share of a plan. ``part_of`` tells where its tensors are."""

    def __init__(self, ranks: Ranks, session: Session, plan: SavePlan, part_of: PartOf) -> None:
        self._ranks, self._session, self._plan, self._part_of = ranks, session, plan, part_of

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
        found: Fragments = {}
        if self._plan.exchanges:
            with Wire(self._ranks.gloo(self._session.timeout), self._session) as wire:
                found = write_stripes(files, self._plan.crossings, self._part_of, wire, moved)
        return found | write_pieces(files, self._plan.pieces, self._part_of, moved)
