"""Runs cases a few at a time, and formats their results as a table."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

#: The most violations that are printed.
MAX_PRINTED = 40

C = TypeVar("C")
R = TypeVar("R")


def run_cases(cases: Sequence[C], run_case: Callable[[C], R], workers: int) -> Iterator[tuple[C, R]]:
    """Run all cases, some in parallel. Yield each with its result, in order, and print the progress to stderr."""
    started = time.monotonic()
    with ThreadPoolExecutor(workers) as pool:
        for number, (case, result) in enumerate(zip(cases, pool.map(run_case, cases), strict=True), 1):
            print(f"\r{number}/{len(cases)}, {time.monotonic() - started:.0f} s", end="", file=sys.stderr, flush=True)
            if violation := getattr(result, "violation", ""):
                print(f"\n{violation}", file=sys.stderr)
            yield case, result
    print(file=sys.stderr)


def format_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table, with numbers aligned to the right."""
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join(lines)


def report_violations(violations: Sequence[str]) -> int:
    """Print the first violations and their number. Return the exit status."""
    for violation in violations[:MAX_PRINTED]:
        print("VIOLATION:", violation)
    print(f"{len(violations)} violations")
    return 1 if violations else 0
