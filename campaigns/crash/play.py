"""A scenario played by ranks, each of which records what it does."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from campaigns.crash.operations import History, Log, merge
from campaigns.crash.recorder import Recorder
from campaigns.crash.scenarios import Prune, Scenario
from campaigns.crash.training import Training
from tests.helpers.pool import Ranks

#: The run's folder, on a disk that has nothing but its root.
RUN = "runs/a"


def play(scenario: Scenario, ranks: int, pool: Ranks, root: Path) -> History:
    """What so many ranks do to the disk whose root is an empty folder."""
    return merge(pool(ranks, _rank, scenario, root))


def _rank(scenario: Scenario, root: Path) -> Log:
    training = Training(scenario.models)
    with scenario.file_system(), Recorder(root) as recorder:
        for number, step in enumerate(scenario.steps):
            dist.barrier()
            if isinstance(step, Prune) and dist.get_rank():
                continue
            recorder.begin(number)
            step.run(root / RUN, training)
            recorder.end(number)
        return recorder.log
