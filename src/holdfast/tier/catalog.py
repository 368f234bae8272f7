"""The generations that the hosts of a job have together, and the choice of the one to load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from holdfast.errors import CorruptCheckpointError, StorageError
from holdfast.ondisk.manifest import Manifest
from holdfast.tier.epochs import is_retired
from holdfast.tier.folder import TierFolder
from holdfast.tier.part import GenerationKey


class OfferedGeneration(msgspec.Struct, frozen=True, array_like=True):
    """The parts of a generation on one host, by the ranks that staged them.

    ``manifest`` is its label; ``problem`` says why that cannot be read.
    """

    key: GenerationKey
    size: int
    ranks: list[int]
    manifest: Manifest | None = None
    problem: str = ""


class HostOffer(msgspec.Struct, frozen=True, array_like=True):
    """The generations of one host. ``writer`` is the beginning of the names of files of the rank that offers them."""

    host: str
    writer: str
    generations: list[OfferedGeneration]


@dataclass(frozen=True)
class LocalCheckpoint:
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
    for key, names in folder.list_parts().items():
        manifest, problem = None, ""
        try:
            common = folder.read_common(key)
            manifest = None if common is None else common.label.manifest
        except (CorruptCheckpointError, StorageError) as error:
            problem = str(error.args[-1])
        offers.append(OfferedGeneration(key, names[0].size, [name.rank for name in names], manifest, problem))
    return offers


def find_complete(offers: Sequence[HostOffer], epochs: Mapping[int, int]) -> list[LocalCheckpoint]:
    """Return the complete generations that are not retired, oldest first.

    ``epochs`` are the starts of the epochs of the run, by their numbers.
    """
    by_key: dict[GenerationKey, list[OfferedGeneration]] = {}
    for offer in offers:
        for generation in offer.generations:
            by_key.setdefault(generation.key, []).append(generation)
    complete = []
    for key, generations in sorted(by_key.items()):
        ranks = {rank for generation in generations for rank in generation.ranks}
        manifest = next((found.manifest for found in generations if found.manifest is not None), None)
        if manifest is None or is_retired(epochs, key.epoch, key.sequence):
            continue
        if ranks >= set(range(generations[0].size)):
            complete.append(LocalCheckpoint(key, manifest))
    return complete
