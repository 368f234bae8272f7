"""The first lines of a report: whether the run is healthy, and if not, the problems.

:mod:`rankless.report.run_report` calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rankless.observe.units import format_count
from rankless.report.statistics import Statistics
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.history_tree import RunTree
from rankless.run.journal import JournalEntry
from rankless.run.run_store import StaleDirectory

#: A finding: ``"bad"`` needs somebody's attention, ``"note"`` is good to know.
Finding = tuple[Literal["bad", "note"], str]

#: A tensor has probably diverged if its norm became so many times as large since the checkpoint before.
_JUMP = 10.0


def judge_saves(journal: Sequence[JournalEntry]) -> list[Finding]:
    """Return a finding if the newest save failed, or others did."""
    ended = [entry for entry in journal if entry.kind in {"saved", "failed"}]
    failed = [entry for entry in ended if entry.kind == "failed"]
    if not failed:
        return []
    text = f"{format_count(len(failed), 'save')} of {len(ended):,} failed; the last one, {failed[-1].tag}"
    reason = f", because: {failed[-1].error}" if failed[-1].error else ""
    is_last = ended[-1] is failed[-1]
    return [("bad" if is_last else "note", f"{text}{reason}{'' if is_last else ' (later saves succeeded)'}")]


def judge_checkpoints(checkpoints: Sequence[CheckpointInfo], leftovers: Sequence[StaleDirectory]) -> list[Finding]:
    """Return findings about checkpoints that cannot be read, and about leftovers of interrupted saves."""
    findings: list[Finding] = [
        ("bad", f"{info.tag} is {info.status}: {info.problem}") for info in checkpoints if info.status != "complete"
    ]
    corrupt = [leftover for leftover in leftovers if leftover.state == "corrupt"]
    findings += [("bad", f"A load found {leftover.tag} corrupt and set it aside") for leftover in corrupt]
    if unfinished := len(leftovers) - len(corrupt):
        findings.append(
            ("note", f"{format_count(unfinished, 'unfinished save')}: still running, or interrupted (rankless prune)")
        )
    return findings


def judge_history(trees: Sequence[RunTree]) -> list[Finding]:
    """Return a finding for each run that has abandoned checkpoints, which says where it went back last."""
    findings: list[Finding] = []
    for tree in trees:
        by = [one for one in tree.incarnations if one.abandoned]
        if not by:
            continue
        count, back = sum(len(one.abandoned) for one in by), [one for one in by if one.goes_back]
        last = f": the run went back, last to {back[-1].base_tag or 'a checkpoint that is removed'}" if back else ""
        verb = "is" if count == 1 else "are"
        findings.append(("note", f"{format_count(count, 'checkpoint')} {verb} abandoned{last} (rankless ls --tree)"))
    return findings


def judge_verification(verified: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Return a finding for each problem that a verification found, and one if it found none."""
    problems = [f"{tag}: {problem}" for tag, result in verified.items() for problem in result["problems"]]
    if verified and not problems:
        return [("note", f"Every byte of {format_count(len(verified), 'checkpoint')} was read and verified")]
    return [("bad", problem) for problem in problems]


def judge_values(history: Sequence[tuple[str, Statistics]]) -> list[Finding]:
    """Return findings about elements that are not finite, and norms that jumped, in the last of several statistics."""
    if not history:
        return []
    tag, last = history[-1]
    bad = [name for name, each in last.items() if each.finite < each.elements]
    findings: list[Finding] = []
    if bad:
        findings.append(("bad", f"{format_count(len(bad), 'tensor')} of {tag} with NaN or infinity, such as {bad[0]}"))
    before = history[-2][1] if len(history) > 1 else {}
    norms_before = {name: each.norm for name, each in before.items() if each.norm}
    grown = {
        name: each.norm / norms_before[name]
        for name, each in last.items()
        if name in norms_before and each.norm is not None
    }
    jumped = {name: ratio for name, ratio in grown.items() if ratio > _JUMP}
    if jumped:
        name = max(jumped, key=lambda name: jumped[name])
        count = format_count(len(jumped), "tensor")
        findings.append(
            ("note", f"The norm of {count} is over {_JUMP:.0f} times that of {history[-2][0]}: {name}, most of all")
        )
    return findings
