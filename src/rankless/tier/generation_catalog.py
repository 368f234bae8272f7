"""The generations that the hosts of a job have together, and the choice of the one to load.

Each rank lists its host in the vote "looking into the local tier"; rank 0 finds the complete generations in its
decision (:mod:`rankless.load.tier_generations`). Rank 0 also lists its host before a job that has loaded nothing claims
an incarnation (:class:`~rankless.tier.job.TierJob`), and plans with :func:`find_rebuilding` how lost parts are computed
(:mod:`rankless.tier.rebuild`). Generations that the history does not call current must never be among the complete
ones.

The history of the run directory decides, and not the sequence numbers: a host that was away has an abandoned branch,
with higher ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

import msgspec

from rankless.errors import CorruptCheckpointError, StorageError
from rankless.ondisk.manifest import Manifest
from rankless.process.prepared_types import prepared
from rankless.run.history import Entry
from rankless.tier.host_folder import TierFolder
from rankless.tier.part_names import GenerationKey


class OfferedGeneration(msgspec.Struct, frozen=True, array_like=True):
    """The parts of a generation on one host, by the ranks that staged them.

    ``manifest`` is its label; ``problem`` says why that cannot be read. ``parities`` are the parities on the host: the
    rank that keeps each, and the ranks of its group.
    """

    key: GenerationKey
    size: int
    ranks: list[int]
    manifest: Manifest | None = None
    parities: list[tuple[int, list[int]]] = []
    problem: str = ""


@prepared
class HostOffer(msgspec.Struct, frozen=True, array_like=True):
    """The generations of one host. ``writer`` is the beginning of the names of files of the rank that offers them."""

    host: str
    writer: str
    generations: list[OfferedGeneration]


class LocalCheckpoint(msgspec.Struct, frozen=True):
    """A generation that is complete: the parts on all hosts together cover its files."""

    key: GenerationKey
    manifest: Manifest

    @property
    def age(self) -> tuple[int, float, str]:
        """The key that sorts it among the checkpoints of the run directory."""
        return self.manifest.sequence, self.manifest.time, self.manifest.id


def list_offers(folder: TierFolder) -> list[OfferedGeneration]:
    """Return the generations of a host, oldest first."""
    offers = []
    parities = folder.list_parts("parity")
    for key, names in folder.list_parts().items():
        manifest, problem = None, ""
        try:
            common = folder.read_common(key)
            manifest = None if common is None else common.label.manifest
        except (CorruptCheckpointError, StorageError) as error:
            problem = str(error.args[-1])
        groups = []
        for name in parities.get(key, ()):
            with suppress(CorruptCheckpointError, StorageError):
                groups.append((name.rank, [table.name.rank for table in folder.read_parity(name).members]))
        offers.append(OfferedGeneration(key, names[0].size, [name.rank for name in names], manifest, groups, problem))
    return offers


def find_rebuilding(lost: int, parts: Collection[int], parities: Mapping[int, Sequence[int]]) -> Sequence[int]:
    """Return the members of the group that can rebuild a lost part from parts and parities; nothing if there is none.

    ``parts`` are the parts that are there, ``parities`` the groups by the rank that keeps a parity. For example, ranks
    0, 8 and 16 are a group, and rank 8's part is lost: the parts and parities of ranks 0 and 16 give it.
    """
    for members in parities.values():
        others = [member for member in members if member != lost]
        if lost in members and all(other in parts and other in parities for other in others):
            return members
    return ()


def find_complete(offers: Sequence[HostOffer], history: Entry) -> list[LocalCheckpoint]:
    """Return the complete generations that are current, oldest first."""
    by_key: dict[GenerationKey, list[OfferedGeneration]] = {}
    for offer in offers:
        for generation in offer.generations:
            by_key.setdefault(generation.key, []).append(generation)
    complete = []
    for key, generations in sorted(by_key.items()):
        ranks = {rank for generation in generations for rank in generation.ranks}
        manifest = next((found.manifest for found in generations if found.manifest is not None), None)
        if manifest is None or not history.is_current(manifest):
            continue
        parities = {rank: members for generation in generations for rank, members in generation.parities}
        lost = set(range(generations[0].size)) - ranks
        if all(find_rebuilding(rank, ranks, parities) for rank in lost):
            complete.append(LocalCheckpoint(key, manifest))
    return complete
