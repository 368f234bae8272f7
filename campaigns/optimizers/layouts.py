"""Restores states of every kind of optimizer between all pairs of layouts.

A run of two steps saves. Another run, in any layout in which torch steps the optimizer, loads before its first step.
Its states must equal those of the first, bit for bit, and its next losses must be the same.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from tests.helpers.optimizer_runs import KINDS, check_optimizer, layouts_of
from tests.helpers.pool import Ranks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--kind", action="append", choices=KINDS, help="(default: all)")


def run(options: argparse.Namespace) -> int:
    """Run all or some kinds. Return 1 if a pair failed."""
    failed = done = 0
    ranks = Ranks()
    with tempfile.TemporaryDirectory(prefix="rankless-") as folder:
        for kind in options.kind or KINDS:
            for name, error in _check_pairs(ranks, Path(folder) / kind, kind):
                done += 1
                if error is not None:
                    failed += 1
                    print(f"WRONG: {name}: {error!r}", flush=True)
            print(f"{kind}: {done} pairs so far, {failed} wrong", flush=True)
    ranks.close()
    return int(bool(failed))


def _check_pairs(ranks: Ranks, folder: Path, kind: str) -> Iterator[tuple[str, Exception | None]]:
    for writer, reader in product(layouts_of(kind), repeat=2):
        name = f"{kind}: {writer} to {reader}"
        try:
            check_optimizer(ranks, folder / reader, kind, writer, [reader])
        except Exception as error:  # noqa: BLE001 - reported by the campaign
            yield name, error
        else:
            yield name, None
