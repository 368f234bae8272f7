"""``python -m campaigns.tier.histories``: kills and stops ranks and hosts of jobs with a local tier, at random moments.

It proves "The local tier" of ``docs/failure-model.md``. A history is a run that several jobs continue, each on other
hosts, in another number of ranks, layout and with other options of the tier. Something happens to each of them: a rank,
all ranks of a host, or all are killed or stopped, at a moment of a save, of a drain or of a load, or at any time; hosts
lose what they have; a job that was stopped goes on while the next one runs. :mod:`campaigns.tier.histories.oracle` says
what the next job must load. It exits with 1 on any violation, and prints how to repeat the history.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from campaigns.common import case_runner
from campaigns.tier.histories.history import Happened, run_history


def main() -> int:
    """Run the campaign, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.tier.histories", description=__doc__)
    parser.add_argument("--histories", type=int, default=60, help="number of histories (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first history (default: 0)")
    parser.add_argument("--length", type=int, default=8, help="jobs of a history (default: 8)")
    parser.add_argument("--together", type=int, default=3, help="number of histories that run at a time (default: 3)")
    parser.add_argument("--scratch", type=Path, help="directory of the histories (default: a temporary one)")
    parser.add_argument("--only", default="", help="only moments whose names contain this text")
    options = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="tier-histories-", dir=options.scratch))
    started = time.monotonic()
    seeds = range(options.seed, options.seed + options.histories)
    run_one = partial(run_history, length=options.length, scratch=scratch, only=options.only)
    outcomes = [outcome for _, outcome in case_runner.run_cases(seeds, run_one, options.together)]
    print_report(happened for outcome in outcomes for happened in outcome.happened)
    print(f"{len(outcomes)} histories, {time.monotonic() - started:.0f} s")
    return case_runner.report_violations([outcome.violation for outcome in outcomes if outcome.violation])


def print_report(all_happened: Iterable[Happened]) -> None:
    """Print how often each incident has happened, by its moment."""
    happened = list(all_happened)
    kinds = sorted({one.kind for one in happened})
    rows = []
    for phase in sorted({one.phase for one in happened}):
        counts = Counter(one.kind for one in happened if one.phase == phase and one.is_hit)
        missed = sum(one.phase == phase and not one.is_hit for one in happened)
        rows.append((phase, *(counts[kind] for kind in kinds), missed))
    totals = Counter(one.kind for one in happened)
    rows.append(("all", *(totals[kind] for kind in kinds), sum(not one.is_hit for one in happened)))
    print(case_runner.format_table(("moment", *kinds, "moment missed"), rows))
    kills = sum(count for kind, count in totals.items() if kind.startswith(("kill", "stop")))
    lost = sum(one.lost_hosts for one in happened)
    print(f"\n{kills} kills and stops, {totals['go on']} jobs that went on beside the next one, {lost} hosts lost")


if __name__ == "__main__":
    sys.exit(main())
