"""``python -m campaigns.run_histories``: random histories of a run: the proof of "One history" in the failure model.

Jobs with and without a tier, on several hosts, start, save, go back, are killed at any call, stopped and woken; others
read, pin, copy, move, merge, remove and prune. After each event the oracle compares what is there, and what a job has
loaded, with what the content of each checkpoint says. It prints the figures of each kind of place, and each violation
with the history that led to it; ``--seed N --only`` makes it again. It exits with 1 on any violation.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from campaigns.common.case_runner import report_violations
from campaigns.common.fork_server import CONTEXT
from campaigns.run_histories.batches import run_batch
from campaigns.run_histories.history import EVENTS
from campaigns.run_histories.places import KINDS
from campaigns.run_histories.state import Counts

#: The histories that a worker makes before its results are collected.
_BATCH = 10


def main() -> int:
    """Make the histories, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.run_histories", description=__doc__)
    parser.add_argument("--histories", type=int, default=5000, help="how many, over all kinds of places")
    parser.add_argument("--events", type=int, default=26, help="the events of each")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--seed", type=int, default=0, help="that of the first history")
    parser.add_argument("--only", action="store_true", help="make one history, in the first kind, and print all of it")
    parser.add_argument("--stop", action="store_true", help="stop at the first violation")
    parser.add_argument("--workers", type=int, default=2 * (os.cpu_count() or 1))
    options = parser.parse_args()
    if options.only:
        batch = run_batch((options.kinds[0], options.seed, 1, options.events), prints=True)
        return report_violations(batch.violations)
    started, total, violations = time.monotonic(), Counts(), []
    print("| place | histories | violations |\n|---|---:|---:|", flush=True)
    for place, kind in enumerate(options.kinds):
        each = options.histories // len(options.kinds)
        batches = [
            (kind, options.seed + place * each + first, min(_BATCH, each - first), options.events)
            for first in range(0, each, _BATCH)
        ]
        found, made = [], 0
        with ProcessPoolExecutor(options.workers, CONTEXT) as pool:
            for batch in pool.map(run_batch, batches):
                total.add(batch.counts)
                made += batch.histories
                print(f"{kind}: {made} of {each} histories", file=sys.stderr, flush=True)
                found += batch.violations
                for violation in batch.violations:
                    print(violation, file=sys.stderr, flush=True)
                if found and options.stop:
                    pool.shutdown(wait=False, cancel_futures=True)
                    return 1
        print(f"| {kind} | {each} | {len(found)} |", flush=True)
        violations += found
    pairs = [total.pairs.get((before, after), 0) for before in EVENTS for after in EVENTS]
    rare = {(before, after) for before in EVENTS for after in EVENTS if total.pairs.get((before, after), 0) < 50}
    print(f"{total.resumed} of {total.resumes} resumes returned a checkpoint")
    print(f"each of {len(pairs) - len(rare)} of {len(pairs)} ordered pairs of events occurred at least 50 times")
    print("errors:", ", ".join(f"{count} {name}" for name, count in sorted(total.errors.items())))
    print(f"{time.monotonic() - started:.0f} s, {len(violations)} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
