"""``python -m campaigns.run_histories``: random histories of a run: the proof of "One history" in the failure model.

Jobs with and without a tier, on several hosts, start, save, go back, are killed at any call, stopped and woken; others
read, pin, copy, move, merge, remove and prune. After each event the oracle compares what is there, and what a job has
loaded, with what the content of each checkpoint says. It prints the figures of each kind of place, and each violation
with the history that led to it; ``--seed N --only`` makes it again. It exits with 1 on any violation.

5,000 histories take one to two hours of two cores. With ``--record FILE`` the same command goes on after an
interruption.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from campaigns.common.case_runner import report_violations
from campaigns.common.fork_server import CONTEXT
from campaigns.run_histories.batches import run_batch
from campaigns.run_histories.history import EVENTS
from campaigns.run_histories.places import KINDS
from campaigns.run_histories.record import Record, load_record, save_record

#: The histories that a worker makes before its results are collected.
_BATCH = 10

#: How often two events must follow each other.
_PAIR = 50


def main() -> int:
    """Make the histories, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.run_histories", description=__doc__)
    parser.add_argument("--histories", type=int, default=5000, help="how many, over all kinds of places")
    parser.add_argument("--events", type=int, default=26, help="the events of each")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--seed", type=int, default=0, help="that of the first history")
    parser.add_argument("--only", action="store_true", help="make one history, in the first kind, and print all of it")
    parser.add_argument("--stop", action="store_true", help="stop at the first violation")
    parser.add_argument("--record", type=Path, help="the file to go on from, and to write after each batch")
    parser.add_argument("--workers", type=int, default=2 * (os.cpu_count() or 1))
    options = parser.parse_args()
    if options.only:
        batch = run_batch((options.kinds[0], options.seed, 1, options.events), prints=True)
        return report_violations(batch.violations)
    started, record = time.monotonic(), load_record(options.record)
    with ProcessPoolExecutor(options.workers, CONTEXT) as pool:
        left = [batch for batch in _list_batches(options) if batch[:2] not in record.batches]
        for (kind, seed, *_), result in zip(left, pool.map(run_batch, left), strict=True):
            record.add(kind, seed, result)
            save_record(options.record, record)
            print(f"{sum(record.histories.values())} of {options.histories} histories", file=sys.stderr, flush=True)
            for violation in result.violations:
                print(violation, file=sys.stderr, flush=True)
            if record.violations and options.stop:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    _print_figures(record)
    print(f"{time.monotonic() - started:.0f} s, {len(record.violations)} violations")
    return 1 if record.violations else 0


def _list_batches(options: argparse.Namespace) -> list[tuple[str, int, int, int]]:
    """Return the arguments of :func:`run_batch`: the kinds of places take turns."""
    each = options.histories // len(options.kinds)
    firsts = range(0, each, _BATCH)
    return [
        (kind, options.seed + place * each + first, min(_BATCH, each - first), options.events)
        for first, (place, kind) in itertools.product(firsts, enumerate(options.kinds))
    ]


def _print_figures(record: Record) -> None:
    print("| place | histories | violations |\n|---|---:|---:|")
    for kind, made in record.histories.items():
        print(f"| {kind} | {made} | {sum(one.startswith(f'{kind}, ') for one in record.violations)} |")
    counts = record.counts
    often = sorted((counts.pairs.get(pair, 0), *pair) for pair in itertools.product(EVENTS, EVENTS))
    print(f"{counts.resumed} of {counts.resumes} resumes returned a checkpoint")
    print(
        f"{sum(count >= _PAIR for count, *_ in often)} of {len(often)} ordered pairs of events: {_PAIR} times or more"
    )
    print("the rarest:", ", ".join(f"{before} -> {after} {count}" for count, before, after in often[:5]))
    print("errors:", ", ".join(f"{count} {name}" for name, count in sorted(counts.errors.items())))


if __name__ == "__main__":
    sys.exit(main())
