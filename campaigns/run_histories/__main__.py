"""``python -m campaigns.run_histories``: random histories of a run.

They prove "Jobs side by side" of ``docs/failure-model.md``. Jobs with and without a tier, on several hosts, start,
save, go back, are killed at any call, stopped and woken; others read, pin, copy, move, merge, remove and prune. After
each event the oracle compares what is there, and what a job has loaded, with what the content of each checkpoint says.
It prints the figures of each kind of place, and each violation with the history that led to it and the options that
make it again. It exits with 1 on any violation.

Each batch draws more often the pairs of events that were rare in the batches before it. 5,000 histories take three
hours of two cores. With ``--record FILE`` the same command goes on after an interruption.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

from campaigns.common.case_runner import report_violations
from campaigns.common.fork_server import CONTEXT
from campaigns.run_histories.batches import Batch, BatchResult, run_batch
from campaigns.run_histories.draws import PAIR, find_rare
from campaigns.run_histories.history import EVENTS
from campaigns.run_histories.places import KINDS
from campaigns.run_histories.record import Record, load_record, save_record

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
    parser.add_argument("--script", default="", help="with --only: the events, divided by '; '")
    parser.add_argument("--record", type=Path, help="the file to go on from, and to write after each batch")
    parser.add_argument("--workers", type=int, default=2 * (os.cpu_count() or 1))
    options = parser.parse_args()
    if options.only:
        script = tuple(options.script.split("; ")) if options.script else ()
        events = len(script) or options.events
        return report_violations(
            run_batch(Batch(options.kinds[0], options.seed, 1, events, script=script), prints=True).violations
        )
    started, record = time.monotonic(), load_record(options.record)
    for batch, result in _run_batches(options, record):
        record.add(batch.kind, batch.first, result)
        save_record(options.record, record)
        print(f"{sum(record.histories.values())} of {options.histories} histories", file=sys.stderr, flush=True)
        for violation in result.violations:
            print(violation, file=sys.stderr, flush=True)
        if record.violations and options.stop:
            break
    _print_figures(record)
    print(f"{time.monotonic() - started:.0f} s, {len(record.violations)} violations")
    return 1 if record.violations else 0


def _run_batches(options: argparse.Namespace, record: Record) -> Iterator[tuple[Batch, BatchResult]]:
    """Yield the results of all batches that the record lacks. The caller adds each to the record before the next."""
    left = iter([key for key in _list_batches(options) if key not in record.batches])
    each = options.histories // len(options.kinds)
    running: dict[Future[BatchResult], Batch] = {}
    with ProcessPoolExecutor(options.workers, CONTEXT) as pool:
        try:
            while True:
                for kind, first in itertools.islice(left, options.workers - len(running)):
                    count = min(_BATCH, each - (first - options.seed) % each)
                    batch = Batch(kind, first, count, options.events, find_rare(record.counts.pairs, EVENTS))
                    running[pool.submit(run_batch, batch)] = batch
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _list_batches(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Return the kind and the first seed of all batches: the kinds of places take turns."""
    each = options.histories // len(options.kinds)
    return [
        (kind, options.seed + place * each + first)
        for first, (place, kind) in itertools.product(range(0, each, _BATCH), enumerate(options.kinds))
    ]


def _print_figures(record: Record) -> None:
    print("| place | histories | violations |\n|---|---:|---:|")
    for kind, made in record.histories.items():
        print(f"| {kind} | {made} | {sum(one.startswith(f'{kind}, ') for one in record.violations)} |")
    counts = record.counts
    often = sorted((counts.pairs.get(pair, 0), *pair) for pair in itertools.product(EVENTS, EVENTS))
    print(f"{counts.resumed} of {counts.resumes} resumes returned a checkpoint")
    print(f"{sum(count >= PAIR for count, *_ in often)} of {len(often)} ordered pairs of events: {PAIR} times or more")
    print("the rarest:", ", ".join(f"{before} -> {after} {count}" for count, before, after in often[:5]))
    print("errors:", ", ".join(f"{count} {name}" for name, count in sorted(counts.errors.items())))


if __name__ == "__main__":
    sys.exit(main())
