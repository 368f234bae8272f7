"""Several ranks: a Llama-like model with AdamW in each layout, saved, loaded, and loaded in another layout."""

from __future__ import annotations

import multiprocessing as mp
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.multiprocessing.spawn import spawn

import rankless
from benchmarks import peers, raw, states
from benchmarks.measure import Contender, Table, time_interleaved
from benchmarks.peers import DCP, OURS
from benchmarks.setting import Setting

#: The function of a rank; on rank 0 it returns the tables.
Part = Callable[[Setting], list[Table]]


def run_on_ranks(ranks: int, setting: Setting, part: Part) -> list[Table]:
    """Run a function on new gloo ranks."""
    results = mp.get_context("spawn").SimpleQueue()
    (setting.folder / "store").unlink(missing_ok=True)
    spawn(_run_rank, (ranks, setting, part, results), nprocs=ranks)
    tables: list[Table] = results.get()
    return tables


def _run_rank(rank: int, ranks: int, setting: Setting, part: Part, results: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{setting.folder}/store", ranks), rank=rank, world_size=ranks)
    tables = part(setting)
    if rank == 0:
        results.put(tables)
    dist.destroy_process_group()


def measure_layouts(setting: Setting) -> Iterator[Table]:
    """Measure each layout on 2 and 4 ranks."""
    for layout, ranks in (("DDP", 2), ("FSDP2", 2), ("FSDP2", 4), ("TP", 2), ("TP", 4), ("FSDP2 x TP", 4)):
        yield from run_on_ranks(ranks, setting, partial(_measure_layout, layout))
        raw.empty_directory(setting.folder)


def measure_resharding(setting: Setting) -> Iterator[Table]:
    """Measure a save by two ranks and loads by four, in another layout or unsharded."""
    run_on_ranks(2, setting, partial(_save_once, "FSDP2"))
    for layout in ("TP", "DDP"):
        yield from run_on_ranks(4, setting, partial(_load_elsewhere, layout))
    raw.empty_directory(setting.folder)


def measure_small(setting: Setting) -> Iterator[Table]:
    """Measure very many small tensors, replicated on two ranks."""
    yield from run_on_ranks(2, setting, _measure_small)
    raw.empty_directory(setting.folder)


def _measure_layout(layout: str, setting: Setting) -> list[Table]:
    model, optimizer = states.build_training(layout, setting.nbytes)
    state = states.list_tensors(model, optimizer)
    saves = {OURS: _our_save(setting.folder / OURS, model, optimizer), **peers.build_dcp_saves(setting.folder, state)}
    writes = _build_raw_writes(setting.folder, layout, state)
    clock = time_interleaved(run_together({**saves, **writes}), setting.rounds)
    case = f"{layout}, {dist.get_world_size()} ranks, {setting.gigabytes}"
    return [clock.build_table(f"save, {case}", tuple(writes)), *_loads(case, setting, model, optimizer)]


def _loads(case: str, setting: Setting, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Table]:
    folder, state = setting.folder, states.list_tensors(model, optimizer)
    loads: dict[str, Callable[[], object]] = {
        OURS: lambda: rankless.load_checkpoint(folder / OURS, model=model, optimizer=optimizer),
        DCP: lambda: dcp.load(dict(state), checkpoint_id=folder / DCP),
    }
    reads = build_raw_reads(folder)
    cold = {name: peers.make_cold(folder, load) for name, load in {**loads, **reads}.items()}
    yield time_interleaved(run_together(cold), setting.rounds).build_table(f"load, {case}, cold", tuple(reads))
    if dist.get_rank() == 0:
        raw.read_into_cache(folder)
    dist.barrier()
    warm = {name: Contender(load) for name, load in loads.items()}
    yield time_interleaved(run_together(warm), setting.rounds).build_table(f"load, {case}, from the page cache")


def _save_once(layout: str, setting: Setting) -> list[Table]:
    model, optimizer = states.build_training(layout, setting.nbytes)
    rankless.save_checkpoint(setting.folder / OURS, "s", model, optimizer, rng=False)
    dcp.save(states.list_tensors(model, optimizer), checkpoint_id=setting.folder / DCP)
    return []


def _load_elsewhere(layout: str, setting: Setting) -> list[Table]:
    model, optimizer = states.build_training(layout, setting.nbytes)
    case = f"saved by FSDP2 on 2 ranks, loaded by {layout} on {dist.get_world_size()}, {setting.gigabytes}"
    return list(_loads(case, setting, model, optimizer))


def _measure_small(setting: Setting) -> list[Table]:
    folder, state = setting.folder, states.build_small_tensors()
    saves = {OURS: peers.build_saves(folder, state)[OURS], **peers.build_dcp_saves(folder, state)}
    loads = {name: load for name, load in peers.build_loads(folder, state).items() if name in {OURS, DCP}}
    cold = {name: peers.make_cold(folder, load) for name, load in loads.items()}
    case = f"20,000 x 4 KiB, {dist.get_world_size()} ranks"
    return [
        time_interleaved(run_together(saves), setting.rounds).build_table(f"save, {case}"),
        time_interleaved(run_together(cold), setting.rounds).build_table(f"load, {case}"),
    ]


def _our_save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Contender:
    return peers.make_fresh(path, lambda path: rankless.save_checkpoint(path, "s", model, optimizer, rng=False))


def _build_raw_writes(folder: Path, layout: str, state: dict[str, torch.Tensor]) -> dict[str, Contender]:
    """Write as many bytes from each rank as it has; under DDP its share of them."""
    parts = states.list_local_bytes(state)
    if layout == "DDP":
        parts = [part[: len(part) // dist.get_world_size()] for part in parts]
    memory = raw.aligned_copy([part.numpy() for part in parts])
    path = folder / f"raw-{dist.get_rank()}"
    return {
        f"raw direct write, {n} thread(s) a rank": Contender(partial(raw.write_direct, path, memory, n)) for n in (1, 2)
    }


def build_raw_reads(folder: Path) -> dict[str, Callable[[], object]]:
    """Read each rank's share of the files that rankless saved."""
    files = sorted((folder / OURS).rglob("*.safetensors"))
    share = partial(raw.read_share, files, dist.get_rank(), dist.get_world_size())
    return {f"raw {kind} read": partial(share, direct=kind == "direct") for kind in ("direct", "buffered")}


def run_together(contenders: dict[str, Contender]) -> dict[str, Contender]:
    """Return a contender that rank 0 prepares, all ranks start at once, and all ranks finish."""
    return {name: _start_together(contender) for name, contender in contenders.items()}


def _start_together(contender: Contender) -> Contender:
    def prepare() -> None:
        if dist.get_rank() == 0:
            contender.prepare()
        dist.barrier()

    def run() -> None:
        contender.run()
        dist.barrier()

    return Contender(run, prepare)
