"""``python -m benchmarks.scale``: what saves cost a job of very many ranks, and whether real processes cost the same.

``simulate RANKS …`` runs the product as rank 0 of jobs of Llama-3 405B whose other ranks are simulated
(:mod:`benchmarks.simulated_job`). ``processes RANKS …`` runs it as all ranks of jobs of real processes with gloo and a
small model, on two simulated hosts, and the same jobs simulated. Both store what they have measured in
``benchmarks/results/scale.json``; ``python -m benchmarks.scale_tables`` writes the tables of ``docs/scale.md`` from
that. It needs root, for mount namespaces.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import resource
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import rankless
from benchmarks.counting_store import CountingStore, TrafficByPart
from benchmarks.simulated_job import SimulatedPeers, init_simulated_group
from benchmarks.simulated_reports import Reports
from benchmarks.simulated_training import SMALL, Training, build_training, model_of
from campaigns.common.namespaces import NEW_MOUNTS, unshare
from campaigns.common.programs import run

RESULTS = Path(__file__).with_name("results") / "scale.json"

#: The saves of a job: the first one plans; those that follow have its plan.
SAVES = ("first", "second", "third")

#: The ranks of a host in a job of very many.
RANKS_PER_HOST = 8


@dataclass
class SaveCosts:
    """What one save has cost: processor seconds of rank 0, those of the store's server, and traffic of all ranks."""

    seconds: float
    server_seconds: float
    traffic: dict[str, tuple[int, int, int, int]]


@dataclass
class JobCosts:
    """What the saves of a job have cost. ``plan_seconds`` are those of a plan of rank 0, ``memory`` its most bytes."""

    ranks: int
    ranks_per_host: int
    model: str
    saves: dict[str, SaveCosts] = field(default_factory=dict)
    plan_seconds: float = 0.0
    state_bytes: int = 0
    memory: int = 0


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("what", choices=["simulate", "processes"])
    parser.add_argument("ranks", nargs="+", type=int)
    parser.add_argument("--folder", type=Path, help="a folder of a file system with room for sparse files of terabytes")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    folder = options.folder or _mount_memory()
    for ranks in options.ranks:
        if options.what == "simulate":
            for kind, rng in (("simulated", True), ("without generators", False)):
                job = partial(simulate_job, rng=rng)
                store_costs(options.results, kind, run_alone(job, ranks, RANKS_PER_HOST, "large", folder))
            continue
        per_host = max(1, ranks // 2)
        store_costs(options.results, "processes", run_processes(ranks, per_host, folder))
        store_costs(options.results, "model", run_alone(simulate_job, ranks, per_host, "small", folder))


def store_costs(results: Path, kind: str, costs: JobCosts) -> None:
    """Add the costs of a job to the results, and print them."""
    stored: dict[str, dict[str, Any]] = json.loads(results.read_text("utf-8")) if results.exists() else {}
    stored.setdefault(kind, {})[str(costs.ranks)] = asdict(costs)
    results.write_text(json.dumps(stored, indent=1) + "\n", "utf-8")
    print(kind, json.dumps(asdict(costs)), flush=True)


def simulate_job(ranks: int, per_host: int, size: str, folder: Path, *, rng: bool = True) -> JobCosts:
    """Save as rank 0 of a simulated job, with the states of random generators or without."""
    tcp = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=600))
    peers = SimulatedPeers(ranks, per_host)
    store = CountingStore(tcp, peers.act)
    init_simulated_group(store, ranks)
    training = build_training(model_of(ranks) if size == "large" else SMALL, ranks, 0)
    started = time.process_time()
    reports = Reports(training, ranks, per_host, rng=rng)
    costs = JobCosts(ranks, per_host, size, plan_seconds=time.process_time() - started)
    costs.state_bytes = training.nbytes
    peers.connect(store, reports)
    for name in SAVES:
        peers.begin_save(is_first=name == SAVES[0])
        costs.saves[name] = save_once(training, folder, name, store, rng=rng)
        costs.saves[name].seconds -= peers.seconds
    costs.memory = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return costs


def save_once(training: Training, folder: Path, name: str, store: CountingStore, *, rng: bool = True) -> SaveCosts:
    """Train and save. Return what the save has cost this process."""
    training.step()
    store.traffic = TrafficByPart()
    started, server_started = time.process_time(), read_server_seconds()
    rankless.save_checkpoint(folder, name, training.model, training.optimizer, rng=rng, timeout=3600)
    server = read_server_seconds() - server_started
    return SaveCosts(time.process_time() - started - server, server, store.traffic.rows())


def read_server_seconds() -> float:
    """Return the processor seconds of all threads that are not of Python: mostly of the server of the store."""
    of_python = {thread.native_id for thread in threading.enumerate()}
    ticks = 0
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) not in of_python:
            columns = (task / "stat").read_text("utf-8").rpartition(")")[2].split()
            ticks += int(columns[11]) + int(columns[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def run_alone(job: Callable[..., JobCosts], *arguments: Any) -> JobCosts:
    """Run a job in a process of its own, in a folder of its own."""
    *before, folder = arguments
    with tempfile.TemporaryDirectory(dir=folder) as own:
        results: SimpleQueue[JobCosts] = mp.get_context("spawn").SimpleQueue()
        process = mp.get_context("spawn").Process(target=_put_result, args=(results, job, (*before, Path(own))))
        process.start()
        costs = results.get()
        process.kill()  # what a simulated job leaves needs no goodbye to ranks that do not exist
        process.join()
    return costs


def _put_result(results: SimpleQueue[JobCosts], job: Callable[..., JobCosts], arguments: tuple[Any, ...]) -> None:
    results.put(job(*arguments))


def run_processes(ranks: int, per_host: int, folder: Path) -> JobCosts:
    """Save as all ranks of a job, each a process. Return the traffic of all, and the seconds of rank 0."""
    fork = mp.get_context("fork")
    results: SimpleQueue[tuple[int, JobCosts]] = fork.SimpleQueue()
    ports: SimpleQueue[int] = fork.SimpleQueue()
    with tempfile.TemporaryDirectory(dir=folder) as own:
        arguments = (ranks, per_host, Path(own), ports, results)
        processes = [fork.Process(target=_run_rank, args=(rank, *arguments)) for rank in range(ranks)]
        for process in processes:
            process.start()
        by_rank = dict(results.get() for _ in processes)
        for process in processes:
            process.join()
    costs = by_rank[0]
    for name in SAVES:
        rows = [by_rank[rank].saves[name].traffic for rank in by_rank]
        costs.saves[name].traffic = {
            part: tuple(map(sum, zip(*(row[part] for row in rows if part in row), strict=True)))  # type: ignore[misc]
            for part in sorted({part for row in rows for part in row})
        }
    return costs


def _run_rank(  # noqa: PLR0917 - the arguments of a process
    rank: int,
    ranks: int,
    per_host: int,
    folder: Path,
    ports: SimpleQueue[int],
    results: SimpleQueue[tuple[int, JobCosts]],
) -> None:
    try:
        if ranks > per_host:
            _take_host_id(rank // per_host, folder)
        torch.set_num_threads(1)
        store = CountingStore(_open_store(rank, ranks, ports))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=1800))
        training = build_training(SMALL, ranks, rank)
        costs = JobCosts(ranks, per_host, "small", state_bytes=training.nbytes)
        for name in SAVES:
            dist.barrier()
            costs.saves[name] = save_once(training, folder, name, store)
        dist.barrier()
        results.put((rank, costs))
    except BaseException:  # noqa: BLE001 - a forked process must not return
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)


def _open_store(rank: int, ranks: int, ports: SimpleQueue[int]) -> Any:
    """Serve the store on rank 0, and tell its port to all others."""
    timeout = timedelta(seconds=1800)
    if rank:
        return dist.TCPStore("127.0.0.1", ports.get(), ranks, is_master=False, timeout=timeout)
    store = dist.TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False, timeout=timeout)
    for _ in range(ranks - 1):
        ports.put(store.port)
    return store


def _take_host_id(host: int, folder: Path) -> None:
    """Give this process the kernel boot id of another host."""
    unshare(NEW_MOUNTS)
    run("mount", "--make-rprivate", "/")
    boot_id = folder.parent / f"boot-{host}"
    boot_id.write_text(f"{uuid.UUID(int=host + 1)}\n", encoding="ascii")
    run("mount", "--bind", str(boot_id), "/proc/sys/kernel/random/boot_id")


def _mount_memory() -> Path:
    """Return a folder in memory, in a mount namespace of this process, with room for sparse files."""
    unshare(NEW_MOUNTS)
    run("mount", "--make-rprivate", "/")
    folder = Path(tempfile.mkdtemp())
    run("mount", "-t", "tmpfs", "-o", "size=1000T", "none", str(folder))
    return folder


if __name__ == "__main__":
    main()
