"""The timeline of a run: the entries of its journal, saves that only manifests know, and where the run went back.

:mod:`rankless.report.run_report` calls it. The scripts of the page read the rows by their positions. A change here
needs the same change there.

Failures and resumes are the last entries that a long run leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rankless.report.compaction import sample_evenly
from rankless.run.catalog import CheckpointIdentity
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.history import Entry
from rankless.run.history_tree import Incarnation, RunTree
from rankless.run.journal import MAX_PLACEMENT, JournalEntry, Placement

#: The most kinds of phases that are shown.
_MAX_PHASES = 8

_NO_HISTORY = Entry()


@dataclass(frozen=True)
class Timeline:
    """Entries in the order of time.

    ``omitted`` of all are left out; ``is_journalled``: the run has a journal. ``rollbacks`` are the incarnations that a
    run went back with, by their times. ``history`` says which saves are abandoned.
    """

    entries: Sequence[JournalEntry]
    omitted: int
    is_journalled: bool
    rollbacks: Sequence[Incarnation]
    history: Entry

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
            "abandoned": [place for place, entry in enumerate(self.entries) if self._is_abandoned(entry)],
            "rollbacks": [
                [round(one.job.time, 3), one.base_tag, one.job.host, one.number, len(one.abandoned)]
                for one in self.rollbacks
                if one.job is not None
            ],
        }

    def _is_abandoned(self, entry: JournalEntry) -> bool:
        saved = CheckpointIdentity(entry.sequence, entry.run, "", entry.incarnation)
        return entry.kind == "saved" and entry.sequence > 0 and not self.history.is_current(saved)


def _cut(entry: JournalEntry) -> Placement:
    """Return the placement of an entry, with no more hosts than rankless writes."""
    return entry.placement[:MAX_PLACEMENT]


def build_timeline(
    checkpoints: Sequence[CheckpointInfo],
    journal: Sequence[JournalEntry],
    limit: int,
    *,
    history: Entry = _NO_HISTORY,
    trees: Sequence[RunTree] = (),
) -> Timeline:
    """Return the timeline of a run with at most ``limit`` entries. Removals and saves are left out first.

    ``history`` is the newest entry of the history. At most ``limit`` times that the run went back are in it, too.
    """
    known = {(entry.tag, entry.run, entry.sequence) for entry in journal if entry.kind == "saved"}
    saves = [_describe_save(info) for info in checkpoints if info.status == "complete"]
    from_manifests = [  # lines of a journal may lack the sequence number
        save for save in saves if known.isdisjoint((save.tag, save.run, sequence) for sequence in (save.sequence, 0))
    ]
    entries = sorted([*journal, *from_manifests], key=lambda entry: entry.time)
    kept = _sample_entries(entries, limit)
    back = [(one.job.time, one) for tree in trees for one in tree.incarnations if one.goes_back and one.job is not None]
    rollbacks = [one for _, one in sorted(back, key=lambda item: item[0])]
    return Timeline(kept, len(entries) - len(kept), bool(journal), sample_evenly(rollbacks, limit), history)


def _describe_save(info: CheckpointInfo) -> JournalEntry:
    """Return the entry of a checkpoint, with the tag that it was saved under unless it is a copy."""
    return JournalEntry(
        "saved",
        info.time,
        info.tag if info.is_copy else info.saved_as,
        info.step,
        info.run,
        info.world_size,
        nbytes=info.nbytes,
        incarnation=info.incarnation,
        sequence=info.sequence,
    )


def _sample_entries(entries: Sequence[JournalEntry], limit: int) -> list[JournalEntry]:
    """Keep failures and resumes if they fit into half of the limit, and saves and removals at even distances."""
    if len(entries) <= limit:
        return list(entries)
    rare = sample_evenly([entry for entry in entries if entry.kind in {"failed", "resumed"}], limit // 2)
    removed = sample_evenly([entry for entry in entries if entry.kind == "removed"], (limit - len(rare)) // 3)
    saved = sample_evenly([entry for entry in entries if entry.kind == "saved"], limit - len(rare) - len(removed))
    return sorted([*rare, *removed, *saved], key=lambda entry: entry.time)
