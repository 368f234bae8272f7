"""The contenders: how each system saves and loads named tensors, with its best settings, durable on return.

DCP syncs its files by itself. For ``torch.save``, ``safetensors`` and ``torch_checkpointing``, a sync of their files is
part of the time. The last one cannot write past the page cache here (it fails on ext4).
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch_checkpointing import CheckpointManager
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

import rankless
from benchmarks import raw
from benchmarks.measure import Contender

warnings.filterwarnings("ignore", module="torch.distributed")
logging.getLogger("torch_checkpointing").setLevel(logging.ERROR)

State = Mapping[str, torch.Tensor]

#: The names of the contenders in tables.
OURS, DCP, TORCH, SAFETENSORS, TORCH_CHECKPOINTING = (
    "rankless",
    "PyTorch DCP",
    "torch.save",
    "safetensors",
    "torch_checkpointing",
)

#: The number of threads for DCP's writes, in addition to its default of one.
THREADS = (2, 4)


def build_dcp_saves(folder: Path, state: State) -> dict[str, Contender]:
    """Return DCP with one thread, and with more."""
    many = {f"{DCP}, {n} threads": partial(_save_dcp, state, n) for n in THREADS}
    return {name: make_fresh(folder / name, run) for name, run in {DCP: partial(_save_dcp, state, 1), **many}.items()}


def build_saves(folder: Path, state: State) -> dict[str, Contender]:
    """Return every system that can save the tensors of one process, each with a directory of its own."""
    every: dict[str, Callable[[Path], object]] = {
        OURS: lambda path: rankless.save_checkpoint(path, "s", state, rng=False),
        TORCH: partial(_save_torch, state),
        SAFETENSORS: partial(_save_safetensors, state),
        TORCH_CHECKPOINTING: partial(_save_torch_checkpointing, state),
    }
    return {**{name: make_fresh(folder / name, run) for name, run in every.items()}, **build_dcp_saves(folder, state)}


def build_loads(folder: Path, state: State) -> dict[str, Callable[[], object]]:
    """Return the loads of the files that :func:`build_saves` has saved. Only rankless verifies the data."""
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    return {
        OURS: lambda: rankless.load_checkpoint(folder / OURS, model=target),
        DCP: lambda: dcp.load(dict(target), checkpoint_id=folder / DCP),
        "torch.load(mmap=True), copied": partial(_load_torch, folder / TORCH, target),
        "safetensors, copied": partial(_load_safetensors, folder / SAFETENSORS, target),
    }


def make_cold(folder: Path, load: Callable[[], object]) -> Contender:
    """Return a load of files that are not in the page cache."""
    return Contender(load, lambda: raw.evict_from_cache(folder))


def make_fresh(path: Path, run: Callable[[Path], object]) -> Contender:
    """Return a save to an unused path."""
    return Contender(lambda: run(path), lambda: raw.remove_path(path))


def _save_dcp(state: State, threads: int, path: Path) -> None:
    dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(path, thread_count=threads))


def _save_torch(state: State, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())


def _save_safetensors(state: State, path: Path) -> None:
    save_file(dict(state), path)
    raw.sync_tree(path)


def _save_torch_checkpointing(state: State, path: Path) -> None:
    manager = CheckpointManager.Config(
        save=SyncCheckpointSaverConfig(), storage_config=LocalFileSystemStorageConfig(use_direct_io=False)
    ).build()
    manager.save(str(path), {"model": dict(state)})
    manager.close()
    raw.sync_tree(path)


def _load_torch(path: Path, target: State) -> None:
    for name, tensor in torch.load(path, mmap=True).items():
        target[name].copy_(tensor)


def _load_safetensors(path: Path, target: State) -> None:
    with safe_open(path, "pt") as file:
        for name in target:
            target[name].copy_(file.get_tensor(name))
