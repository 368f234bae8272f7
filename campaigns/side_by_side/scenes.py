"""The scenes: simultaneous actions of several jobs, and conditions on their errors and on the final directory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch.distributed as dist

import holdfast
from campaigns.side_by_side.acts import (
    ELEMENTS,
    Act,
    both,
    check,
    keeping_one,
    load,
    load_by_name,
    overwriting,
    reading,
    state,
    under_one_name,
)
from holdfast.errors import HoldfastError
from holdfast.storage import directories
from tests.golden import reader


@dataclass(frozen=True)
class Scene:
    """The action of each job. With ``two_steps`` the file system cannot exchange two names."""

    acts: tuple[Act, ...]
    two_steps: bool = False


SCENES = {
    "one keeps one checkpoint, others read": Scene((keeping_one, load, reading)),
    "one overwrites, others read": Scene((overwriting, load_by_name, reading)),
    "one does both, others read": Scene((both, load, reading)),
    "one overwrites in two steps": Scene((overwriting, reading, load_by_name), two_steps=True),
    "two keep one checkpoint each": Scene((keeping_one, keeping_one)),
    "two overwrite": Scene((overwriting, overwriting)),
    "two overwrite in two steps": Scene((overwriting, overwriting), two_steps=True),
    "two overwrite and keep one": Scene((both, both)),
    "two save under the same names": Scene((under_one_name, under_one_name)),
}


def play(path: str, name: str, seconds: float) -> Counter[str]:
    """Play this rank's part in a scene. Return the number of successful actions, and the errors."""
    scene, rank = SCENES[name], dist.get_rank()
    own = [dist.new_group([one]) for one in range(dist.get_world_size())][rank]
    run = holdfast.Checkpointer(path, process_group=own, max_shard_size=ELEMENTS * 8)
    if rank == 0:
        run.save("0_0" if keeping_one in scene.acts else "last", state(0), user_content=0)
    dist.barrier()
    with mock.patch.object(directories, "_renameat2", return_value=False) if scene.two_steps else nullcontext():
        return Counter(_outcomes(run, scene.acts[rank], time.monotonic() + seconds))


def _outcomes(run: holdfast.Checkpointer, act: Act, ends: float) -> Iterator[str]:
    number = 0
    while time.monotonic() < ends:
        number += 1
        try:
            act(run, number)
        except HoldfastError as error:
            yield type(error).__name__
        else:
            yield "well"


def judge(path: Path, name: str, seen: list[Counter[str]]) -> None:
    """Check that all errors are allowed, and that the remaining checkpoints are whole and each of one saver.

    Of two jobs that save under one name, the one whose save began first may fail.
    """
    scene = SCENES[name]
    for act, counts in zip(scene.acts, seen, strict=True):
        rivals = act is not keeping_one and scene.acts.count(act) > 1
        check(set(counts) <= ({"well", "TagExistsError"} if rivals else {"well"}), str(counts))
        check(counts["well"] > 0 or act is under_one_name, f"nothing went well: {counts}")
    left = [folder for folder in path.iterdir() if not folder.name.startswith(".")]
    for folder in left:
        found = reader.read(folder)
        expected = float(found.state["user_content"])
        tensors = found.tensors["model"].values()
        check(all((one.numpy() == expected).all() for one in tensors), f"not all in {folder} is of step {expected}")
    for rank, act in enumerate(scene.acts):
        if act is keeping_one:
            own = [folder.name for folder in left if folder.name.startswith(f"{rank}_")]
            check(len(own) == 1, f"one of {own} should be left")
