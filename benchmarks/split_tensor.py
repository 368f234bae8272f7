"""One huge tensor, saved by one process and loaded by four, a quarter each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import rankless
from benchmarks import peers, raw
from benchmarks.footprint import measure_rise
from benchmarks.measure import Contender, Figure, Table, time_interleaved
from benchmarks.parallel import build_raw_reads, run_on_ranks, run_together
from benchmarks.peers import DCP, OURS
from benchmarks.setting import Setting

RANKS = 4


def measure_split_tensor(setting: Setting) -> Iterator[Table]:
    """Measure a tensor of twice the size."""
    run_on_ranks(1, setting, _save_tensor)
    yield from run_on_ranks(RANKS, setting, _measure_loads)
    raw.empty_directory(setting.folder)


def _count_elements(setting: Setting) -> int:
    return setting.nbytes // 2 // RANKS * RANKS


def _save_tensor(setting: Setting) -> list[Table]:
    state = {"weight": torch.randn(_count_elements(setting))}
    rankless.save_checkpoint(setting.folder / OURS, "s", state, rng=False)
    dcp.save(state, checkpoint_id=setting.folder / DCP)
    return []


def _measure_loads(setting: Setting) -> list[Table]:
    folder, shard = setting.folder, torch.zeros(_count_elements(setting) // RANKS)
    state = {"weight": DTensor.from_local(shard, init_device_mesh("cpu", (RANKS,)), [Shard(0)], run_check=False)}
    loads: dict[str, Callable[[], object]] = {
        OURS: lambda: rankless.load_checkpoint(folder / OURS, model=state),
        DCP: lambda: dcp.load(dict(state), checkpoint_id=folder / DCP),
    }
    reads = build_raw_reads(folder)
    cold = {name: peers.make_cold(folder, load) for name, load in {**loads, **reads}.items()}
    case = f"one tensor of {2 * setting.nbytes / 1e9:g} GB saved by 1, loaded by {RANKS} ranks, a part each"
    seconds = time_interleaved(run_together(cold), setting.rounds).build_table(f"load, {case}, cold", tuple(reads))
    warm = {name: Contender(load) for name, load in loads.items()}
    again = time_interleaved(run_together(warm), setting.rounds).build_table(f"load, {case}, again")
    beside = {name: Figure((_find_maximum(measure_rise(load)),)) for name, load in loads.items()}
    return [seconds, again, Table(f"memory of a rank beside its part: {case}", "MB", beside)]


def _find_maximum(value: float) -> float:
    """Return the maximum over all ranks."""
    maximum = torch.tensor([value])
    dist.all_reduce(maximum, dist.ReduceOp.MAX)
    return float(maximum)
