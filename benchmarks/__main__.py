"""``python -m benchmarks``: run the cases, print a table, keep it as JSON and Markdown in ``benchmarks/results``."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from benchmarks import cases, two_ranks
from benchmarks.measure import Timing

RESULTS = Path(__file__).parent / "results"

Found = dict[str, dict[str, Timing]]

CASES: dict[str, Callable[[Path, int], Found]] = {
    "big": cases.big,
    "small": cases.small,
    "small-2-ranks": two_ranks.small,
}


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="which cases; all when left out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where to write; the disk that is measured")
    options = parser.parse_args()
    found: Found = {}
    for name in options.cases or CASES:
        folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=options.folder))
        try:
            found |= CASES[name](folder, options.rounds)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    everything = {**_kept(), **found}
    text = "\n".join(table(everything))
    print("\n".join(table(found)))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "table.md").write_text(text + "\n")
    rounds = {case: {name: timing.rounds for name, timing in timings.items()} for case, timings in everything.items()}
    (RESULTS / "rounds.json").write_text(json.dumps(rounds, indent=1) + "\n")


def _kept() -> Found:
    """What was measured before: cases that are not run again keep their figures."""
    file = RESULTS / "rounds.json"
    known = json.loads(file.read_text()) if file.is_file() else {}
    return {case: {name: Timing(tuple(row)) for name, row in rows.items()} for case, rows in known.items()}


def table(found: Mapping[str, Mapping[str, Timing]]) -> Iterator[str]:
    """Markdown: of each contender the median, the spread, and how many times as long as holdfast it takes."""
    yield f"{os.cpu_count()} cores, torch {torch.__version__}; median of the rounds ± half the interquartile range"
    for case, timings in found.items():
        yield ""
        yield f"| {case} | seconds | x holdfast |"
        yield "|---|---:|---:|"
        for name, timing in timings.items():
            ratio = timing.median / timings["holdfast"].median
            yield f"| {name} | {timing.median:.2f} ± {timing.spread:.0%} | {ratio:.2f} |"


if __name__ == "__main__":
    main()
