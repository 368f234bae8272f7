"""One rank's part of a save into the local tier: the memory that it reserves, the part that it completes, and copies.

The tensors are staged into a file of the tier, which is mapped. When all ranks have written the tables of their parts,
the checkpoint is complete in the tier.

:mod:`rankless.save.tier_content` has one on every rank. A slot is pinned until the drain of its part has ended: no
other save may write into it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from rankless.engine.comm.session import RankGroup, Session
from rankless.engine.integrity import replica_comparison
from rankless.engine.io.staging import StagedTensors
from rankless.engine.io.staging_memory import Arena, StagingMemory
from rankless.engine.plan.save_plan import SavePlan
from rankless.errors import SpaceShortageError, StateError, StorageError
from rankless.observe.units import format_size
from rankless.process.prepared_types import prepared
from rankless.run.catalog import CheckpointIdentity
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.storage.aligned_memory import Bytes
from rankless.tier.copies_on_hosts import PartCopies, choose_partners
from rankless.tier.generation import Common
from rankless.tier.job import NextSave, TierJob
from rankless.tier.parity import PartParity, form_groups
from rankless.tier.part import PartTable, hash_ranges
from rankless.tier.part_names import GenerationKey, PartName
from rankless.tier.slots import Slot
from rankless.tier.tier_options import LocalTier


@prepared
class _PreparedTierSave(msgspec.Struct, frozen=True, array_like=True):
    """The result of a rank's preparation: the digests of its replicas, and why its host cannot take part, if it cannot.

    ``host`` identifies the folder of its tier, ``domain`` the unit that may fail as a whole with it.
    """

    digests: bytes
    host: str
    domain: str
    problem: str = ""


@prepared
class BegunTierSave(msgspec.Struct, frozen=True, array_like=True):
    """The decision of rank 0. There is no identity if replicas differ, or if a host cannot take part.

    ``hosts`` and ``domains`` have an entry for each rank.
    """

    identity: CheckpointIdentity | None = None
    started_at: float = 0.0
    drains: bool = False
    hosts: list[str] = []
    domains: list[str] = []
    problem: str = ""
    job: str = ""


_encode = msgspec.msgpack.Encoder().encode


class _SlotArena(Arena):
    """Staging memory in a slot of the tier, which stays in use after the save."""

    def __init__(self, memory: Bytes) -> None:
        super().__init__(StagingMemory())
        self._slot_memory = memory

    def reserve_bytes(self, nbytes: int) -> Bytes:
        """Return ``nbytes`` bytes of the slot."""
        return self._slot_memory[:nbytes]


class TierStage:
    """The part of one rank in one save into the tier. It has a slot from :meth:`reserve` to :meth:`release`."""

    def __init__(self, ranks: RankGroup, session: Session, tier: TierJob, options: LocalTier) -> None:
        self.tier, self.options = tier, options
        self._ranks, self._session = ranks, session
        self._begun = BegunTierSave()
        self._slot: Slot | None = None
        self._table: PartTable | None = None
        #: Whether the checkpoint is complete in the tier, and whether a drain was announced that has not ended.
        self._is_complete = self._is_draining = False

    @property
    def has_slot(self) -> bool:
        """True if memory is reserved: else the save is one without the tier."""
        return self._slot is not None

    @property
    def key(self) -> GenerationKey:
        """The identity of the generation."""
        identity = self._begun.identity or CheckpointIdentity(0, "", "")
        return GenerationKey(identity.incarnation, identity.sequence, identity.id)

    def reserve(self, digests: bytes, nbytes: int) -> bytes:
        """Reserve memory for the part. Return the bytes that rank 0 must know; ``digests`` are the replicas' digests.

        Each rank calls it in the vote "preparing the save". It raises nothing if memory is short: then no rank uses the
        tier.
        """
        identity = problem = ""
        try:
            self._slot = self.tier.take_slot(nbytes)
            identity = self.tier.folder.identity
        except SpaceShortageError as error:
            problem = _describe_shortage(error)
        except (
            StorageError
        ) as error:  # the folder was removed, or belongs to somebody else: no reason to end a training
            problem = str(error)
        return _encode(_PreparedTierSave(digests, identity, self.options.failure_domain, problem))

    def decide(self, posted: Sequence[bytes], plan_save: Callable[[], NextSave]) -> bytes:
        """Decide on the save, on rank 0, from the bytes that all ranks have posted.

        Called in the vote "preparing the save".
        """
        prepared = [msgspec.msgpack.decode(raw, type=_PreparedTierSave) for raw in posted]
        if not replica_comparison.have_equal_replicas([rank.digests for rank in prepared]):
            return _encode(BegunTierSave())
        problems = [f"rank {rank}: {one.problem}" for rank, one in enumerate(prepared) if one.problem]
        if problems:
            return _encode(BegunTierSave(problem=problems[0]))
        planned = plan_save()
        hosts, domains = [rank.host for rank in prepared], [rank.domain for rank in prepared]
        started_at = round(time.time(), 6)
        return _encode(BegunTierSave(planned.identity, started_at, planned.drains, hosts, domains, job=self.tier.job))

    def begin(self, raw: bytes) -> BegunTierSave:
        """Note the decision of rank 0, and return it.

        All ranks call it after the vote.
        """
        self._begun = begun = msgspec.msgpack.decode(raw, type=BegunTierSave)
        if begun.drains:
            self.tier.begin_drain()
            self._is_draining = True
        return begun

    def arena(self, other: Arena) -> Arena:
        """Return the memory that the tensors are staged into: the slot's memory, or ``other`` if there is no slot."""
        return other if self._slot is None else _SlotArena(self._slot.memory)

    def complete(
        self,
        staged: StagedTensors | None,
        rank_values: bytes,
        describe: Callable[[list[bytes]], Common],
        plan: SavePlan,
    ) -> Common:
        """Write the tables of all parts. The checkpoint is complete when all ranks have, and the rest is written.

        ``describe`` is called on rank 0, with the values of all ranks; it knows no files: these are in the plan.

        All ranks call it, in the thread of the save. It holds two votes "completing the local checkpoint".
        """
        session, tier = self._session, self.tier
        name = PartName(self.key, session.rank, session.size)

        def write_part() -> bytes:
            slot = self._slot
            if staged is None or slot is None:
                raise StateError("nothing is staged: this is a bug of rankless")
            rows = hash_ranges(staged.file_ranges, slot.memory)
            if not tier.is_replaced():
                tier.take_over(self._begun.job)
            self._table = PartTable(name, slot.path.name, plan.nbytes, rows)
            tier.folder.write_part(self._table)
            slot.table = name.name
            return rank_values

        _, raw = session.vote(
            "completing the local checkpoint", write_part, bytes, lambda posted: _encode(describe(posted))
        )
        described = msgspec.msgpack.decode(raw, type=Common)
        common = msgspec.structs.replace(described, groups={group: list(files) for group, files in plan.groups.items()})
        session.run_on_all("completing the local checkpoint", partial(tier.folder.write_common, common))
        self._is_complete = True
        tier.note_complete(self.key)
        return common

    def make_redundant(self) -> list[Slot]:
        """Copy the part to other hosts, or compute parity. Return the pinned slots with the bytes that this rank got.

        All ranks call it, in the thread of the save. It holds votes.
        """
        begun, options, table, slot = self._begun, self.options, self._table, self._slot
        if table is None or slot is None:
            return []
        if options.parity:
            groups = form_groups(begun.hosts, options.parity)
            return PartParity(self._ranks, self._session, self.tier, groups, options.copy_rate).make(slot, table)
        partners = choose_partners(begun.hosts, begun.domains, options.copies)
        return PartCopies(self._ranks, self._session, self.tier, partners, options.copy_rate).make(slot, table)

    def keep_newest(self, copies: Sequence[Slot] = ()) -> None:
        """Keep the part and the copies. The generations before are not needed any more.

        Each rank calls it in the thread of the save. It holds no vote.
        """
        if self._slot is not None:
            self.tier.slots.keep([self._slot, *copies])
        for copy in copies:
            self.tier.slots.unpin(copy)
        self.tier.remove_generations(lambda key: key >= self.key)

    def keep_uncopied(self) -> None:
        """Keep the part, which has no copies, and the newest generation that has.

        Each rank calls it in the thread of the save. It holds no vote.
        """
        if self._slot is not None:
            self.tier.slots.keep_uncopied([self._slot])

    def end_drain(self, drained: CheckpointInfo | None) -> None:
        """Note that the drain has ended, if there is one. ``drained`` is the checkpoint in the run directory.

        Each rank calls it in the thread of the save.
        """
        if self._is_draining:
            self._is_draining = False
            self.tier.end_drain(None if drained is None else self.key, drained)

    def release(self) -> None:
        """Give the slot back."""
        if self._slot is not None:
            self.tier.slots.unpin(self._slot)
            self._slot = None

    def abandon(self, tag: str) -> None:
        """End everything after a failure. If the generation is not complete, its tag is free again."""
        if not self._is_complete:
            self.tier.forget_tag(tag)
        self.end_drain(None)
        self.release()


def _describe_shortage(error: SpaceShortageError) -> str:
    """Say how much memory this host lacks."""
    return (
        f"{format_size(error.needed)} more are needed in the folder of the tier on its host, where "
        f"{format_size(error.free)} are free. The tier needs three times the bytes of a host, and two to three times "
        "those that it gets as copies"
    )
