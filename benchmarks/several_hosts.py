"""Several hosts: loads by one rank on each of four hosts from a network disk, with links of 1 Gbit/s.

A host is a network namespace with a limited link, a mount of its own, and a kernel boot id of its own, so rankless
takes its ranks for those of another host. The disk of 250 MB/s is behind one server with such a link
(:mod:`benchmarks.network_disk`). Needs root, ``iproute2``, ``mfusepy``, and the libfuse that the test bed unpacks
(``python -m campaigns.hosts setup``).
"""

from __future__ import annotations

import importlib.util
import multiprocessing as mp
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.queues import SimpleQueue
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import rankless
from benchmarks import network_disk, raw, states
from benchmarks.measure import Contender, Figure, SelfTimed, Table, time_interleaved
from benchmarks.parallel import build_raw_reads, run_on_ranks
from benchmarks.peers import DCP, OURS
from benchmarks.setting import Setting
from campaigns.common.namespaces import run_in_namespaces, unshare_network_and_mounts
from campaigns.common.programs import run
from campaigns.hosts.packages import DEFAULT_FOLDER, missing_parts

HOSTS = 4

#: The limit of each link, and of the disk in bytes a second.
LINK, DISK = "1gbit", 250e6

#: The first three numbers of the addresses. The last one is the host's number; the server has the one after them.
_NETWORK = "10.79.0"
_SERVER = (f"{_NETWORK}.{HOSTS + 1}", 9000)

#: The layouts of a save and of the load of its checkpoint.
_CASES = (("DDP", "DDP"), ("FSDP2", "TP"))


def measure_several_hosts(setting: Setting) -> Iterator[Table]:
    """Measure loads on four hosts: their times, and the bytes that the server sends."""
    if reasons := _missing_parts():
        print("several-hosts is skipped:", *reasons, sep="\n- ")
        return
    for layout in {saved for saved, _ in _CASES}:
        run_on_ranks(HOSTS, setting, partial(_save, layout))
    fork = mp.get_context("fork")
    results: SimpleQueue[list[Table]] = fork.SimpleQueue()
    hosts = fork.Process(target=lambda: sys.exit(run_in_namespaces(lambda: _run_hosts(setting, results))))
    hosts.start()  # a process of its own, because it cannot leave its namespaces
    hosts.join()
    if hosts.exitcode:
        raise RuntimeError(f"the hosts ended with status {hosts.exitcode}")
    yield from results.get()
    raw.empty_directory(setting.folder)


def _missing_parts() -> list[str]:
    reasons = missing_parts(DEFAULT_FOLDER)
    if importlib.util.find_spec("mfusepy") is None:
        reasons.append("the package mfusepy is missing")
    return reasons


def _save(layout: str, setting: Setting) -> list[Table]:
    model, optimizer = states.build_training(layout, setting.nbytes)
    rankless.save_checkpoint(setting.folder / layout / OURS, "s", model, optimizer, rng=False)
    dcp.save(states.list_tensors(model, optimizer), checkpoint_id=setting.folder / layout / DCP)
    return []


@dataclass(frozen=True)
class _Host:
    """A process in namespaces of its own. It waits for its link before it works."""

    number: int
    pid: int
    connected: int

    @classmethod
    def start(cls, number: int, work: Callable[[], None]) -> _Host:
        """Start a process that works in its own namespaces as soon as it has a link."""
        isolated, connected = os.pipe(), os.pipe()
        pid = os.fork()
        if not pid:
            status = 1
            try:
                unshare_network_and_mounts()
                os.write(isolated[1], b"x")
                os.read(connected[0], 1)
                _configure_link(number)
                work()
                status = 0
            except BaseException:  # noqa: BLE001 - this process must not return into its caller's code
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(status)
        os.read(isolated[0], 1)
        _create_link(number, pid)
        return cls(number, pid, connected[1])

    def connect(self) -> None:
        """Let the process continue."""
        os.write(self.connected, b"x")

    def wait(self) -> int:
        """Wait for the end of the process, and return its exit status."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _create_link(number: int, pid: int) -> None:
    name = f"host{number}"
    run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    run("ip", "link", "set", name, "master", "switch", "up")
    _limit_rate(name)


def _configure_link(number: int) -> None:
    run("ip", "link", "set", "lo", "up")
    run("ip", "address", "add", f"{_NETWORK}.{number}/24", "dev", "eth0")
    run("ip", "link", "set", "eth0", "up")
    _limit_rate("eth0")


def _limit_rate(device: str) -> None:
    run("tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", LINK, "burst", "256kb", "latency", "100ms")


def _run_hosts(setting: Setting, results: SimpleQueue[list[Table]]) -> int:
    run("ip", "link", "add", "switch", "type", "bridge")
    run("ip", "link", "set", "switch", "up")
    sent = mp.Value("Q", 0)
    server = _Host.start(HOSTS + 1, partial(network_disk.serve_folder, setting.folder, _SERVER, sent, DISK))
    hosts = [_Host.start(rank + 1, partial(_run_rank, rank, setting, sent, results)) for rank in range(HOSTS)]
    for host in (server, *hosts):
        host.connect()
    return max(host.wait() for host in hosts)


def _run_rank(rank: int, setting: Setting, sent: Synchronized[int], results: SimpleQueue[list[Table]]) -> None:
    folder = _mount(rank)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo", init_method=f"tcp://{_NETWORK}.1:29500", rank=rank, world_size=HOSTS)
    measured = [table for case in _CASES for table in _measure_loads(*case, folder, setting, sent)]
    if rank == 0:
        results.put(measured)
    dist.destroy_process_group()


def _mount(rank: int) -> Path:
    """Give this host a boot id and a mount of the server's folder. Return the mount point."""
    private = Path("/tmp")  # noqa: S108 - a file system of this host alone
    run("mount", "-t", "tmpfs", "none", str(private))
    boot_id, folder = private / "boot_id", private / "disk"
    boot_id.write_text(f"{uuid.UUID(int=rank + 1)}\n", encoding="ascii")
    run("mount", "--bind", str(boot_id), "/proc/sys/kernel/random/boot_id")
    folder.mkdir()
    client = f"from benchmarks import network_disk; network_disk.mount_folder({str(folder)!r}, {_SERVER!r})"
    library = next((DEFAULT_FOLDER / "root/usr/lib").glob("*/libfuse3.so.3"))
    mounting = subprocess.Popen([sys.executable, "-c", client], env={**os.environ, "FUSE_LIBRARY_PATH": str(library)})
    deadline = time.monotonic() + 60
    while not os.path.ismount(folder):
        if time.monotonic() > deadline or mounting.poll() is not None:
            raise RuntimeError(f"{folder} was not mounted")
        time.sleep(0.1)
    return folder


def _measure_loads(saved: str, loaded: str, folder: Path, setting: Setting, sent: Synchronized[int]) -> Iterator[Table]:
    model, optimizer = states.build_training(loaded, setting.nbytes)
    tensors, path = states.list_tensors(model, optimizer), folder / saved
    loads: dict[str, Callable[[], object]] = {
        OURS: lambda: rankless.load_checkpoint(path / OURS, model=model, optimizer=optimizer),
        DCP: lambda: dcp.load(dict(tensors), checkpoint_id=path / DCP),
        "raw read of a share by each rank": build_raw_reads(path)["raw direct read"],
    }
    size = sum(file.stat().st_size for file in (path / OURS).rglob("*.safetensors"))
    moved: dict[str, list[float]] = {name: [] for name in loads}
    contenders = {name: _count_bytes(load, path, sent, size, moved[name]) for name, load in loads.items()}
    clock = time_interleaved(contenders, setting.rounds)
    case = f"{HOSTS} hosts, saved by {saved}, loaded by {loaded}, {setting.gigabytes}"
    yield clock.build_table(f"load, {case}", tuple(name for name in loads if name.startswith("raw")))
    yield Table(f"bytes read from the server / bytes of the checkpoint, {case}", "times", _without_first(moved))


def _count_bytes(
    load: Callable[[], object], path: Path, sent: Synchronized[int], size: int, moved: list[float]
) -> Contender:
    """Return a load of files that are in no host's page cache, which notes what the server has sent for it."""

    def load_cold() -> SelfTimed:
        raw.evict_from_cache(path)
        dist.barrier()
        before, started = sent.value, time.perf_counter()
        load()
        dist.barrier()
        seconds = time.perf_counter() - started
        moved.append((sent.value - before) / size)
        dist.barrier()
        return SelfTimed(seconds)

    return Contender(load_cold)


def _without_first(moved: Mapping[str, list[float]]) -> dict[str, Figure]:
    return {name: Figure(tuple(rounds[1:])) for name, rounds in moved.items()}
