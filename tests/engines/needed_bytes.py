"""Load a model in each rank of a layout with ``open_weights``, one after the other: ``python -m`` MODEL LAYOUT.

It prints what each rank has needed, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import rankless
from campaigns.engines.fake_ranks import Layout, build_rank


def main(folder: Path, layout: Layout) -> None:
    """Load the model, and print one line."""
    needed = []
    for rank in range(layout.size):
        with build_rank(folder, layout, rank) as (model, _):
            with rankless.open_weights(folder, process_group="self") as weights:
                model.load_weights(weights)
            needed.append([weights.report.needed, weights.report.read, sum(p.nbytes for p in model.parameters())])
    print("NEEDED", json.dumps(needed))


if __name__ == "__main__":
    model, name = sys.argv[1].split(" ")
    main(Path(model), Layout(name))
