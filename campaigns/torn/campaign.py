"""``python -m campaigns.torn``: changes everything that was passed to an asynchronous save when the call returns.

It proves "Never torn" of ``docs/failure-model.md``. It changes parameters (in place, by an optimizer step, by new
memory), optimizer states and their scalars, learning rates, schedulers, user content down to nested lists, arrays and
tensors, and state dicts of other objects. With ``--staging overlapped``, parameters and states change only through the
next step of their optimizer.

Each checkpoint is then read again, its tensors without rankless: it must have the state at the call, bit for bit. It
exits with 1 on a violation.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from campaigns.common import case_runner
from campaigns.common.job import Job, Rank
from campaigns.torn.layouts import LAYOUTS
from campaigns.torn.training import ChangingTraining

#: The time limit, in seconds, of a thousand saves.
MAX_SECONDS = 1800.0


def save_and_compare(rank: Rank, path: Path, layout: str, staging: str, number: int) -> list[str]:
    """Save ``number`` times as one rank. Return the torn values."""
    del rank
    run = ChangingTraining(layout)
    return [torn for step in range(number) for torn in run.save_and_change(path, step, staging)]


def run_layouts(
    layouts: Sequence[str], staging: str, number: int, scratch: Path
) -> dict[str, tuple[int, float, list[str]]]:
    """Run the campaign over some layouts. Yield for each the saves, the seconds, and the torn values of any rank."""
    results = {}
    for layout in layouts:
        size = LAYOUTS[layout].ranks
        started = time.monotonic()
        with Job(size, "agent", scratch, save_and_compare, scratch / layout, layout, staging, number) as job:
            if not job.wait_until(lambda: len(job.outcomes) == size, MAX_SECONDS):  # noqa: B023 - it is over before the next one
                raise TimeoutError(f"{layout}: the ranks hang")
            torn = [
                f"{layout}: {name}"
                for end in job.outcomes.values()
                for name in end.result or [end.message] * bool(end.error)
            ]
        results[layout] = (number, time.monotonic() - started, torn)
    return results


def main() -> int:
    """Run the campaign, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.torn", description=__doc__)
    parser.add_argument("--scratch", type=Path, help="directory to save in (default: a temporary one)")
    parser.add_argument("--saves", type=int, default=220, help="saves in each layout (default: 220)")
    parser.add_argument("--staging", default="eager", choices=["eager", "overlapped"], help="when the copy is made")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        results = run_layouts(list(LAYOUTS), options.staging, options.saves, Path(folder))
    body = [
        (layout, LAYOUTS[layout].ranks, number, len(torn), f"{seconds:.0f}")
        for layout, (number, seconds, torn) in results.items()
    ]
    print(case_runner.format_table(("layout", "ranks", "saves", "torn", "s"), body))
    return case_runner.report_violations([name for *_, torn in results.values() for name in torn])
