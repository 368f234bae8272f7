"""How ranks learn who holds what: each posts digests of its spec and its meshes, and what is distinct is told once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from holdfast.engine.plan.global_spec import GlobalSpec
from holdfast.engine.plan.spec import Meshes, Spec, decode_meshes, decode_spec, digest_spec


class SpecDigests(NamedTuple):
    """16 bytes each for what a rank holds: equal on ranks that hold the same."""

    spec: bytes
    meshes: bytes


class SpecDirectory(msgspec.Struct, frozen=True):
    """The number of each rank's spec and mesh table among the distinct ones, and the lowest rank that has each."""

    spec_of: list[int] = []
    table_of: list[int] = []
    spec_tellers: list[int] = []
    table_tellers: list[int] = []

    @classmethod
    def take(cls, posted: Sequence[SpecDigests]) -> SpecDirectory:
        """Count what all ranks posted."""
        spec_of, spec_tellers = deduplicate([one.spec for one in posted])
        table_of, table_tellers = deduplicate([one.meshes for one in posted])
        return cls(spec_of, table_of, spec_tellers, table_tellers)

    @property
    def is_uniform(self) -> bool:
        """Whether all ranks hold the same, so that nobody has to be told anything."""
        return len(self.spec_tellers) == 1 and len(self.table_tellers) == 1

    def told_by(self, rank: int, spec: Spec, meshes: Meshes) -> tuple[bytes, bytes]:
        """What a rank has to tell."""
        return (
            spec.encode() if rank in self.spec_tellers else b"",
            meshes.encode() if rank in self.table_tellers else b"",
        )

    def membership(self, told: Sequence[tuple[bytes, bytes]], global_ranks: Sequence[int]) -> GlobalSpec:
        """Who holds what, from what all ranks told; of ranks that are alike, the first."""
        return GlobalSpec(
            [decode_spec(told[rank][0]) for rank in self.spec_tellers],
            [decode_meshes(told[rank][1]) for rank in self.table_tellers],
            self.spec_of,
            self.table_of,
            {number: place for place, number in enumerate(global_ranks)},
        )


def deduplicate(said: Sequence[bytes]) -> tuple[list[int], list[int]]:
    """The number of each word among the distinct ones, and the first that said each."""
    numbers: dict[bytes, int] = {}
    first: list[int] = []
    for rank, word in enumerate(said):
        if word not in numbers:
            numbers[word] = len(numbers)
            first.append(rank)
    return [numbers[word] for word in said], first


def digest_specs(spec: Spec, meshes: Meshes) -> SpecDigests:
    """The digests of what this rank holds."""
    return SpecDigests(digest_spec(spec.encode()), digest_spec(meshes.encode()))
