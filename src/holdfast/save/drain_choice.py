"""The choice of the drain for a run directory: each kind is imported if it is used."""

from __future__ import annotations

from holdfast.engine.comm.session import RankGroup
from holdfast.save.generation_drain import DrainOptions, GenerationDrain
from holdfast.storage.object_path import ObjectPath
from holdfast.tier.assembly import Assembly
from holdfast.tier.state import TierState


def make_drain(
    ranks: RankGroup, timeout: float, tier: TierState, assembly: Assembly, options: DrainOptions
) -> GenerationDrain:
    """Return the drain of an assembled generation into the run directory of a tier."""
    run = tier.run
    if isinstance(run, ObjectPath):
        from holdfast.save.object_drain import ObjectDrain  # noqa: PLC0415 - other drains do not need its modules

        return ObjectDrain(run, ranks, timeout, tier, assembly, options)
    from holdfast.save.folder_drain import FolderDrain  # noqa: PLC0415 - as above

    return FolderDrain(ranks, timeout, tier, assembly, options)
