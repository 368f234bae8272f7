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

import holdfast
from benchmarks import peers, raw, states
from benchmarks.measure import Contender, Table, interleaved
from benchmarks.peers import DCP, OURS
from benchmarks.setting import Setting

#: The function of a rank; on rank 0 it returns the tables.
Part = Callable[[Setting], list[Table]]


def on_ranks(ranks: int, setting: Setting, part: Part) -> list[Table]:
    """Run a function on new gloo ranks."""
    results = mp.get_context("spawn").SimpleQueue()
    (setting.folder / "store").unlink(missing_ok=True)
    spawn(_rank, (ranks, setting, part, results), nprocs=ranks)
    tables: list[Table] = results.get()
    return tables


def _rank(rank: int, ranks: int, setting: Setting, part: Part, results: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{setting.folder}/store", ranks), rank=rank, world_size=ranks)
    tables = part(setting)
    if rank == 0:
        results.put(tables)
    dist.destroy_process_group()


def layouts(setting: Setting) -> Iterator[Table]:
    """Measure each layout on 2 and 4 ranks."""
    for layout, ranks in (("DDP", 2), ("FSDP2", 2), ("FSDP2", 4), ("TP", 2), ("TP", 4), ("FSDP2 x TP", 4)):
        yield from on_ranks(ranks, setting, partial(_layout, layout))
        raw.empty(setting.folder)


def resharded(setting: Setting) -> Iterator[Table]:
    """Measure a save by two ranks and loads by four, in another layout or unsharded."""
    on_ranks(2, setting, partial(_save_once, "FSDP2"))
    for layout in ("TP", "DDP"):
        yield from on_ranks(4, setting, partial(_load_elsewhere, layout))
    raw.empty(setting.folder)


def small(setting: Setting) -> Iterator[Table]:
    """Measure very many small tensors, replicated on two ranks."""
    yield from on_ranks(2, setting, _small)
    raw.empty(setting.folder)


def _layout(layout: str, setting: Setting) -> list[Table]:
    model, optimizer = states.training(layout, setting.nbytes)
    state = states.tensors(model, optimizer)
    saves = {OURS: _our_save(setting.folder / OURS, model, optimizer), **peers.dcp_saves(setting.folder, state)}
    writes = _writes(setting.folder, layout, state)
    clock = interleaved(together({**saves, **writes}), setting.rounds)
    case = f"{layout}, {dist.get_world_size()} ranks, {setting.gigabytes}"
    return [clock.table(f"save, {case}", tuple(writes)), *_loads(case, setting, model, optimizer)]


def _loads(case: str, setting: Setting, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Table]:
    folder, state = setting.folder, states.tensors(model, optimizer)
    loads: dict[str, Callable[[], object]] = {
        OURS: lambda: holdfast.load_checkpoint(folder / OURS, model=model, optimizer=optimizer),
        DCP: lambda: dcp.load(dict(state), checkpoint_id=folder / DCP),
    }
    reads = raw_reads(folder)
    cold = {name: peers.cold(folder, load) for name, load in {**loads, **reads}.items()}
    yield interleaved(together(cold), setting.rounds).table(f"load, {case}, cold", tuple(reads))
    if dist.get_rank() == 0:
        raw.remember(folder)
    dist.barrier()
    warm = {name: Contender(load) for name, load in loads.items()}
    yield interleaved(together(warm), setting.rounds).table(f"load, {case}, from the page cache")


def _save_once(layout: str, setting: Setting) -> list[Table]:
    model, optimizer = states.training(layout, setting.nbytes)
    holdfast.save_checkpoint(setting.folder / OURS, "s", model, optimizer, rng=False)
    dcp.save(states.tensors(model, optimizer), checkpoint_id=setting.folder / DCP)
    return []


def _load_elsewhere(layout: str, setting: Setting) -> list[Table]:
    model, optimizer = states.training(layout, setting.nbytes)
    case = f"saved by FSDP2 on 2 ranks, loaded by {layout} on {dist.get_world_size()}, {setting.gigabytes}"
    return list(_loads(case, setting, model, optimizer))


def _small(setting: Setting) -> list[Table]:
    folder, state = setting.folder, states.many()
    saves = {OURS: peers.saves(folder, state)[OURS], **peers.dcp_saves(folder, state)}
    loads = {name: load for name, load in peers.loads(folder, state).items() if name in {OURS, DCP}}
    cold = {name: peers.cold(folder, load) for name, load in loads.items()}
    case = f"20,000 x 4 KiB, {dist.get_world_size()} ranks"
    return [
        interleaved(together(saves), setting.rounds).table(f"save, {case}"),
        interleaved(together(cold), setting.rounds).table(f"load, {case}"),
    ]


def _our_save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Contender:
    return peers.fresh(path, lambda path: holdfast.save_checkpoint(path, "s", model, optimizer, rng=False))


def _writes(folder: Path, layout: str, state: dict[str, torch.Tensor]) -> dict[str, Contender]:
    """Write as many bytes from each rank as it has; under DDP its share of them."""
    parts = states.local_bytes(state)
    if layout == "DDP":
        parts = [part[: len(part) // dist.get_world_size()] for part in parts]
    memory = raw.aligned_copy([part.numpy() for part in parts])
    path = folder / f"raw-{dist.get_rank()}"
    return {
        f"raw direct write, {n} thread(s) a rank": Contender(partial(raw.write_direct, path, memory, n)) for n in (1, 2)
    }


def raw_reads(folder: Path) -> dict[str, Callable[[], object]]:
    """Read each rank's share of the files that holdfast saved."""
    files = sorted((folder / OURS).rglob("*.safetensors"))
    share = partial(raw.read_share, files, dist.get_rank(), dist.get_world_size())
    return {f"raw {kind} read": partial(share, direct=kind == "direct") for kind in ("direct", "buffered")}


def together(contenders: dict[str, Contender]) -> dict[str, Contender]:
    """Return a contender that rank 0 prepares, all ranks start at once, and all ranks finish."""
    return {name: _all_at_once(one) for name, one in contenders.items()}


def _all_at_once(contender: Contender) -> Contender:
    def prepare() -> None:
        if dist.get_rank() == 0:
            contender.prepare()
        dist.barrier()

    def run() -> None:
        contender.run()
        dist.barrier()

    return Contender(run, prepare)
