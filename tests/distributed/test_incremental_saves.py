"""Tests that incremental saves have the bytes of full saves, and share with the checkpoint before what is unchanged."""

from __future__ import annotations

import errno
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import rankless
from rankless.errors import StorageError
from rankless.save import drain_attempts
from rankless.save.training_content import TrainingContent
from tests.helpers.examples import examples
from tests.helpers.file_contents import read_state_files
from tests.helpers.pool import Ranks
from tests.helpers.simulated_hosts import simulated_host

#: Shapes of float32 tensors: tiny ones, some that are moved in stripes if their columns are sharded, one of two blocks.
SHAPES = {
    "a": (3,),
    "b": (100, 1025),
    "c": (2048, 512),
    "d": (1030, 1030),
    "e": (9, 524_288),
    "f": (0, 4),
    "g": (64, 65_536),
}

#: The tensor without elements.
EMPTY = "f"

#: So many bytes of tensors are in one file: most tensors have a file of their own.
LIMIT = 5_000_000

PLACEMENTS = {"whole": [], "rows": [Shard(0)], "columns": [Shard(1)], "replicated": [Replicate()]}


@dataclass(frozen=True)
class Step:
    """One save: the tensors that get new values before, and how it is saved."""

    changed: frozenset[str]
    asynchronous: bool = False
    #: The tensor that gets new values in one element only.
    touched: str | None = None


@dataclass(frozen=True)
class Session:
    """Saves of one job: its number of ranks, and of hosts that these are on, and the layout of each tensor.

    With a ``tier``, what is compared is what each save drains.
    """

    ranks: int
    hosts: int
    layouts: dict[str, str]
    steps: Sequence[Step]
    tier: bool = False


def whole_tensor(name: str, version: int, touches: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}{version}".encode()))
    tensor = torch.rand(SHAPES[name], generator=generator)
    if tensor.numel():
        tensor.view(-1)[tensor.numel() * 2 // 3] += touches
    return tensor


class State:
    """Tensors as a job holds them, each with the number of times that it was changed, and touched."""

    def __init__(self, layouts: dict[str, str]) -> None:
        self.versions = dict.fromkeys(SHAPES, 0)
        self.touches = dict.fromkeys(SHAPES, 0)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None
        self.tensors = {}
        for name, shape in SHAPES.items():
            whole, placements = whole_tensor(name, 0, 0), PLACEMENTS[layouts[name]]
            if len(shape) == 1 and layouts[name] == "columns":
                placements = [Shard(0)]
            if mesh is not None and placements:
                self.tensors[name] = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            else:
                self.tensors[name] = whole

    def update(self, names: frozenset[str], touched: str | None = None) -> None:
        for name in names:
            self.versions[name] += 1
        if touched is not None:
            self.touches[touched] += 1
        for name in names | ({touched} if touched else set()):
            whole, tensor = whole_tensor(name, self.versions[name], self.touches[name]), self.tensors[name]
            if isinstance(tensor, DTensor):
                new = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
                tensor.to_local().copy_(new.to_local())
            else:
                tensor.copy_(whole)


def run_session(path: str, full: str, session: Session, first: int) -> list[set[str]]:
    """Continue the run, save each step twice. Return, of each step, the tensor files shared with the save before."""
    if session.hosts == 1 or not dist.is_initialized():
        return save_steps(path, full, session, first)
    host = str(dist.get_rank() % session.hosts)
    board = Path(path).parent / f"board {host}"
    board.mkdir(exist_ok=True)
    with simulated_host(host, str(board)):
        return save_steps(path, full, session, first)


def save_steps(path: str, full: str, session: Session, first: int) -> list[set[str]]:
    """Do the work of :func:`run_session`."""
    state, shared = State(session.layouts), []
    tier = rankless.LocalTier(find_tier(path, session), drain_every=1) if session.tier else None
    incremental = rankless.RunDirectory(path, max_shard_size=LIMIT, local=tier)
    whole = rankless.RunDirectory(full, max_shard_size=LIMIT, incremental=False)
    if first:
        incremental.restore(model=state.tensors)
        content = rankless.open(path).values["user_content"]
        state.versions, state.touches = content["versions"], content["touches"]
    for number, step in enumerate(session.steps, first):
        state.update(step.changed, step.touched)
        tag = f"s{number:03d}"
        content = {"versions": state.versions, "touches": state.touches}
        saved = incremental.save(tag, model=state.tensors, user_content=content, async_save=step.asynchronous)
        saved.wait()
        incremental.finalize()
        whole.save(tag, model=state.tensors, user_content=content)
        shared.append(linked_files(Path(path), number))
    return shared


def find_tier(path: str, session: Session) -> Path:
    """The folder of the tier on the host of this rank."""
    host = dist.get_rank() % session.hosts if dist.is_initialized() else 0
    return Path(path).parent / f"tier {host}"


def linked_files(path: Path, number: int) -> set[str]:
    """The tensor files that a checkpoint and the one before have in common."""
    if not number:
        return set()
    new, old = path / f"s{number:03d}", path / f"s{number - 1:03d}"
    names = {str(file.relative_to(new)) for file in new.rglob("*.safetensors")}
    return {name for name in names if (old / name).exists() and (new / name).samefile(old / name)}


def tensor_names(file: Path) -> set[str]:
    with safe_open(file, "pt") as opened:
        return set(opened.keys())


steps = st.builds(
    Step,
    st.frozensets(st.sampled_from(sorted(SHAPES)), max_size=4),
    st.booleans(),
    st.none() | st.sampled_from(sorted(set(SHAPES) - {EMPTY})),
)
sessions = st.builds(
    Session,
    st.integers(1, 4),
    st.integers(1, 3),
    st.fixed_dictionaries({name: st.sampled_from(sorted(PLACEMENTS)) for name in SHAPES}),
    st.lists(steps, min_size=1, max_size=3),
    st.booleans(),
)


@settings(
    max_examples=examples(16, least=3),
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # to shrink a failure would take very long
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(jobs=st.lists(sessions, min_size=1, max_size=3))
@example(jobs=[Session(1, 1, dict.fromkeys(SHAPES, "whole"), [Step(frozenset()), Step(frozenset("abcdeg"))])])
@example(jobs=[Session(3, 2, dict.fromkeys(SHAPES, "columns"), [Step(frozenset()), Step(frozenset("ab"))], tier=True)])
def test_an_incremental_save_has_the_bytes_of_a_full_one(
    ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, jobs: list[Session]
) -> None:
    path = tmp_path_factory.mktemp("run")
    inc, full = path / "incremental", path / "full"
    number = 0
    for job in jobs:
        shared, *others = ranks(job.ranks, run_session, str(inc), str(full), job, number)
        assert all(other == shared for other in others)
        for of_step, step in zip(shared, job.steps, strict=True):
            new = inc / f"s{number:03d}"
            assert read_state_files(new) == read_state_files(full / new.name)
            changed = (step.changed | ({step.touched} if step.touched else set())) - {EMPTY}
            sizes = {str(file.relative_to(new)): file.stat().st_size for file in new.glob("model/*.safetensors")}
            unchanged = {name for name in sizes if number and not tensor_names(new / name) & changed}
            linked = of_step & sizes.keys()
            # To compare less than a thousandth of the bytes takes longer than to write them.
            is_worth_it = sum(map(sizes.__getitem__, unchanged)) >= sum(sizes.values()) / 1000
            # What seems to be unchanged by its samples counts, too, so a little more than what is worth it is linked.
            # A job that has loaded from its tier has looked at no files yet.
            has_no_base = job.tier and step is job.steps[0]
            assert linked == unchanged or (not linked and (has_no_base or not is_worth_it)), number
            number += 1


def save_changing(path: str, **options: Any) -> None:
    state = State(dict.fromkeys(SHAPES, "rows"))
    checkpointer = rankless.RunDirectory(path, max_shard_size=LIMIT, **options)
    for number in range(6):
        state.update(frozenset("a"))
        checkpointer.save(f"s{number:03d}", model=state.tensors)


@pytest.mark.parametrize("size", [1, 3])
def test_one_checkpoint_of_several_is_full(ranks: Ranks, tmp_path: Path, size: int) -> None:
    ranks(size, save_changing, str(tmp_path))
    assert all(linked_files(tmp_path, number) for number in range(1, 6))


@pytest.mark.parametrize(("elements", "links"), [(1000, 1), (100_000, 2)])
def test_a_checkpoint_of_few_bytes_shares_nothing(tmp_path: Path, elements: int, links: int) -> None:
    """Samples, links and hashes take longer than a write of 64 KiB."""
    for tag in ("a", "b"):
        rankless.save_checkpoint(tmp_path, tag, {"w": torch.zeros(elements)})
    (file,) = (tmp_path / "b" / "model").iterdir()
    assert file.stat().st_nlink == links


def save_with_a_drain_that_fails_once(path: str) -> None:
    """Save twice. In the first attempt to drain the second save rank 2 fails, in the next one rank 3 is late."""
    rank = dist.get_rank()
    host = str(rank // 2)
    board = Path(path).parent / f"board {host}"
    board.mkdir(exist_ok=True)
    write_files, attempts = TrainingContent.write_files, 0

    def fail_once(*arguments: Any) -> Any:
        nonlocal attempts
        attempts += 1
        if rank == 2 and attempts == 1:
            raise StorageError(errno.EIO, "a broken disk")
        if rank == 3 and attempts == 2:
            time.sleep(0.3)
        return write_files(*arguments)

    with simulated_host(host, str(board)):
        model: Any = nn.Sequential(*(nn.Linear(64, 64).requires_grad_(layer > 1) for layer in range(4)))
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)), shard_placement_fn=lambda p: Shard(min(1, p.dim() - 1)))
        tier = rankless.LocalTier(f"{path} tier {host}", drain_every=1)
        directory = rankless.RunDirectory(path, frozen="apart", local=tier)
        directory.save("s000", model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0 if parameter.requires_grad else 0.0)
        with (
            mock.patch.object(TrainingContent, "write_files", fail_once),
            mock.patch.object(drain_attempts, "_FIRST_SECONDS", 0.05),
        ):
            directory.save("s001", model)
        rankless.RunDirectory(f"{path} full", frozen="apart").save("s001", model)


def test_a_second_attempt_to_drain_reads_no_messages_of_the_first(ranks: Ranks, tmp_path: Path) -> None:
    """The first one shares files, so ranks exchange less in it."""
    path = tmp_path / "run"
    ranks(4, save_with_a_drain_that_fails_once, str(path))
    assert read_state_files(path / "s001") == read_state_files(tmp_path / "run full" / "s001")
