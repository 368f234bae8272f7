"""Moments of saves, drains and loads with a local tier at which something can happen to a rank."""

from __future__ import annotations

from dataclasses import dataclass

from campaigns.common.points import Point

_FOLDER = "rankless.tier.host_folder.TierFolder"
_SLOTS = "rankless.tier.slots.Slots"
_STATE = "rankless.tier.job"
_HOSTS = "rankless.load.tier_generations"
_FETCH = "rankless.load.part_fetch"
_ASSEMBLER = "rankless.load.part_assembler"
_DRAIN = "rankless.save.generation_content"
_OUTPUT = "rankless.save.folder_output.RunFolderOutput"
_STAGING = "rankless.run.pending_dir.PendingDirectory"
_P2P = "rankless.engine.io.p2p.P2PExchange"
_RENAME = "rankless.storage.atomic_rename._renameat2"

#: When the rank waits for the moment: while it loads, while it drains what it has loaded, or when it trains.
PHASES = ("load", "loaded drain", "save", "drain")


@dataclass(frozen=True)
class Moment:
    """A point of one phase, which only ranks reach whose tier has the option ``needs``."""

    phase: str
    point: Point
    needs: str = ""

    @property
    def is_ordered(self) -> bool:
        """False before the job has a place in the order of all: if it was stopped then, it would be the newest one."""
        return self.point.name != "announcing the job"

    @property
    def name(self) -> str:
        """The phase and the point."""
        return f"{self.phase}: {self.point.name}"


def _of(phase: str, *points: Point, needs: str = "") -> tuple[Moment, ...]:
    return tuple(Moment(phase, point, needs) for point in points)


MOMENTS = (
    *_of(
        "save",
        Point("reserving a slot", f"{_SLOTS}.take"),
        Point("slot reserved", f"{_SLOTS}.take", after=True),
        Point("deciding about the save", f"{_STATE}.TierJob.plan_save", rank_0_only=True),
        Point("copying into the slot", "rankless.save.shard_writer.stage_tensors"),
        Point("hashing", "rankless.save.tier_stage.hash_ranges"),
        Point("writing the table", f"{_FOLDER}.write_part"),
        Point("table written", f"{_FOLDER}.write_part", after=True),
        Point("writing the label", f"{_FOLDER}.write_common"),
        Point("label written", f"{_FOLDER}.write_common", after=True),
        Point("complete in the tier", f"{_STATE}.TierJob.note_complete", after=True),
        Point("keeping the newest", f"{_SLOTS}.keep"),
        Point("removing older generations", f"{_FOLDER}.remove_generations"),
        Point("older generations removed", f"{_FOLDER}.remove_generations", after=True),
        Point("removing a table", f"{_FOLDER}.remove_table"),
        Point("table removed", f"{_FOLDER}.remove_table", after=True),
    ),
    *_of(
        "save",
        Point("exchanging tables", "rankless.tier.copies_on_hosts.exchange_tables"),
        Point("sending to another host", f"{_P2P}.send"),
        Point("receiving from another host", f"{_P2P}.receive"),
        Point("waiting for another host", f"{_P2P}.wait_for_any"),
        needs="redundancy",
    ),
    *_of("save", Point("writing the table of a parity", f"{_FOLDER}.write_parity"), needs="parity"),
    *_of(
        "drain",
        Point("looking for later jobs", f"{_STATE}.TierJob.check_not_fenced", rank_0_only=True),
        Point("no later job found", f"{_STATE}.TierJob.check_not_fenced", after=True, rank_0_only=True),
        Point("creating the pending directory", f"{_STAGING}.create", rank_0_only=True),
        Point("writing", "rankless.save.shard_writer.write_file_ranges"),
        Point("publishing", f"{_STAGING}.publish", rank_0_only=True),
        Point("renaming", _RENAME, rank_0_only=True),
        Point("renamed", _RENAME, after=True, rank_0_only=True),
        Point("ending the drain", f"{_STATE}.TierJob.end_drain"),
        needs="drains",
    ),
    *_of(
        "loaded drain",
        Point("mapping the parts", "rankless.save.generation_content.GenerationContent._map_parts"),
        Point("opening the pending directory", f"{_OUTPUT}.begin", rank_0_only=True),
        Point("writing a part", f"{_DRAIN}.write_file_ranges"),
        Point("writing shared pages", f"{_DRAIN}.GenerationContent._write_edges", rank_0_only=True),
        Point("publishing", f"{_OUTPUT}._publish", rank_0_only=True),
        Point("renaming", _RENAME, rank_0_only=True),
        Point("published", f"{_OUTPUT}._publish", after=True, rank_0_only=True),
        needs="earlier",
    ),
    *_of(
        "load",
        Point("listing what the host has", f"{_HOSTS}.list_offers"),
        Point("listed what the host has", f"{_HOSTS}.list_offers", after=True),
        Point("taking over the folder", f"{_STATE}.TierJob.take_over"),
        Point("folder taken over", f"{_STATE}.TierJob.take_over", after=True),
        Point("verifying parts", f"{_ASSEMBLER}.PartAssembler.verify_share"),
        Point("fetching from other hosts", f"{_FETCH}.run_transfers"),
        Point("putting values in place", "rankless.state.restore.LoadTargets.apply"),
        Point("values in place", "rankless.state.restore.LoadTargets.apply", after=True),
        Point("announcing the job", f"{_STATE}.announce", rank_0_only=True),
        Point("job announced", f"{_STATE}.announce", after=True, rank_0_only=True),
        Point("claiming an incarnation", f"{_STATE}.claim", rank_0_only=True),
        Point("incarnation claimed", f"{_STATE}.claim", after=True, rank_0_only=True),
        Point("removing other generations", f"{_FOLDER}.remove_generations"),
        Point("other generations removed", f"{_FOLDER}.remove_generations", after=True),
        needs="earlier",
    ),
    *_of("load", Point("computing lost parts", f"{_ASSEMBLER}.rebuild_parts"), needs="earlier"),
)
