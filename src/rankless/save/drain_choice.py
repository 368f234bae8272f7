"""The choice of the drain for a run directory: each kind is imported if it is used."""

from __future__ import annotations

from rankless.engine.comm.session import RankGroup
from rankless.save.generation_drain import DrainOptions, GenerationDrain
from rankless.storage.object_path import ObjectPath
from rankless.tier.assembled_generation import Assembly
from rankless.tier.job import TierJob


def make_drain(
    ranks: RankGroup, timeout: float, tier: TierJob, assembly: Assembly, options: DrainOptions
) -> GenerationDrain:
    """Return the drain of an assembled generation into the run directory of a tier."""
    run = tier.run
    if isinstance(run, ObjectPath):
        from rankless.save.object_drain import ObjectDrain  # noqa: PLC0415 - other drains do not need its modules

        return ObjectDrain(run, ranks, timeout, tier, assembly, options)
    from rankless.save.folder_drain import FolderDrain  # noqa: PLC0415 - as above

    return FolderDrain(ranks, timeout, tier, assembly, options)
