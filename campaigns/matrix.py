"""``python -m campaigns.matrix``: rankless and DCP load each other's checkpoints in every pair of layouts."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import rankless
from tests.helpers import dcp_matrix
from tests.helpers.dcp_matrix import CASES, OPTIMIZERS, Case
from tests.helpers.pool import Ranks


def main() -> int:
    """Run all or some pairs. Return 1 if a load failed or gave other bits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optimizer", action="append", choices=OPTIMIZERS, help="(default: all)")
    parser.add_argument("--writer", action="append", help="only these layouts, such as fsdp_tp4 (default: all)")
    options = parser.parse_args()
    writers = [case for case in CASES if not options.writer or str(case) in options.writer]
    failed = done = 0
    ranks = Ranks()
    with tempfile.TemporaryDirectory(prefix="rankless-") as folder:
        for kind, writer in product(options.optimizer or OPTIMIZERS, writers):
            for name, error in _load_everywhere(ranks, Path(folder), kind, writer):
                done += 1
                failed += error is not None
                if error is not None:
                    print(f"WRONG: {name}: {error!r}", flush=True)
            print(f"{kind}, written by {writer}: {done} loads so far, {failed} wrong", flush=True)
    ranks.close()
    return int(bool(failed))


def _load_everywhere(ranks: Ranks, folder: Path, kind: str, writer: Case) -> Iterator[tuple[str, BaseException | None]]:
    """Load with every reader, in both directions."""
    seed = folder / f"{kind}.seed"
    if not seed.exists():
        dcp_matrix.write_seed(str(seed), kind)
    ours, theirs = (folder / f"{kind}-{writer}-{name}" for name in ("ours", "theirs"))
    ranks(writer.ranks, dcp_matrix.write_ours, str(ours), writer.layout, kind, str(seed))
    ranks(writer.ranks, dcp_matrix.write_theirs, str(theirs), writer.layout, kind, str(seed))
    converted = rankless.convert(ours, folder / f"{kind}-{writer}-dcp", to="dcp")
    for reader in CASES:
        for load, path in ((dcp_matrix.load_theirs, converted), (dcp_matrix.load_ours, theirs)):
            outcomes = ranks.outcomes(reader.ranks, load, str(path), reader.layout, kind)
            errors = (outcome for outcome in outcomes if isinstance(outcome, BaseException))
            yield f"{kind}: {writer} to {reader}, {load.__name__}", next(errors, None)


if __name__ == "__main__":
    sys.exit(main())
