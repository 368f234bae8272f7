"""Two ranks with FSDP2 at an object store: the CPU seconds of both together, for ``object_store``."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

import rankless
from benchmarks import states
from benchmarks.measure import Figure, Table
from benchmarks.object_client import WARM, check_equal
from benchmarks.object_peers import BUCKET, S3FS, list_s3fs_options, make_store, open_dcp_reader, open_dcp_writer
from benchmarks.object_server import HOST, Endpoint
from benchmarks.peers import OURS
from benchmarks.setting import Setting

RANKS = 2


@dataclass(frozen=True)
class Training:
    """A model with its optimizer, and the ways to save and load them under a name."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    endpoint: Endpoint

    @classmethod
    def of_size(cls, nbytes: int, endpoint: Endpoint) -> Training:
        """Return the training of this rank."""
        return cls(*states.build_training("FSDP2", nbytes), endpoint)

    def list_shards(self) -> Mapping[str, torch.Tensor]:
        """Return this rank's shard of each tensor."""
        state = states.list_tensors(self.model, self.optimizer)
        return {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in state.items()}

    def erase(self) -> None:
        """Set all numbers to 7."""
        with torch.no_grad():
            for shard in self.list_shards().values():
                shard.fill_(7)

    def save_rankless(self, name: str) -> None:
        """Save with rankless."""
        rankless.save_checkpoint(self._path(name), "s", self.model, self.optimizer, rng=False)

    def load_rankless(self, name: str) -> None:
        """Load with rankless."""
        rankless.load_checkpoint(self._path(name), model=self.model, optimizer=self.optimizer)

    def save_dcp(self, name: str) -> None:
        """Save with DCP."""
        writer = open_dcp_writer(name, list_s3fs_options(self.endpoint))
        dcp.save(states.list_tensors(self.model, self.optimizer), storage_writer=writer)

    def load_dcp(self, name: str) -> None:
        """Load with DCP."""
        reader = open_dcp_reader(name, list_s3fs_options(self.endpoint))
        dcp.load(states.list_tensors(self.model, self.optimizer), storage_reader=reader)

    def _path(self, name: str) -> os.PathLike[str]:
        return make_store(self.endpoint).path(f"{BUCKET}/{name}")


#: How each system saves and loads.
SYSTEMS: Mapping[str, tuple[Callable[[Training, str], None], Callable[[Training, str], None]]] = {
    OURS: (Training.save_rankless, Training.load_rankless),
    S3FS: (Training.save_dcp, Training.load_dcp),
}


def measure_ranks(endpoint: Endpoint, protocol: str, setting: Setting) -> list[Table]:
    """Return the tables of a save and a load, on each rank. A small save and load before them do not count."""
    os.environ |= {"no_proxy": HOST, "NO_PROXY": HOST}
    seconds: dict[str, dict[str, list[float]]] = {work: {name: [] for name in SYSTEMS} for work in ("save", "load")}
    small, training = (Training.of_size(nbytes, endpoint) for nbytes in (WARM, setting.nbytes))
    nbytes, order = _count_bytes(training), random.Random(0)
    for number in range(setting.rounds):
        for name in order.sample(list(SYSTEMS), len(SYSTEMS)):
            _measure_system(small, name, f"{name.replace(' ', '')}-warm-{number}")
            costs = _measure_system(training, name, f"{name.replace(' ', '')}-{number}")
            for work, cost in zip(seconds, costs, strict=True):
                seconds[work][name].append(cost * 1e9 / nbytes)
    case = f"FSDP2, {RANKS} ranks, {setting.gigabytes}, {protocol}"
    return [
        Table(f"CPU: object store, {work}, {case}", "CPU s/GB", {name: Figure(tuple(of)) for name, of in rows.items()})
        for work, rows in seconds.items()
    ]


def _measure_system(training: Training, name: str, path: str) -> tuple[float, float]:
    """Return the CPU seconds of a save and of a load by all ranks. Raise unless the load restores all bytes."""
    save, load = SYSTEMS[name]
    expected = {name: shard.detach().clone() for name, shard in training.list_shards().items()}
    saved = _time_all_ranks(partial(save, training, path))
    training.erase()
    loaded = _time_all_ranks(partial(load, training, path))
    check_equal(training.list_shards(), expected)
    return saved, loaded


def _time_all_ranks(work: Callable[[], None]) -> float:
    dist.barrier()
    started = time.process_time()
    work()
    return _sum_over_ranks(time.process_time() - started)


def _sum_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def _count_bytes(training: Training) -> float:
    return _sum_over_ranks(float(sum(shard.nbytes for shard in training.list_shards().values())))
