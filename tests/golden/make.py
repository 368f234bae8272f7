"""Creates the golden checkpoints: ``python -m tests.golden.make`` from the root of the repository.

Ids, times and provenance are fixed, so that it gives the same bytes each time. Only the states of random generators, in
``training/step_1/ranks.safetensors``, depend on the installed libraries, and with them the manifest next to it. The
files in ``v1`` and ``damaged`` do not change any more; this module documents how they were made.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import shutil
import warnings
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
from rankless.run import records_folder
from rankless.run.history import Job
from tests.golden.corruptions import DAMAGES, STORED
from tests.golden.states import GOLDEN, Keeping
from tests.helpers.pool import Ranks

HERE = Path(__file__).parent
V1, DAMAGED = HERE / "v1", HERE / "damaged"
TAG = "step_1"

#: The run whose history says which checkpoints are current.
ROLLED_BACK = "rolled_back"


@contextmanager
def fixed(name: str) -> Iterator[None]:
    """What a save draws or looks up is always the same."""
    drawn = (hashlib.sha256(f"{name} {n}".encode()).hexdigest()[:16] for n in itertools.count())
    with (
        mock.patch("rankless.run.catalog.secrets", SimpleNamespace(token_hex=lambda _: next(drawn))),
        mock.patch("rankless.run.claims.secrets", SimpleNamespace(token_hex=lambda _: next(drawn))),
        mock.patch("rankless.save.training_content.time", SimpleNamespace(time=lambda: 1767225600.25)),
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


def save_rolled_back(path: Path) -> None:
    """Save a run that went back to its first checkpoint, saved its second step again, and stopped."""

    def describe_job(token: str, *known: str) -> Job:
        return Job(token, "host", 1, 1767225600.25, *known)

    with fixed(ROLLED_BACK), mock.patch("rankless.run.claims.describe_job", describe_job), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the rollback
        first, second = rankless.RunDirectory(path), rankless.RunDirectory(path)
        for step in (1, 2, 3):
            first.save(f"step_{step}", {"step": torch.tensor(step)}, step=step, rng=False)
        second.restore("step_1", {"step": torch.tensor(0)}, resume=True)
        second.save("step_2", {"step": torch.tensor(22)}, step=2, rng=False)
    (path / records_folder.JOURNAL).unlink()


def stored(name: str) -> Path:
    """Where the result of a damage is kept."""
    return DAMAGED / name.replace(" ", "_") / TAG


def main() -> None:
    for folder in (V1, DAMAGED):
        shutil.rmtree(folder, ignore_errors=True)
    pool = Ranks()
    for name, golden in GOLDEN.items():
        pool(len(golden().own), save, name, str(V1 / name))
        (V1 / name / records_folder.JOURNAL).unlink()  # has the times of this save, and is no part of the format
        shutil.rmtree(V1 / name / records_folder.FOLDER)  # has the time and the host of this save
    pool.close()
    save_rolled_back(V1 / ROLLED_BACK)
    for name in STORED:
        source = DAMAGES[name].of
        DAMAGES[name].do(shutil.copytree(V1 / source / TAG, stored(name)))


if __name__ == "__main__":
    main()
