"""What is measured: each case is a function that times holdfast, its peer and the limit on the same state."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import holdfast
from benchmarks import raw
from benchmarks.measure import Contender, Timing, interleaved

warnings.filterwarnings("ignore", module="torch.distributed")

GB = 10**9

COUNT = 20_000


def big(folder: Path, rounds: int) -> dict[str, dict[str, Timing]]:
    """One process, 2 GB in eight float32 tensors: durable saves, and cold verified loads."""
    state = {f"layer.{number}.weight": torch.randn(2 * GB // 4 // 8) for number in range(8)}
    memory = raw.aligned_copy([tensor.view(torch.uint8).numpy() for tensor in state.values()])
    writes = {
        f"raw direct write, {n} thread(s)": _fresh(folder / "raw", partial(raw.write_direct, memory=memory, threads=n))
        for n in (1, 4)
    }
    saves = interleaved({**_saves(folder, state), **writes}, rounds)
    file = folder / "holdfast/s/model/model.safetensors"
    reads = {
        f"raw {kind} read, {n} thread(s)": Contender(
            partial(raw.read, file, n, direct=kind == "direct"), lambda: raw.forget(folder)
        )
        for kind in ("direct", "buffered")
        for n in (1, 4)
    }
    return {"save, 2 GB, durable": saves, "load, 2 GB, cold": interleaved({**_loads(folder, state), **reads}, rounds)}


def small(
    folder: Path, rounds: int, around: Callable[[Contender], Contender] = lambda contender: contender
) -> dict[str, dict[str, Timing]]:
    """Many tensors of 4 KiB. ``around`` makes contenders of several ranks out of those of one."""
    state = {f"tensor.{number:05d}": torch.full((1024,), float(number)) for number in range(COUNT)}
    saves = interleaved({name: around(one) for name, one in _saves(folder, state).items()}, rounds)
    loads = interleaved({name: around(one) for name, one in _loads(folder, state).items()}, rounds)
    return {"save, 20,000 x 4 KiB": saves, "load, 20,000 x 4 KiB": loads}


def _saves(folder: Path, state: Mapping[str, torch.Tensor]) -> dict[str, Contender]:
    return {
        "holdfast": _fresh(folder / "holdfast", lambda path: holdfast.save_checkpoint(path, "s", state)),
        "PyTorch DCP": _fresh(folder / "dcp", lambda path: dcp.save(dict(state), checkpoint_id=path)),
        "PyTorch DCP, 4 threads": _fresh(
            folder / "dcp4",
            lambda path: dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(path, thread_count=4)),
        ),
    }


def _loads(folder: Path, state: Mapping[str, torch.Tensor]) -> dict[str, Contender]:
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    return {
        "holdfast": Contender(
            lambda: holdfast.load_checkpoint(folder / "holdfast", model=target), lambda: raw.forget(folder)
        ),
        "PyTorch DCP": Contender(lambda: dcp.load(target, checkpoint_id=folder / "dcp"), lambda: raw.forget(folder)),
    }


def _fresh(path: Path, run: Callable[[Path], object]) -> Contender:
    def clear() -> None:
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)

    return Contender(lambda: run(path), clear)
