"""The data of the report of published weights: all versions, and the tensors of the newest one.

``rankless report`` calls it in one process. It only reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rankless.errors import CorruptCheckpointError, NoCheckpointError, RanklessError
from rankless.formats.weights.version_files import list_numbers, manifest_path, read_manifest
from rankless.inspection.inspected_checkpoint import InspectedCheckpoint, inspect_exact_path
from rankless.ondisk.weight_versions import VersionManifest
from rankless.report.checkpoint_report import (
    MAX_CHECKPOINTS,
    MAX_STATISTICS,
    ReportOptions,
    collect_statistics,
    describe_page,
    describe_tensors,
)
from rankless.report.compaction import sample_evenly
from rankless.report.health import Finding, judge_values, judge_verification
from rankless.storage.store import store_of


def describe_versions(directory: Path, options: ReportOptions) -> dict[str, Any]:
    """Return the data of the report of a weights directory.

    Raises ``CorruptCheckpointError`` if no version can be read, ``NoCheckpointError`` if all were removed meanwhile.
    """
    manifests, corrupt = _read_manifests(directory)
    newest, inspected = _inspect_newest(directory, manifests, corrupt)
    sampled = sample_evenly(manifests, options.limit(MAX_STATISTICS))
    history, unread = collect_statistics(
        [
            (str(manifest.number), partial(inspect_exact_path, manifest_path(directory, manifest.number)))
            for manifest in sampled
        ],
        options,
    )
    findings = [*corrupt, *judge_verification(options.verified), *unread, *judge_values(history)]
    shown = sample_evenly(manifests, options.limit(MAX_CHECKPOINTS))
    return {
        **describe_page("weights", directory, inspected, findings, options),
        "nbytes": newest.nbytes,
        "step": newest.step,
        "saved": newest.time,
        "focus": str(newest.number),
        "checkpoints": [_describe_row(manifest) for manifest in shown],
        "checkpoints_omitted": len(manifests) - len(shown),
        **describe_tensors(inspected, None, history),
        "statistics_omitted": max(0, len(manifests) - options.limit(MAX_STATISTICS)),
    }


def _inspect_newest(
    directory: Path, manifests: Sequence[VersionManifest], findings: list[Finding]
) -> tuple[VersionManifest, InspectedCheckpoint]:
    """Return the newest version that can be opened, and add a finding for each newer one."""
    for manifest in reversed(manifests):
        path = manifest_path(directory, manifest.number)
        try:
            return manifest, inspect_exact_path(path)
        except RanklessError as error:
            if store_of(path).file_exists(path):  # else retention has removed it meanwhile
                findings.append(("bad", f"{manifest.number}: {error}"))
    if findings:
        raise CorruptCheckpointError(f"no version in {directory} can be read: {findings[-1][1]}")
    raise NoCheckpointError(f"the versions in {directory} were removed")


def _read_manifests(directory: Path) -> tuple[list[VersionManifest], list[Finding]]:
    """Return the manifests that can be read, oldest first, and a finding for each other one."""
    manifests: list[VersionManifest] = []
    findings: list[Finding] = []
    for number in list_numbers(directory):
        try:
            manifests.append(read_manifest(directory, number))
        except NoCheckpointError:  # it was removed meanwhile
            continue
        except RanklessError as error:
            findings.append(("bad", f"{number}: {error}"))
    return manifests, findings


def _describe_row(manifest: VersionManifest) -> list[Any]:
    """Return a version as a row of the table of checkpoints."""
    return [
        str(manifest.number),
        "complete",
        manifest.step,
        round(manifest.time, 3),
        0,
        "" if manifest.training is None else manifest.training.run,
        manifest.nbytes,
        manifest.written_bytes,
        ["anchor" if manifest.is_anchor else "delta"],
        dict(manifest.metrics),
        "",
        True,
    ]
