"""``-m campaigns.tier.peer_rank TIER FOLDER BYTES SAVES``: a rank that saves into memory, dies, and loads again.

A launcher starts it, and again after rank 1 has killed itself. With ``SAVES`` of 0 it only loads. Rank 0 appends what
was measured to ``FOLDER/measured``, a JSON object a line. FOLDER/memory is on a tmpfs.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import rankless
from campaigns.tier import known_state

#: The number of the state that is saved.
_SAVED = 1

#: Before these saves have ended, memory is new.
_WARM_UP = 3

#: No save goes to storage by itself.
_NEVER = 10**6

#: What rankless imports at the first save and load. Peers import theirs before, with their classes.
_MODULES = ("rankless.save.tier_content", "rankless.load.tier_load", "rankless.load.fallback")


class Tier(Protocol):
    """A checkpoint in memory."""

    def save(self, step: int) -> None:
        """Save, until the training may go on."""

    def wait(self) -> None:
        """Wait until the checkpoint is complete in memory."""

    def load(self) -> str:
        """Load the newest checkpoint into the model and the optimizer. Return where it was."""


class Rankless:
    """The local tier of rankless, without copies: there is one host."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for module in _MODULES:
            importlib.import_module(module)
        local = rankless.LocalTier(folder / "memory" / "tier", copies=0, drain_every=_NEVER)
        self._directory = rankless.RunDirectory(folder / "run", local=local, async_save=True, timeout=120)
        self._state = model, optimizer
        self._handle: rankless.SaveHandle[Any] | None = None

    def save(self, step: int) -> None:
        """Save."""
        self._handle = self._directory.save(f"step_{step}", *self._state, rng=False)

    def wait(self) -> None:
        """Wait for the tier."""
        if self._handle is not None:
            self._handle.wait_local()

    def load(self) -> str:
        """Load."""
        return self._directory.restore(None, *self._state).source


class LmResiliency:
    """The checkpoint manager of lm-resiliency, with the calls that it makes itself for FSDP2.

    It keeps checkpoints in the memory of the ranks, and writes them to a folder when a rank is lost: here, of a tmpfs.
    """

    def __init__(
        self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, verify: bool = False
    ) -> None:
        peer: Any = importlib.import_module("lm_resiliency.checkpointing")
        config = peer.InMemoryCkptConfig(
            interval=1,
            disk_flush_interval=0,
            disk_folder=str(folder / "memory"),
            run_id="peers",
            verify_integrity=verify,
            pin_memory=False,  # needs an accelerator
        )
        self._manager = peer.InMemoryCheckpointManager(config)
        self._tensors = _list_tensors(model, optimizer)

    def save(self, step: int) -> None:
        """Save."""
        self._manager.save_tensors(self._tensors, step)

    def wait(self) -> None:
        """Wait for the copy on the paired rank."""
        if not self._manager.finalize_replication():
            raise RuntimeError("the copy on the paired rank failed")

    def load(self) -> str:
        """Load."""
        loaded = self._manager.load_tensors()
        if loaded is None:
            raise RuntimeError("load_tensors() returned None")
        _copy(loaded[0], self._tensors)
        return "files written at the failure"


class DLRover:
    """The shared memory of DLRover's agent, with a shard for each rank."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        peer: Any = importlib.import_module("dlrover.trainer.torch.flash_checkpoint.ddp")
        ranks = dist.get_world_size()
        self._memory = importlib.import_module("dlrover.trainer.torch.flash_checkpoint.checkpointer").StorageType.MEMORY
        self._checkpointer = peer.DdpCheckpointer(str(folder / "run"), local_shard_num=ranks, global_shard_num=ranks)
        self._tensors = _list_tensors(model, optimizer)

    def save(self, step: int) -> None:
        """Save; the call returns when all is in memory."""
        state = {str(number): tensor for number, tensor in enumerate(self._tensors)}
        self._checkpointer.save_checkpoint(step, state, storage_type=self._memory)

    def wait(self) -> None:
        """Do nothing."""

    def load(self) -> str:
        """Load."""
        state = self._checkpointer.load_checkpoint()
        if not state:
            raise RuntimeError("load_checkpoint() returned {}")
        _copy([state[str(number)] for number in range(len(self._tensors))], self._tensors)
        return "memory of the agent"


TIERS: dict[str, Callable[[Path, nn.Module, torch.optim.Optimizer], Tier]] = {
    "rankless": Rankless,
    "lm-resiliency": LmResiliency,
    "lm-resiliency, CRC-32": lambda *state: LmResiliency(*state, verify=True),
    "DLRover": DLRover,
}


def _list_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return this rank's shards, those of the optimizer behind each parameter."""
    listed = []
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        listed += [parameter.detach(), *(state[key] for key in sorted(state))]
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in listed]


def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def _measure(work: Callable[[], object]) -> float:
    """Return the seconds of the slowest rank."""
    dist.barrier()
    began = time.perf_counter()
    work()
    return _take_slowest(time.perf_counter() - began)


def _take_slowest(seconds: float) -> float:
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def _record(folder: Path, **measured: object) -> None:
    if dist.get_rank() == 0:
        with (folder / "measured").open("a") as file:
            file.write(json.dumps(measured) + "\n")


def _measure_saves(tier: Tier, folder: Path, saves: int) -> None:
    for step in range(1, saves + _WARM_UP + 1):
        dist.barrier()
        began = time.perf_counter()
        tier.save(step)
        stall = time.perf_counter() - began
        tier.wait()
        complete = time.perf_counter() - began
        stall, complete = _take_slowest(stall), _take_slowest(complete)
        if step > _WARM_UP:
            _record(folder, stall=stall, complete=complete)


def _lose_rank(folder: Path) -> None:
    """Kill rank 1, and end the others as a training ends in which a collective fails."""
    if dist.get_rank() == 1:
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier()
    except RuntimeError:
        sys.exit(1)


def _load(tier: Tier, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    sources: list[str] = []
    killed = folder / "killed"
    restart = time.time() - killed.stat().st_mtime if killed.exists() else None
    seconds = _measure(lambda: sources.append(tier.load()))
    wrong = known_state.find_wrong(model, optimizer, _SAVED)
    _record(folder, load=seconds, restart=restart, source=sources[0], wrong=wrong)


def main() -> None:
    """Run a rank."""
    name, folder, nbytes, saves = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    model, optimizer = known_state.build_zeros("FSDP2", nbytes)
    try:
        tier = TIERS[name](folder, model, optimizer)
        if saves and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            known_state.fill_state(model, optimizer, _SAVED)
            _measure_saves(tier, folder, saves)
            _lose_rank(folder)
        _load(tier, folder, model, optimizer)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        _record(folder, error=f"{type(error).__name__}: {error}", where=f"{where.filename}:{where.lineno}")
        raise
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
