"""The data of the report of a run: its checkpoints, its history and its saves.

``rankless report`` calls it. The scripts of the page read the keys, and the order of the columns in rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rankless.errors import StorageError
from rankless.inspection.inspected_checkpoint import inspect_exact_path
from rankless.report.checkpoint_report import (
    MAX_CHECKPOINTS,
    MAX_STATISTICS,
    History,
    ReportOptions,
    collect_statistics,
    describe_page,
    describe_tensors,
)
from rankless.report.compaction import sample_evenly
from rankless.report.health import (
    Finding,
    judge_checkpoints,
    judge_history,
    judge_saves,
    judge_values,
    judge_verification,
)
from rankless.report.timeline import build_timeline
from rankless.run.aliases import list_aliases, means
from rankless.run.catalog import list_checkpoints, list_stale_directories
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.history import Entry
from rankless.run.history_tree import build_trees
from rankless.run.journal import JournalEntry, read_journal
from rankless.run.stored_history import read_entries
from rankless.storage.links_and_clones import own_bytes
from rankless.storage.store import store_of

#: The most entries of the timeline in a page that is not full.
_MAX_ENTRIES = 1_000


def describe_run(run: Path, tag: str, options: ReportOptions) -> dict[str, Any]:
    """Return the data of the report of a run, with the tensors of the checkpoint ``tag``."""
    checkpoints, leftovers = list_checkpoints(run), list_stale_directories(run)
    journal, journal_findings = _read_journal(run)
    entries = read_entries(run, {info.incarnation for info in checkpoints}).entries
    trees = build_trees(entries, checkpoints)
    focus = next(info for info in reversed(checkpoints) if info.status == "complete" and info.tag == tag)
    until_focus = next(tree for tree in trees if tree.run == focus.run).ancestors_of(focus)
    history, unread = _read_history(until_focus, options)
    shown = sample_evenly(checkpoints, options.limit(MAX_CHECKPOINTS))
    inspected = inspect_exact_path(focus.path)
    findings = [
        *judge_checkpoints(checkpoints, leftovers),
        *judge_history(trees),
        *journal_findings,
        *judge_saves(journal),
        *judge_verification(options.verified),
        *unread,
        *judge_values(history),
    ]
    return {
        **describe_page("run", run, inspected, findings, options),
        "nbytes": sum(inspected.file_sizes().values()),
        "focus": tag,
        "checkpoints": _checkpoint_rows(run, shown),
        "checkpoints_omitted": len(checkpoints) - len(shown),
        "timeline": build_timeline(
            checkpoints,
            journal,
            options.limit(_MAX_ENTRIES),
            history=entries[0] if entries else Entry(),
            trees=trees,
        ).as_record(),
        **describe_tensors(inspected, until_focus[-2] if len(until_focus) > 1 else None, history),
        "statistics_omitted": max(0, len(until_focus) - options.limit(MAX_STATISTICS)),
    }


def _read_journal(run: Path) -> tuple[list[JournalEntry], list[Finding]]:
    """Return the journal, or a finding if it cannot be read."""
    try:
        return read_journal(run), []
    except StorageError as error:
        return [], [("note", f"The journal of saves is not shown: {error}")]


def _read_history(infos: Sequence[CheckpointInfo], options: ReportOptions) -> tuple[History, list[Finding]]:
    """Return the statistics of checkpoints, which are sampled if there are many."""
    sampled = sample_evenly(infos, options.limit(MAX_STATISTICS))
    return collect_statistics([(info.tag, partial(inspect_exact_path, info.path)) for info in sampled], options)


def _checkpoint_rows(run: Path, infos: Sequence[CheckpointInfo]) -> list[list[Any]]:
    aliases = list_aliases(run)
    return [
        [
            info.tag,
            info.status,
            info.step,
            round(info.time, 3),
            info.world_size,
            info.run,
            info.nbytes,
            info.nbytes if store_of(info.path).is_remote else own_bytes(info.path),
            [name for name, alias in aliases.items() if means(alias, info)],
            dict(info.metrics),
            info.problem,
            info.is_current,
        ]
        for info in infos
    ]
