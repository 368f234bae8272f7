"""``rankless report``: writes a run, a checkpoint, or a difference into one HTML page.

It runs in one process, while a training may save, and writes nothing but the page. With ``--verify`` and ``--stats`` it
reads tensors (:mod:`rankless.cli.verify_one`, :mod:`rankless.inspection.checkpoint_statistics`), with a second
checkpoint those that may differ (:mod:`rankless.inspection.compare`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from rankless.cli import checkpoint_argument
from rankless.cli.command_process import leave_on_interrupt
from rankless.cli.completion import complete_checkpoints
from rankless.cli.verify_one import verify_checkpoint
from rankless.errors import CorruptCheckpointError, InvalidArgumentError, NoCheckpointError
from rankless.formats.weights.version_files import list_numbers, manifest_path
from rankless.inspection.brief_text import format_brief
from rankless.inspection.checkpoint_statistics import measure_checkpoint, select_tensors
from rankless.inspection.compare import compare_metadata, compare_suspects
from rankless.inspection.inspected_checkpoint import InspectedCheckpoint, inspect_path, list_targets
from rankless.inspection.kept_statistics import find_statistics
from rankless.observe.terminal import escape_control_characters, show_progress, terminal_console
from rankless.observe.units import format_size
from rankless.report.checkpoint_report import ReportOptions, Verified, describe_checkpoint
from rankless.report.difference_report import describe_difference
from rankless.report.page import render_page
from rankless.report.run_report import describe_run
from rankless.report.statistics import Statistics
from rankless.report.weights_report import describe_versions
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.run_store import tag_of
from rankless.storage.atomic_rename import replace_output
from rankless.storage.posix import local_path

#: How often a run is looked at if its latest checkpoint is removed meanwhile.
_ATTEMPTS = 5


def report(  # noqa: PLR0917 - options of the command
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CKPT", help="A run's folder, or a checkpoint.", autocompletion=complete_checkpoints
        ),
    ],
    other: Annotated[
        str | None,
        typer.Argument(
            metavar="CKPT", help="Show what differs from this checkpoint.", autocompletion=complete_checkpoints
        ),
    ] = None,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="The file to write; it is replaced.")
    ] = "report.html",
    tag: checkpoint_argument.Tag = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Read tensors whose statistics are not kept, up to 20 checkpoints.")
    ] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read and verify the checkpoint.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Leave nothing out, however large the page is.")] = False,
) -> None:
    """Write a page that shows what a run, or published weights, look like: saves, where the bytes are, and tensors.

    The page is one HTML file, which opens without a network. Of a long run it shows a sample, and says so; with --full
    all. The values of tensors are shown of checkpoints that were saved with stats=True. With two checkpoints the page
    shows what differs between them.
    """
    if other is not None and (tag is not None or stats or verify or full):
        raise InvalidArgumentError("--tag, --stats, --verify and --full are for one run or checkpoint: leave them out")
    file, path = local_path(output), checkpoint_argument.resolve_path(checkpoint, tag)
    if other is None:
        data = _describe_current(path, stats=stats, verify=verify, full=full)
    else:
        data = _describe_difference(path, checkpoint_argument.resolve_path(other, None))
    page = render_page(f"{path.name} and {Path(other).name}" if other is not None else path.name, data)
    replace_output(file, page)
    terminal_console().print(f"wrote {escape_control_characters(str(file))}, {format_size(len(page))}")


def _describe_current(path: Path, *, stats: bool, verify: bool, full: bool) -> Mapping[str, Any]:
    """Describe a run or a checkpoint, and begin again if a training removes the latest checkpoint meanwhile."""
    for _ in range(_ATTEMPTS - 1):
        with suppress(NoCheckpointError):
            return _describe_target(path, stats=stats, verify=verify, full=full)
    return _describe_target(path, stats=stats, verify=verify, full=full)


def _describe_target(path: Path, *, stats: bool, verify: bool, full: bool) -> Mapping[str, Any]:
    """Describe published weights, or the run that a path is, or is in, or else the checkpoint that it is."""
    if numbers := list_numbers(path):
        newest = manifest_path(path, numbers[-1])
        verified = {str(numbers[-1]): asdict(verify_checkpoint(newest))} if verify else {}
        return describe_versions(path, ReportOptions(_find_or_compute if stats else _find_kept, verified, is_full=full))
    run, focus = _find_focus(path)
    checkpoint = path if focus is None else focus.path
    options = ReportOptions(
        _find_or_compute if stats else _find_kept, _verify(checkpoint) if verify else {}, is_full=full
    )
    return describe_checkpoint(checkpoint, options) if focus is None else describe_run(run, focus.tag, options)


def _find_focus(path: Path) -> tuple[Path, CheckpointInfo | None]:
    """Return the run, and the checkpoint with the tensors to show; ``None`` if the path is no part of a run.

    Raises ``CorruptCheckpointError`` if no checkpoint of the run can be read.
    """
    if checkpoints := list_targets(path):
        if checkpoints[-1].status != "complete":
            raise CorruptCheckpointError(f"no checkpoint in {path} can be read: {checkpoints[-1].problem}")
        return path, checkpoints[-1]
    siblings = list_targets(path.parent)
    focus = next((info for info in siblings if info.path == path and info.status == "complete"), None)
    return path.parent, focus


def _verify(path: Path) -> Verified:
    return {tag_of(path): asdict(verify_checkpoint(path))}


def _find_kept(inspected: InspectedCheckpoint) -> Statistics | None:
    kept = find_statistics(inspected)
    return None if kept is None else kept.tensors


def _find_or_compute(inspected: InspectedCheckpoint) -> Statistics:
    if (kept := _find_kept(inspected)) is not None:
        return kept
    with leave_on_interrupt():
        from rankless.inspection import measured_tensors  # noqa: F401, PLC0415 - NumPy is slow to import
    keys = select_tensors(inspected, None)
    nbytes = sum(inspected.reader.groups[group][name].nbytes for group, name in keys)
    with show_progress(f"reading {inspected.path.name}", nbytes) as done:
        return measure_checkpoint(inspected, keys, done).tensors


def _describe_difference(left_path: Path, right_path: Path) -> Mapping[str, Any]:
    left, right = inspect_path(left_path), inspect_path(right_path)
    comparison = compare_metadata(left, right, None)
    if comparison.suspect:
        with leave_on_interrupt():
            from rankless.inspection import tensor_differences  # noqa: F401, PLC0415 - NumPy is slow to import
        with show_progress("comparing", comparison.suspect_nbytes) as done:
            comparison = compare_suspects(comparison, done)
    values = [(leaf.path, format_brief(leaf.left), format_brief(leaf.right)) for leaf in comparison.values]
    return describe_difference(comparison, values)
