"""The timeline of a run: the entries of its journal, and what the manifests know of saves that are not in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rankless.report.compaction import sample_evenly
from rankless.run.journal import MAX_PLACEMENT, JournalEntry, Placement
from rankless.run.scan import CheckpointInfo

#: The most kinds of phases that are shown.
_MAX_PHASES = 8


@dataclass(frozen=True)
class Timeline:
    """Entries in the order of time. ``omitted`` of all are left out; ``is_journalled``: the run has a journal."""

    entries: Sequence[JournalEntry]
    omitted: int
    is_journalled: bool

    def as_record(self) -> dict[str, Any]:
        """Return the timeline as JSON: a list for each entry. Placements and names of phases are lists of their own."""
        placements = {placement: number for number, placement in enumerate(dict.fromkeys(map(_cut, self.entries)))}
        names = [*dict.fromkeys(name for entry in self.entries for name, _ in entry.phases)][:_MAX_PHASES]
        rows = [
            [
                entry.kind,
                round(entry.time, 3),
                entry.tag,
                entry.step,
                entry.world_size,
                entry.hosts,
                entry.blocking_seconds,
                entry.seconds,
                entry.nbytes,
                entry.shared_nbytes,
                entry.error,
                placements[_cut(entry)],
                [dict(entry.phases).get(name) for name in names] if entry.phases else [],
            ]
            for entry in self.entries
        ]
        return {
            "entries": rows,
            "placements": list(placements),
            "phases": names,
            "omitted": self.omitted,
            "journalled": self.is_journalled,
        }


def _cut(entry: JournalEntry) -> Placement:
    """Return the placement of an entry, with no more hosts than rankless writes."""
    return entry.placement[:MAX_PLACEMENT]


def build_timeline(checkpoints: Sequence[CheckpointInfo], journal: Sequence[JournalEntry], limit: int) -> Timeline:
    """Return the timeline of a run with at most ``limit`` entries. Removals and saves are left out first."""
    known = {(entry.tag, entry.run) for entry in journal if entry.kind == "saved"}
    from_manifests = [
        JournalEntry("saved", info.time, info.tag, info.step, info.run, info.world_size, nbytes=info.nbytes)
        for info in checkpoints
        if info.status == "complete" and (info.tag, info.run) not in known
    ]
    entries = sorted([*journal, *from_manifests], key=lambda entry: entry.time)
    kept = _sample_entries(entries, limit)
    return Timeline(kept, len(entries) - len(kept), bool(journal))


def _sample_entries(entries: Sequence[JournalEntry], limit: int) -> list[JournalEntry]:
    """Keep failures and resumes if they fit into half of the limit, and saves and removals at even distances."""
    if len(entries) <= limit:
        return list(entries)
    rare = sample_evenly([entry for entry in entries if entry.kind in {"failed", "resumed"}], limit // 2)
    removed = sample_evenly([entry for entry in entries if entry.kind == "removed"], (limit - len(rare)) // 3)
    saved = sample_evenly([entry for entry in entries if entry.kind == "saved"], limit - len(rare) - len(removed))
    return sorted([*rare, *removed, *saved], key=lambda entry: entry.time)
