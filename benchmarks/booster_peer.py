"""ColossalAI's side of the case ``colossalai``: a process in its own environment that saves and loads on request.

``python -m benchmarks.booster_peer BYTES`` answers each line ``save FOLDER`` or ``load FOLDER`` with the seconds taken.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

answers, sys.stdout = sys.stdout, sys.stderr  # output of the package must not mix with the answers

import torch  # noqa: E402
from colossalai.booster import Booster  # noqa: E402

from benchmarks import raw, states  # noqa: E402


def main() -> None:
    """Answer requests until the input ends."""
    torch.manual_seed(0)
    booster, model = Booster(), states.build_weights(int(sys.argv[1]))
    works: dict[str, Callable[[str], object]] = {
        "save": partial(_save_model, booster, model),
        "load": partial(booster.load_model, model),
    }
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        work, _, folder = line.rstrip("\n").partition(" ")
        started = time.perf_counter()
        works[work](folder)
        print(time.perf_counter() - started, file=answers, flush=True)


def _save_model(booster: Booster, model: torch.nn.Module, folder: str) -> None:
    booster.save_model(model, folder, shard=True, use_safetensors=True)
    raw.sync_tree(Path(folder))


main()
