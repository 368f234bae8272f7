"""Runs a scenario on several ranks, each of which records its disk operations."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from campaigns.crash.operations import History, Log, merge_logs
from campaigns.crash.recorder import Recorder
from campaigns.crash.scenarios import Prune, Scenario
from campaigns.crash.training import Training
from tests.helpers.pool import Ranks

#: The run's directory, on a disk that is otherwise empty.
RUN = "runs/a"


def record_scenario(scenario: Scenario, ranks: int, pool: Ranks, root: Path) -> History:
    """Run a scenario on ``ranks`` ranks whose disk is an empty directory. Return the history of their operations."""
    return merge_logs(pool(ranks, _record_rank, scenario, root))


def _record_rank(scenario: Scenario, root: Path) -> Log:
    training = Training(scenario.models)
    with scenario.emulate_file_system(), scenario.clone_short_ranges(), Recorder(root) as recorder:
        for number, step in enumerate(scenario.steps):
            dist.barrier()
            if isinstance(step, Prune) and dist.get_rank():
                continue
            recorder.begin_step(number)
            step.run(root / RUN, training)
            recorder.end_step(number)
        return recorder.log
