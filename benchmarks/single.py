"""One process: large and small tensors, saved durably and loaded cold and warm, and the cost of verification."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open

import holdfast
from benchmarks import peers, raw, states
from benchmarks.measure import Contender, Table, interleaved
from benchmarks.peers import DCP, OURS, SAFETENSORS, TORCH
from benchmarks.setting import Setting

_THREADS = (1, 4)


def large(setting: Setting) -> Iterator[Table]:
    """Measure eight large tensors."""
    folder, state = setting.folder, states.few(setting.nbytes)
    memory = raw.aligned_copy([tensor.view(torch.uint8).numpy() for tensor in state.values()])
    writes = _writes(folder, memory)
    clock = interleaved({**peers.saves(folder, state), **writes}, setting.rounds)
    yield clock.table(f"save, {setting.gigabytes}, one process, durable", tuple(writes))
    yield clock.processor_table(f"processor time of that save, {setting.gigabytes}", setting.nbytes / 1e9)
    del memory, writes
    yield from _large_loads(setting, state)
    yield _verification(setting, state)
    yield _one_tensor(setting, state)


def _writes(folder: Path, memory: raw.Bytes) -> dict[str, Contender]:
    return {
        f"raw direct write, {n} thread(s)": peers.fresh(
            folder / "raw", partial(raw.write_direct, memory=memory, threads=n)
        )
        for n in _THREADS
    }


def _large_loads(setting: Setting, state: peers.State) -> Iterator[Table]:
    case = f"{setting.gigabytes}, one process"
    yield _cold_loads(setting, state, case)
    contenders = {name: Contender(load) for name, load in peers.loads(setting.folder, state).items()}
    raw.remember(setting.folder)
    for contender in contenders.values():
        contender.run()
    yield interleaved(contenders, setting.rounds).table(f"load, {case}, from the page cache")


def _cold_loads(setting: Setting, state: peers.State, case: str) -> Table:
    folder = setting.folder
    file = folder / OURS / "s/model/model.safetensors"
    reads: dict[str, Callable[[], object]] = {
        f"raw {kind} read, {n} thread(s)": partial(raw.read, file, n, direct=kind == "direct")
        for kind in ("direct", "buffered")
        for n in _THREADS
    }
    contenders = {name: peers.cold(folder, load) for name, load in {**peers.loads(folder, state), **reads}.items()}
    return interleaved(contenders, setting.rounds).table(f"load, {case}, cold", tuple(reads))


def _verification(setting: Setting, state: peers.State) -> Table:
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}

    def load(*, verify: bool) -> Contender:
        path = setting.folder / OURS
        return peers.cold(setting.folder, partial(holdfast.load_checkpoint, path, model=target, verify=verify))

    contenders = {OURS: load(verify=True), "holdfast, verify=False": load(verify=False)}
    return interleaved(contenders, setting.rounds).table(f"load, {setting.gigabytes}, cold, without verification")


def _one_tensor(setting: Setting, state: peers.State) -> Table:
    folder, name = setting.folder, "layer.5.weight"
    target = {name: torch.zeros_like(state[name])}

    def ours() -> object:
        return holdfast.open(folder / OURS)[f"model/{name}"]

    def safetensors() -> object:
        with safe_open(folder / SAFETENSORS, "pt") as file:
            return file.get_tensor(name).clone()

    def mapped() -> object:
        # Opened inside the timed function: pages of a mapped file cannot be evicted from the cache.
        return torch.load(folder / TORCH, mmap=True)[name].clone()

    contenders = {
        OURS: ours,
        DCP: lambda: torch.distributed.checkpoint.load(target, checkpoint_id=folder / DCP),
        TORCH: mapped,
        SAFETENSORS: safetensors,
    }
    cold = {name: peers.cold(folder, run) for name, run in contenders.items()}
    return interleaved(cold, setting.rounds).table(f"one tensor of {setting.nbytes // 8 / 1e6:g} MB, cold")


def small(setting: Setting) -> Iterator[Table]:
    """Measure very many small tensors."""
    folder, state = setting.folder, states.many()
    yield interleaved(peers.saves(folder, state), setting.rounds).table("save, 20,000 x 4 KiB, one process")
    loads = {name: peers.cold(folder, load) for name, load in peers.loads(folder, state).items()}
    yield interleaved(loads, setting.rounds).table("load, 20,000 x 4 KiB, one process")


def huge(setting: Setting) -> Iterator[Table]:
    """Measure one tensor of twice the size."""
    folder, state = setting.folder, {"weight": torch.randn(2 * setting.nbytes // 4)}
    case = f"one tensor of {2 * setting.nbytes / 1e9:g} GB, one process"
    memory = raw.aligned_copy([tensor.view(torch.uint8).numpy() for tensor in state.values()])
    writes = _writes(folder, memory)
    saves = {**peers.saves(folder, state), **writes}
    yield interleaved(saves, setting.rounds).table(f"save, {case}, durable", tuple(writes))
    del memory, writes, saves
    yield _cold_loads(setting, state, case)


def memory_disk(setting: Setting) -> Iterator[Table]:
    """Measure the same large state on tmpfs, where only CPU time counts."""
    folder, state = Path("/dev/shm") / setting.folder.name, states.few(setting.nbytes)  # noqa: S108 - a tmpfs
    folder.mkdir()
    try:
        saves = peers.saves(folder, state)
        yield interleaved(saves, setting.rounds).table(f"save, {setting.gigabytes}, tmpfs")
        loads = {name: Contender(load) for name, load in peers.loads(folder, state).items()}
        yield interleaved(loads, setting.rounds).table(f"load, {setting.gigabytes}, tmpfs")
    finally:
        raw.remove(folder)
