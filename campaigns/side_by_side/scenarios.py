"""The scenarios: simultaneous actions of several jobs, and conditions on their errors and on the final directory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch.distributed as dist

import rankless
from campaigns.side_by_side.actions import (
    ELEMENTS,
    Action,
    build_state,
    load_latest,
    load_tag,
    overwrite_keeping_one,
    overwrite_tag,
    read_in_turn,
    read_pinned,
    require,
    save_keeping_one,
    save_under_shared_tag,
)
from rankless.errors import RanklessError, TagExistsError
from rankless.storage import atomic_rename
from tests.golden import reader


@dataclass(frozen=True)
class Scenario:
    """The action of each job. With ``two_steps`` the file system cannot exchange two names."""

    actions: tuple[Action, ...]
    two_steps: bool = False


SCENARIOS = {
    "one keeps one checkpoint, others read": Scenario((save_keeping_one, load_latest, read_in_turn)),
    "one keeps one checkpoint, others pin it": Scenario((save_keeping_one, read_pinned, read_pinned)),
    "one overwrites, others read": Scenario((overwrite_tag, load_tag, read_in_turn)),
    "one does both, others read": Scenario((overwrite_keeping_one, load_latest, read_in_turn)),
    "one overwrites in two steps": Scenario((overwrite_tag, read_in_turn, load_tag), two_steps=True),
    "two keep one checkpoint each": Scenario((save_keeping_one, save_keeping_one)),
    "two overwrite": Scenario((overwrite_tag, overwrite_tag)),
    "two overwrite in two steps": Scenario((overwrite_tag, overwrite_tag), two_steps=True),
    "two overwrite and keep one": Scenario((overwrite_keeping_one, overwrite_keeping_one)),
    "two save under the same names": Scenario((save_under_shared_tag, save_under_shared_tag)),
}


def run_scenario(path: str, name: str, seconds: float) -> Counter[str]:
    """Run this rank's part of a scenario. Return the number of successful actions, and the errors."""
    scenario, rank = SCENARIOS[name], dist.get_rank()
    process_group = [dist.new_group([member]) for member in range(dist.get_world_size())][rank]
    run = rankless.RunDirectory(path, process_group=process_group, max_shard_size=ELEMENTS * 8)
    if rank == 0:
        run.save("0_0" if save_keeping_one in scenario.actions else "last", build_state(0), user_content=0)
    dist.barrier()
    with mock.patch.object(atomic_rename, "_renameat2", return_value=False) if scenario.two_steps else nullcontext():
        return Counter(_repeat_action(run, scenario.actions[rank], time.monotonic() + seconds))


def _repeat_action(run: rankless.RunDirectory, action: Action, ends: float) -> Iterator[str]:
    number = 0
    while time.monotonic() < ends:
        number += 1
        try:
            action(run, number)
        except TagExistsError:
            yield "TagExistsError"
        except RanklessError as error:
            yield f"{type(error).__name__}: {error}"
        else:
            yield "well"


def check_outcome(path: Path, name: str, seen: list[Counter[str]]) -> None:
    """Check that all errors are allowed, and that the remaining checkpoints are whole and each of one saver.

    Of two jobs that save under one name, the one whose save began first may fail.
    """
    scenario = SCENARIOS[name]
    for action, counts in zip(scenario.actions, seen, strict=True):
        rivals = action is not save_keeping_one and scenario.actions.count(action) > 1
        require(set(counts) <= ({"well", "TagExistsError"} if rivals else {"well"}), str(counts))
        require(counts["well"] > 0 or action is save_under_shared_tag, f"nothing went well: {counts}")
    folders = [folder for folder in path.iterdir() if not folder.name.startswith(".")]
    for folder in folders:
        checkpoint = reader.read(folder)
        expected = float(checkpoint.state["user_content"])
        tensors = checkpoint.tensors["model"].values()
        require(
            all((tensor.numpy() == expected).all() for tensor in tensors), f"not all in {folder} is of step {expected}"
        )
    for rank, action in enumerate(scenario.actions):
        if action is save_keeping_one:
            tags = [folder.name for folder in folders if folder.name.startswith(f"{rank}_")]
            pinned = scenario.actions.count(read_pinned)
            require(1 <= len(tags) <= 1 + pinned, f"one of {tags} should be left, and {pinned} that were pinned")
