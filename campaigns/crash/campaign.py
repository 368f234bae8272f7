"""``python -m campaigns.crash``: runs every scenario on 1, 2 and 4 ranks, crashes it everywhere, and prints a table.

It proves "Crash anywhere" of ``docs/failure-model.md``. It exits with 1 on a violation, and keeps the disk that the
crash left.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from campaigns.crash.operations import History
from campaigns.crash.recording import record_scenario
from campaigns.crash.scenarios import SCENARIOS, Scenario
from campaigns.crash.state_check import Findings, check_states, write_tree
from campaigns.crash.states import describe_operations
from tests.helpers.pool import Ranks

#: The most violations of one history that are kept.
_KEPT = 3


@dataclass(frozen=True)
class _Case:
    """A scenario on a number of ranks, and their recorded operations."""

    scenario: Scenario
    ranks: int
    history: History

    @property
    def name(self) -> str:
        """The name of its directory."""
        return f"{self.scenario.name}, {self.ranks} ranks".replace(", ", "-").replace(" ", "-")


def main() -> None:
    """Run the scenarios that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.crash", description=__doc__)
    parser.add_argument("scenarios", nargs="*", help="names of the scenarios to run (default: all)")
    states = "the most distinct states of each scenario and number of ranks (default: 300)"
    parser.add_argument("--states", type=int, default=300, help=states)
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample of states (default: 0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that examine states")
    parser.add_argument("--kept", type=Path, default=Path("crash_violations"), help="directory for violations")
    parser.add_argument("--folder", type=Path, help="a directory on the file system to use, such as XFS")
    options = parser.parse_args()
    chosen = [scenario for scenario in SCENARIOS if scenario.name in options.scenarios or not options.scenarios]
    if len(chosen) < len(options.scenarios):
        parser.error(f"the scenarios are: {'; '.join(scenario.name for scenario in SCENARIOS)}")
    started = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context, torch.set_num_threads, (1,)) as workers:
        cases = [
            (case, workers.submit(_check_case, case, options.states, options.seed))
            for case in _record_cases(chosen, options.folder)
        ]
        rows = [_print_row(case, future, options.kept) for case, future in cases]
    print(f"| all | | {' | '.join(str(sum(column)) for column in zip(*rows, strict=True))} | |")
    print(f"\n{time.monotonic() - started:.0f} s; seed {options.seed}")
    if any(row[-1] for row in rows):
        sys.exit(f"the disks of the violations are in {options.kept.absolute()}")


def _record_cases(scenarios: Sequence[Scenario], parent: Path | None) -> Iterator[_Case]:
    """Record each scenario on every number of ranks."""
    print("| scenario | ranks | operations | states | old | new | none | violations | seconds |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    pool = Ranks()
    try:
        for scenario in scenarios:
            for ranks in (1, 2, 4):
                with tempfile.TemporaryDirectory(prefix="rankless-crash-", dir=parent) as folder:
                    yield _Case(scenario, ranks, record_scenario(scenario, ranks, pool, Path(folder)))
    finally:
        pool.close()


def _check_case(case: _Case, limit: int, seed: int) -> tuple[Findings, float]:
    started = time.monotonic()
    return check_states(case.scenario, case.history, limit, seed), time.monotonic() - started


def _print_row(case: _Case, future: Future[tuple[Findings, float]], kept: Path) -> tuple[int, ...]:
    """Print a line of the table. Return its numbers."""
    findings, seconds = future.result()
    for number, failed in enumerate(findings.violations[:_KEPT]):
        folder = kept / f"{case.name}-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        write_tree(failed.state.tree, folder / "disk")
        (folder / "why.txt").write_text(
            f"{failed.reason}\n\n" + "\n".join(describe_operations(case.history, failed.state)) + "\n"
        )
    outcomes = (findings.outcomes[kind] for kind in ("old", "new", "none"))
    numbers = len(case.history.operations), findings.checked, *outcomes, len(findings.violations)
    print(f"| {case.scenario.name} | {case.ranks} | {' | '.join(map(str, numbers))} | {seconds:.1f} |", flush=True)
    return numbers
