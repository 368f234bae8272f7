"""One process: large and small tensors, saved durably and loaded cold and warm, and the cost of verification."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open

import rankless
from benchmarks import peers, raw, states
from benchmarks.measure import Contender, Table, time_interleaved
from benchmarks.peers import DCP, OURS, SAFETENSORS, TORCH
from benchmarks.setting import Setting

_THREADS = (1, 4)


def measure_large(setting: Setting) -> Iterator[Table]:
    """Measure eight large tensors."""
    folder, state = setting.folder, states.build_large_tensors(setting.nbytes)
    memory = raw.aligned_copy([tensor.view(torch.uint8).numpy() for tensor in state.values()])
    writes = _build_raw_writes(folder, memory)
    clock = time_interleaved({**peers.build_saves(folder, state), **writes}, setting.rounds)
    yield clock.build_table(f"save, {setting.gigabytes}, one process, durable", tuple(writes))
    yield clock.build_processor_table(f"processor time of that save, {setting.gigabytes}", setting.nbytes / 1e9)
    del memory, writes
    yield from _measure_large_loads(setting, state)
    yield _measure_verification(setting, state)
    yield _measure_one_tensor(setting, state)


def _build_raw_writes(folder: Path, memory: raw.Bytes) -> dict[str, Contender]:
    return {
        f"raw direct write, {n} thread(s)": peers.make_fresh(
            folder / "raw", partial(raw.write_direct, memory=memory, threads=n)
        )
        for n in _THREADS
    }


def _measure_large_loads(setting: Setting, state: peers.State) -> Iterator[Table]:
    case = f"{setting.gigabytes}, one process"
    yield _measure_cold_loads(setting, state, case)
    contenders = {name: Contender(load) for name, load in peers.build_loads(setting.folder, state).items()}
    raw.read_into_cache(setting.folder)
    for contender in contenders.values():
        contender.run()
    yield time_interleaved(contenders, setting.rounds).build_table(f"load, {case}, from the page cache")


def _measure_cold_loads(setting: Setting, state: peers.State, case: str) -> Table:
    folder = setting.folder
    file = folder / OURS / "s/model/model.safetensors"
    reads: dict[str, Callable[[], object]] = {
        f"raw {kind} read, {n} thread(s)": partial(raw.read_file, file, n, direct=kind == "direct")
        for kind in ("direct", "buffered")
        for n in _THREADS
    }
    contenders = {
        name: peers.make_cold(folder, load) for name, load in {**peers.build_loads(folder, state), **reads}.items()
    }
    return time_interleaved(contenders, setting.rounds).build_table(f"load, {case}, cold", tuple(reads))


def _measure_verification(setting: Setting, state: peers.State) -> Table:
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}

    def load(*, verify: bool) -> Contender:
        path = setting.folder / OURS
        return peers.make_cold(setting.folder, partial(rankless.load_checkpoint, path, model=target, verify=verify))

    contenders = {OURS: load(verify=True), "rankless, verify=False": load(verify=False)}
    return time_interleaved(contenders, setting.rounds).build_table(
        f"load, {setting.gigabytes}, cold, without verification"
    )


def _measure_one_tensor(setting: Setting, state: peers.State) -> Table:
    folder, name = setting.folder, "layer.5.weight"
    target = {name: torch.zeros_like(state[name])}

    def ours() -> object:
        return rankless.open(folder / OURS)[f"model/{name}"]

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
    cold = {name: peers.make_cold(folder, run) for name, run in contenders.items()}
    return time_interleaved(cold, setting.rounds).build_table(f"one tensor of {setting.nbytes // 8 / 1e6:g} MB, cold")


def measure_small(setting: Setting) -> Iterator[Table]:
    """Measure very many small tensors."""
    folder, state = setting.folder, states.build_small_tensors()
    yield time_interleaved(peers.build_saves(folder, state), setting.rounds).build_table(
        "save, 20,000 x 4 KiB, one process"
    )
    loads = {name: peers.make_cold(folder, load) for name, load in peers.build_loads(folder, state).items()}
    yield time_interleaved(loads, setting.rounds).build_table("load, 20,000 x 4 KiB, one process")


def measure_huge(setting: Setting) -> Iterator[Table]:
    """Measure one tensor of twice the size."""
    folder, state = setting.folder, {"weight": torch.randn(2 * setting.nbytes // 4)}
    case = f"one tensor of {2 * setting.nbytes / 1e9:g} GB, one process"
    memory = raw.aligned_copy([tensor.view(torch.uint8).numpy() for tensor in state.values()])
    writes = _build_raw_writes(folder, memory)
    saves = {**peers.build_saves(folder, state), **writes}
    yield time_interleaved(saves, setting.rounds).build_table(f"save, {case}, durable", tuple(writes))
    del memory, writes, saves
    yield _measure_cold_loads(setting, state, case)


def measure_memory_disk(setting: Setting) -> Iterator[Table]:
    """Measure the same large state on tmpfs, where only CPU time counts."""
    folder, state = Path("/dev/shm") / setting.folder.name, states.build_large_tensors(setting.nbytes)  # noqa: S108 - a tmpfs
    folder.mkdir()
    try:
        saves = peers.build_saves(folder, state)
        yield time_interleaved(saves, setting.rounds).build_table(f"save, {setting.gigabytes}, tmpfs")
        loads = {name: Contender(load) for name, load in peers.build_loads(folder, state).items()}
        yield time_interleaved(loads, setting.rounds).build_table(f"load, {setting.gigabytes}, tmpfs")
    finally:
        raw.remove_path(folder)
