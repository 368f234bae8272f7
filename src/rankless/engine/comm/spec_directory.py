"""Exchange of specs: each rank posts digests of its spec and its meshes, and each distinct one is sent once.

A save (:mod:`rankless.save.save_negotiation`), a load (:mod:`rankless.load.load_operation`) and a live copy use it on
all ranks: rank 0 builds the directory inside its decision on the digests, and each rank builds the :class:`GlobalSpec`
from the next decision. All ranks must get an equal one: numbers follow from the order of the ranks, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from rankless.engine.plan.global_spec import GlobalSpec
from rankless.engine.plan.tensor_specs import Meshes, Spec, decode_meshes, decode_spec, digest_bytes
from rankless.process.prepared_types import prepared


@prepared
class SpecDigests(NamedTuple):
    """16 bytes each for the spec and the meshes of a rank; equal on ranks with equal specs or equal meshes."""

    spec: bytes
    meshes: bytes


@prepared
class SpecDirectory(msgspec.Struct, frozen=True):
    """The index of each rank's spec and mesh table among the distinct ones, and the lowest rank that has each.

    For example, if ranks 0 and 1 are one pipeline stage and ranks 2 and 3 the next one, ``spec_of`` is ``[0, 0, 1, 1]``
    and ``spec_owner_ranks`` is ``[0, 2]``.
    """

    spec_of: list[int] = []
    table_of: list[int] = []
    spec_owner_ranks: list[int] = []
    table_owner_ranks: list[int] = []

    @classmethod
    def from_digests(cls, posted: Sequence[SpecDigests]) -> SpecDirectory:
        """Build the directory from the digests of all ranks.

        Rank 0 calls it in its decision.
        """
        spec_of, spec_owners = deduplicate([digests.spec for digests in posted])
        table_of, table_owners = deduplicate([digests.meshes for digests in posted])
        return cls(spec_of, table_of, spec_owners, table_owners)

    @property
    def is_uniform(self) -> bool:
        """True if all ranks hold the same tensors, so that no specs need to be sent."""
        return len(self.spec_owner_ranks) == 1 and len(self.table_owner_ranks) == 1

    def encode_contribution(self, rank: int, spec: Spec, meshes: Meshes) -> tuple[bytes, bytes]:
        """Return the spec and the meshes that a rank has to send; empty if another rank sends them.

        Each rank calls it in the vote "exchanging tensor specs".
        """
        return (
            spec.encode() if rank in self.spec_owner_ranks else b"",
            meshes.encode() if rank in self.table_owner_ranks else b"",
        )

    def build_global_spec(
        self, contributions: Sequence[tuple[bytes, bytes]], global_ranks: Sequence[int], *, is_partial: bool = False
    ) -> GlobalSpec:
        """Merge the contributions of all ranks; of equal ones, the contribution of the lowest rank counts.

        ``global_ranks`` are the numbers that meshes have for these ranks.

        Every rank calls it after the vote "exchanging tensor specs", with the same contributions.
        """
        specs = [decode_spec(contributions[rank][0]) for rank in self.spec_owner_ranks]
        meshes = [decode_meshes(contributions[rank][1]) for rank in self.table_owner_ranks]
        return GlobalSpec(specs, meshes, self.spec_of, self.table_of, _number_ranks(global_ranks), is_partial)

    def share_spec(self, spec: Spec, meshes: Meshes, global_ranks: Sequence[int]) -> GlobalSpec:
        """Return the spec of all ranks if it :attr:`is_uniform`: each rank has the same one."""
        return GlobalSpec([spec], [meshes], self.spec_of, self.table_of, _number_ranks(global_ranks))


def _number_ranks(global_ranks: Sequence[int]) -> dict[int, int]:
    return {global_rank: group_rank for group_rank, global_rank in enumerate(global_ranks)}


def deduplicate(values: Sequence[bytes]) -> tuple[list[int], list[int]]:
    """Return the index of each value among the distinct ones, and the first rank that has each.

    For example, ``[b"x", b"y", b"x"]`` gives ``[0, 1, 0]`` and ``[0, 1]``.
    """
    numbers: dict[bytes, int] = {}
    first_ranks: list[int] = []
    for rank, value in enumerate(values):
        if value not in numbers:
            numbers[value] = len(numbers)
            first_ranks.append(rank)
    return [numbers[value] for value in values], first_ranks


def digest_specs(spec: Spec, meshes: Meshes) -> SpecDigests:
    """Return the digests of this rank's spec and meshes."""
    return SpecDigests(digest_bytes(spec.encode()), digest_bytes(meshes.encode()))
