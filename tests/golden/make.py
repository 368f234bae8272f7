"""Creates the golden checkpoints: ``python -m tests.golden.make`` from the root of the repository.

Ids, times and provenance are fixed, so that it gives the same bytes each time. Only the states of random generators, in
``training/step_1/ranks.safetensors``, depend on the installed libraries, and with them the manifest next to it. From
the first release on the files in ``v1`` and ``damaged`` do not change; this module documents how they were made.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

import rankless
from rankless.ondisk.manifest import Provenance
from rankless.run import claims, journal
from tests.golden.corruptions import DAMAGES, STORED
from tests.golden.states import GOLDEN, Keeping
from tests.helpers.pool import Ranks

HERE = Path(__file__).parent
V1, DAMAGED = HERE / "v1", HERE / "damaged"
TAG = "step_1"


@contextmanager
def fixed(name: str) -> Iterator[None]:
    """What a save draws or looks up is always the same."""
    drawn = (hashlib.sha256(f"{name} {n}".encode()).hexdigest()[:16] for n in itertools.count())
    with (
        mock.patch("rankless.run.catalog.secrets", SimpleNamespace(token_hex=lambda _: next(drawn))),
        mock.patch("rankless.run.claims.secrets", SimpleNamespace(token_hex=lambda _: next(drawn))),
        mock.patch("rankless.save.training_save.time", SimpleNamespace(time=lambda: 1767225600.25)),
        mock.patch(
            "rankless.save.build_manifest.Provenance", lambda *known: Provenance("0.1.0", "2.13.0", "3.11.0", known[3])
        ),
    ):
        yield


def save(name: str, path: str, **options: Any) -> None:
    """Save a golden state into a run's folder; on every rank, where there are several."""
    golden = GOLDEN[name]()
    rank = dist.get_rank() if dist.is_initialized() else 0
    own = golden.own[rank]
    mine = {"per_rank_content": own.get("content"), "dataloader": Keeping(own["dataloader"]) if own else None}
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    with fixed(name):
        rankless.save_checkpoint(path, TAG, **golden.saved, **mine, rng=bool(own), **golden.options, **options)


def stored(name: str) -> Path:
    """Where the result of a damage is kept."""
    return DAMAGED / name.replace(" ", "_") / TAG


def main() -> None:
    for folder in (V1, DAMAGED):
        shutil.rmtree(folder, ignore_errors=True)
    pool = Ranks()
    for name, golden in GOLDEN.items():
        pool(len(golden().own), save, name, str(V1 / name))
        (V1 / name / journal.NAME).unlink()  # has the times of this save, and is no part of the format
        shutil.rmtree(V1 / name / claims.FOLDER)  # has the time and the host of this save
    pool.close()
    for name in STORED:
        source = DAMAGES[name].of
        DAMAGES[name].do(shutil.copytree(V1 / source / TAG, stored(name)))


if __name__ == "__main__":
    main()
