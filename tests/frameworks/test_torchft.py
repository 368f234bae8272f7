"""Tests of durable checkpoints in jobs of torchft: the ranks of the pool are its replica groups, or ranks of them.

The code of a training is that of ``docs/guides/torchft.md``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import rankless
from tests.helpers.pool import Ranks

torchft = pytest.importorskip("torchft")
coordination = pytest.importorskip("torchft.coordination")

EVERY, TIMEOUT = 2, timedelta(seconds=20)


@contextmanager
def lighthouse(groups: int) -> Iterator[str]:
    """The address of a server that begins a step with so many replica groups."""
    server = coordination.LighthouseServer(
        bind="127.0.0.1:0", min_replicas=groups, join_timeout_ms=100, quorum_tick_ms=20, heartbeat_timeout_ms=1000
    )
    try:
        yield "http://127.0.0.1:" + server.address().rpartition(":")[2]
    finally:
        server.shutdown()


class Training:
    """A training in one replica group of ``size`` ranks: with DDP if it is one rank, else sharded over its ranks."""

    def __init__(self, run: Path, address: str, size: int, store: dist.TCPStore, members: dist.ProcessGroup) -> None:
        self.group, self.groups = dist.get_rank() // size, dist.get_world_size() // size
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
            load_state_dict=self.load_state_dict,
            state_dict=self.state_dict,
            min_replica_size=1,
            replica_id=f"group_{self.group}",
            rank=dist.get_rank(members),
            world_size=size,
            store_addr="127.0.0.1",
            store_port=store.port,
            lighthouse_addr=address,
            hostname="127.0.0.1",
            timeout=TIMEOUT,
            init_sync=False,
        )
        if size == 1:
            self.model = torchft.DistributedDataParallel(self.manager, self.module)
        else:
            self.model = fully_shard(self.module, mesh=DeviceMesh.from_group(members, "cpu"))
        self.adam = torch.optim.AdamW(self.module.parameters(), lr=0.01)
        self.optimizer = torchft.Optimizer(self.manager, self.adam)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.adam, 1, gamma=0.9)
        data = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
        self.loader = rankless.ResumableLoader(data[self.group :: self.groups], 2, process_group=members)
        options: dict[str, Any] = {"process_group": members, "signals": ()}
        self.weights = rankless.Checkpointer(
            run / "weights",
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            replica_groups="job",
            **options,
        )
        self.weights.register("torchft", self.manager)
        folder = run / f"data/{self.group}_of_{self.groups}"
        self.positions = rankless.Checkpointer(folder, dataloader=self.loader, **options)
        self.saved: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        parts = {"model": self.module, "adam": self.adam, "scheduler": self.scheduler}
        return {name: part.state_dict() for name, part in parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["model"])
        self.adam.load_state_dict(state["adam"])
        self.scheduler.load_state_dict(state["scheduler"])

    def run(self, steps: int, crash_at: int) -> dict[str, Any]:
        """Train until all groups are there and have completed so many steps, or up to the step of a crash."""
        start = self.weights.resume()
        self.positions.resume()
        resumed = self.gather()
        while self.manager.current_step() < steps or self.manager.num_participants() < self.groups:
            self.train_batch()
            if self.manager.current_step() == crash_at:
                break
        self.weights.finalize()
        state = {**self.manager.state_dict(), "lr": self.adam.param_groups[0]["lr"], "data": self.loader.state_dict()}
        self.manager.shutdown(wait=False)
        return {"start": start, "resumed": resumed, "weights": self.gather(), "saved": self.saved, "state": state}

    def train_batch(self) -> None:
        before = self.manager.current_step()
        self.optimizer.zero_grad()
        for batch in self.loader:
            self.model(batch).square().mean().backward()
            break
        if self.model is self.module:
            for parameter in self.module.parameters():
                self.manager.allreduce(parameter.grad.to_local()).wait()
        self.optimizer.step()
        step = self.manager.current_step()
        if step == before:
            return  # a replica group has failed
        self.scheduler.step()
        if step % EVERY == 0:
            self.positions.step(step)
            self.positions.save(overwrite=True)
            if self.manager.participating_rank() == 0:
                self.weights.step(step)
                self.weights.save(overwrite=True)
                self.saved.append(step)

    def gather(self) -> dict[str, torch.Tensor]:
        state = self.module.state_dict()
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
            for name, value in state.items()
        }


def train(run: Path, address: str, steps: int, size: int = 1, crash_at: int = 0) -> dict[str, Any]:
    """Train on this rank. Group 0 may crash, and begins again when the others have saved another step."""
    ranks = range(dist.get_world_size())
    teams = [dist.new_group([rank for rank in ranks if rank // size == group]) for group in range(len(ranks) // size)]
    members = teams[dist.get_rank() // size]
    port = [0]
    if dist.get_rank(members) == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = [store.port]
    dist.broadcast_object_list(port, group=members, group_src=0)
    if dist.get_rank(members):
        store = dist.TCPStore("127.0.0.1", port[0], is_master=False)
    training = Training(run, address, size, store, members)
    result = training.run(steps, crash_at if training.group == 0 else 0)
    if crash_at and training.group == 0:
        while (rankless.list_checkpoints(run / "weights")[-1].step or 0) <= crash_at:
            time.sleep(0.05)
        training = Training(run, address, size, store, members)
        again = training.run(steps, 0)
        result = {**again, "saved": result["saved"], "saved_later": again["saved"]}
    dist.barrier()
    return result


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())


@pytest.mark.parametrize("size", [1, 2])
def test_a_job_that_restarts_continues_as_if_it_had_not_stopped(ranks: Ranks, tmp_path: Path, size: int) -> None:
    """Bit for bit: two replica groups of one rank with DDP, or of two with FSDP2."""
    jobs = []
    for run, steps in (("whole", 6), ("run", 4), ("run", 6)):
        with lighthouse(groups=2) as address:
            jobs.append(ranks(2 * size, train, tmp_path / run, address, steps, size))
    whole, before, after = jobs
    assert [result["start"] for result in after] == [4] * 2 * size
    for mine, theirs in zip(after, whole, strict=True):
        assert same(mine["weights"], theirs["weights"])
        assert mine["state"] == theirs["state"]
    assert (whole[0]["state"]["step"], whole[0]["state"]["batches_committed"]) == (6, 12)
    assert [result["saved"] for result in before] == [[2, 4]] * size + [[]] * size  # one group


@pytest.mark.parametrize("groups", [1, 3])
def test_a_job_continues_with_another_number_of_replica_groups(ranks: Ranks, tmp_path: Path, groups: int) -> None:
    """The weights and the step do; the data is divided anew, and begins at its first sample."""
    with lighthouse(groups=2) as address:
        before = ranks(2, train, tmp_path, address, 4)
    with lighthouse(groups) as address:
        after = ranks(groups, train, tmp_path, address, 6)
    for result in after:
        assert result["start"] == 4
        assert same(result["resumed"], before[0]["weights"])
        assert same(result["weights"], after[0]["weights"])
        assert (result["state"]["step"], result["state"]["batches_committed"]) == (6, 8 + 2 * groups)


def test_another_replica_group_saves_if_the_first_one_fails(ranks: Ranks, tmp_path: Path) -> None:
    with lighthouse(groups=1) as address:
        first, second = ranks(2, train, tmp_path, address, 8, 1, 3)
    assert first["saved"] == [2]
    assert second["saved"][0] == 4
    assert first["start"] in second["saved"]
    assert first["state"]["step"] == second["state"]["step"] >= 8
    assert same(first["weights"], second["weights"])  # torchft has sent those of the second group
    saved = [info.step for info in rankless.list_checkpoints(tmp_path / "weights")]
    assert saved == sorted({*first["saved"], *second["saved"], *first["saved_later"]})


def test_what_torchft_wraps_is_saved_as_what_it_is(tmp_path: Path) -> None:
    """Its wrapper around an optimizer has none of the hooks of an optimizer."""
    module = nn.Linear(2, 2)
    adam = torch.optim.AdamW(module.parameters())
    checkpointer = rankless.Checkpointer(tmp_path, model=module, optimizer=torchft.Optimizer(None, adam), signals=())
    module(torch.ones(1, 2)).sum().backward()
    adam.step()
    checkpointer.save("one", overwrite=False)
    plain = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(plain.parameters())
    rankless.load_checkpoint(tmp_path, None, plain, optimizer)
    assert torch.equal(optimizer.state[plain.weight]["exp_avg"], adam.state[module.weight]["exp_avg"])
    assert rankless.open(tmp_path).values["optimizer"]["groups"][0]["class"] == "AdamW"
