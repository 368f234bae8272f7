"""The data of the report of one checkpoint, and the data that all reports of checkpoints have in common.

``rankless report`` calls it, and so do :mod:`rankless.report.run_report` and :mod:`rankless.report.weights_report`, in
one process. The scripts of the page read the keys.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rankless.errors import NoCheckpointError, RanklessError
from rankless.inspection.inspected_checkpoint import InspectedCheckpoint, inspect_exact_path
from rankless.report.health import Finding, judge_values, judge_verification
from rankless.report.statistics import Statistics, statistics_columns
from rankless.report.tensor_columns import NamedTensor, list_tensors, mark_shared, tensor_columns
from rankless.run.checkpoint_info import CheckpointInfo

#: The most checkpoints, and the most of them with statistics, in a page that is not full.
MAX_CHECKPOINTS, MAX_STATISTICS = 300, 20

#: The tags and statistics of checkpoints, oldest first.
History = Sequence[tuple[str, Statistics]]

#: The checkpoints below a path that were verified: the fields of a ``VerifyResult`` by tag.
Verified = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class ReportOptions:
    """The options of a report.

    ``read_statistics`` returns the statistics of a checkpoint, or ``None`` if there are none. ``is_full``: nothing is
    left out, however large the page becomes.
    """

    read_statistics: Callable[[InspectedCheckpoint], Statistics | None]
    verified: Verified = field(default_factory=dict)
    is_full: bool = False

    def limit(self, number: int) -> int:
        """Return a limit, or a number above all if there is none."""
        return sys.maxsize if self.is_full else number


def describe_checkpoint(path: Path, options: ReportOptions) -> dict[str, Any]:
    """Return the data of the report of one checkpoint of any format."""
    inspected = inspect_exact_path(path)
    history, unread = collect_statistics([(path.name, lambda: inspected)], options)
    findings = [*judge_verification(options.verified), *unread, *judge_values(history)]
    return {
        **describe_page("checkpoint", path, inspected, findings, options),
        "nbytes": sum(inspected.file_sizes().values()),
        "focus": path.name,
        **describe_tensors(inspected, None, history),
        "statistics_omitted": 0,
    }


def describe_page(
    kind: str, path: Path, inspected: InspectedCheckpoint, findings: Sequence[Finding], options: ReportOptions
) -> dict[str, Any]:
    """Return the data that every page has: its checkpoint, and the findings."""
    manifest = inspected.manifest
    return {
        "kind": kind,
        "path": str(path),
        "made": round(time.time(), 3),
        "format": inspected.reader.format,
        "step": manifest.step if manifest else None,
        "saved": manifest.time if manifest else None,
        "world_size": manifest.provenance.world_size if manifest else 0,
        "findings": list(dict.fromkeys(findings)),  # a verification and statistics find the same
        "notes": list(inspected.notes),
        "verified": {tag: dict(result) for tag, result in options.verified.items()},
    }


def describe_tensors(inspected: InspectedCheckpoint, before: CheckpointInfo | None, history: History) -> dict[str, Any]:
    """Return the table of tensors: their sharing with the checkpoint before, and the statistics, if there are any."""
    tensors = list_tensors(inspected)
    sharing = "" if before is None else _compare_with(tensors, inspected, before)
    return {
        "tensors": tensor_columns(tensors),
        "before": before.tag if before is not None and sharing else None,
        "sharing": sharing,
        "statistics": statistics_columns(tensors, history) if history else None,
    }


def _compare_with(tensors: Sequence[NamedTensor], inspected: InspectedCheckpoint, before: CheckpointInfo) -> str:
    """Compare tensors with the checkpoint before; the result is empty if that cannot be read now."""
    try:
        return mark_shared(tensors, inspected.reader, inspect_exact_path(before.path).reader)
    except RanklessError:
        return ""


def collect_statistics(
    checkpoints: Sequence[tuple[str, Callable[[], InspectedCheckpoint]]], options: ReportOptions
) -> tuple[History, list[Finding]]:
    """Return the statistics of checkpoints that have some, and a finding for each that cannot be read.

    ``checkpoints`` are tags, and functions that inspect the checkpoints. Those that were removed or replaced meanwhile
    are left out: a training may be running.
    """
    history: list[tuple[str, Statistics]] = []
    findings: list[Finding] = []
    for tag, inspect in checkpoints:
        try:
            statistics = options.read_statistics(inspect())
        except NoCheckpointError:
            continue
        except RanklessError as error:
            findings.append(("bad", f"{tag}: {error}"))
            continue
        if statistics is not None:
            history.append((tag, statistics))
    return history, findings
