"""The measurements: loads after failures, the time until a checkpoint is complete, stalls, and a frozen disk."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from campaigns.tier import ranks
from campaigns.tier.disk import Disk
from campaigns.tier.hosts import LINK_BYTES, Host, running_hosts
from campaigns.tier.job import Job, running_job

_MODULES = (
    "campaigns.tier.ranks",
    "rankless.save.tier_content",
    "rankless.load.tier_load",
    "rankless.load.fallback",
)
_HOSTS = 4

#: The number of the state that is saved.
_SAVED = 1


@dataclass(frozen=True)
class Setting:
    """The hosts, the disk, the bytes of the state over all ranks, and how often each figure is measured."""

    hosts: Sequence[Host]
    disk: Disk
    nbytes: int
    rounds: int

    @property
    def run(self) -> Path:
        """The run directory."""
        return self.disk.path / "run"


def report(figure: str, measured: Sequence[float], limit: float | None, note: str = "") -> None:
    """Print a row: the median and all values, and whether it is within the limit."""
    median = statistics.median(measured)
    verdict = "" if limit is None else f"<= {limit:.2f}: {'yes' if median <= limit else 'NO'}"
    values = ", ".join(f"{value:.2f}" for value in measured)
    load = os.getloadavg()[0]
    print(f"| {figure} | {median:.3f} | {values} | {verdict} | {note} | load {load:.0f} |", flush=True)


def measure(disk: Disk, nbytes: int, rounds: int, figures: Sequence[str]) -> None:
    """Measure the figures with these names, or all of them."""
    with running_hosts(_HOSTS, _MODULES) as hosts:
        setting = Setting(hosts, disk, nbytes, rounds)
        print("| figure | median | all | limit | note | load |\n|---|---:|---|---|---|---|", flush=True)
        for name in figures or FIGURES:
            FIGURES[name](setting)
            _empty(setting)


def _empty(setting: Setting, folder: Path | None = None) -> None:
    """Remove the tier on all hosts, and a folder of the disk; or all that is on it."""
    with running_job(setting.hosts) as job:
        job.call(ranks.remove_tier)
    for path in [folder] if folder else setting.disk.path.iterdir():
        shutil.rmtree(path, ignore_errors=True)


def _save_in_tier(setting: Setting, copies: int, kill: int | None = None) -> None:
    with running_job(setting.hosts) as job:
        job.call(ranks.build, "FSDP2", setting.nbytes, _SAVED)
        job.call(ranks.open_run, setting.run, {"copies": copies, "drain_every": ranks.NEVER})
        job.call(ranks.save, setting.run, "saved")
        job.call(ranks.wait_for_saves, setting.run)
        if kill is not None:
            job.kill_rank(kill)


def _load(setting: Setting, hosts: Sequence[Host], layout: str, held: Sequence[set[int]]) -> tuple[float, int, int]:
    """Load on some hosts, and check all bits. Return the seconds, the bytes that must come to one, and those read."""
    with running_job(hosts) as job:
        job.call(ranks.build, layout, setting.nbytes, None)
        job.call(ranks.open_run, setting.run, {"copies": 1, "drain_every": ranks.NEVER})
        missing = max(job.call(ranks.count_missing, held, _HOSTS))
        job.call(ranks.evict, setting.disk.path)
        before, moved = setting.disk.read_bytes, [host.received_bytes for host in hosts]
        loads = job.call(ranks.load, setting.run)
        read = setting.disk.read_bytes - before
        came = [host.received_bytes - at for host, at in zip(hosts, moved, strict=True)]
        wrong = [name for names in job.call(ranks.find_wrong, _SAVED) for name in names]
        if wrong or {source for _, source in loads} != {"local tier"}:
            raise RuntimeError(f"loaded from {loads}, and these tensors are wrong: {wrong}")
        print(f"  must come to a host: {missing / 1e9:.3f} GB, came: {[f'{n / 1e9:.3f}' for n in came]}", flush=True)
        return max(seconds for seconds, _ in loads), missing, read


def measure_killed_rank(setting: Setting) -> None:
    """Measure loads after a rank was killed, and cold loads from the disk by rankless and DCP."""
    hosts, disk = setting.hosts, setting.disk
    ours, theirs = disk.path / "ours", disk.path / "dcp"
    with running_job(hosts) as job:
        job.call(ranks.build, "FSDP2", setting.nbytes, _SAVED)
        job.call(ranks.open_run, ours, None)
        job.call(ranks.save, ours, "saved")
        job.call(ranks.save_with_dcp, theirs)
    warm: list[float] = []
    cold: dict[str, list[float]] = {"rankless": [], "DCP": []}
    read: list[int] = []
    for _ in range(setting.rounds):
        _save_in_tier(setting, 0, kill=1)
        seconds, _, nbytes = _load(setting, hosts, "FSDP2", [{rank} for rank in range(_HOSTS)])
        warm.append(seconds)
        read.append(nbytes)
        with running_job(hosts) as job:
            job.call(ranks.build, "FSDP2", setting.nbytes, None)
            job.call(ranks.open_run, ours, None)
            job.call(ranks.evict, disk.path)
            cold["rankless"].append(max(seconds for seconds, _ in job.call(ranks.load, ours)))
            job.call(ranks.evict, disk.path)
            cold["DCP"].append(max(seconds for seconds, _ in job.call(ranks.load_with_dcp, theirs)))
        _empty(setting, setting.run)
    report("rank killed: load from the tier, s", warm, None, f"bytes read from the disk: {read}")
    for name, times in cold.items():
        report(f"cold load from the disk, {name}, s", times, None)
    slowest = min(statistics.median(times) for times in cold.values())
    report("rank killed: tier / the faster cold load", [seconds / slowest for seconds in warm], 0.25)


def _measure_lost_host(setting: Setting, title: str, left: Sequence[int], layout: str, allowance: float) -> None:
    """Measure loads on the hosts ``left`` after the last one was destroyed. If it is among them, it is empty."""
    times: list[float] = []
    missing = 0
    hosts, lost = [setting.hosts[number] for number in left], setting.hosts[-1]
    # A host has the part of its own rank, and a copy of the one before.
    held = [{number, (number - 1) % _HOSTS} if setting.hosts[number] is not lost else set[int]() for number in left]
    for _ in range(setting.rounds):
        _save_in_tier(setting, 1)
        lost.destroy()
        if lost in hosts:
            _start(lost)
        seconds, missing, _ = _load(setting, hosts, layout, held)
        times.append(seconds)
        if lost not in hosts:
            _start(lost)
        _empty(setting)
    limit = 1.3 * missing / LINK_BYTES + allowance
    report(title, times, limit, f"{missing / 1e9:.3f} GB must come to a host: {missing / LINK_BYTES:.2f} s of its link")


def _start(host: Host) -> None:
    host.start()
    host.wait_until_up()


def measure_replaced_host(setting: Setting) -> None:
    """Measure loads after a host was replaced by an empty one."""
    _measure_lost_host(setting, "host replaced by an empty one: load, s", range(_HOSTS), "FSDP2", 0.3)


def measure_fewer_hosts(setting: Setting) -> None:
    """Measure loads on fewer hosts. Two of them have all parts if they are no neighbours."""
    _measure_lost_host(setting, "host lost: load on three, FSDP2, s", (0, 1, 2), "FSDP2", 1.0)
    _measure_lost_host(setting, "host lost: load on two, TP, s", (0, 2), "TP", 1.0)


def measure_local_completion(setting: Setting) -> None:
    """Measure how long after an eager save has returned it is complete in the tier, and its stall."""
    tier: list[float] = []
    stalls: dict[str, list[float]] = {"with the tier": [], "without": []}
    runs = {"with the tier": setting.run, "without": setting.disk.path / "plain"}
    with running_job(setting.hosts) as job:
        job.call(ranks.build, "FSDP2", setting.nbytes, _SAVED)
        options = {"copies": 0, "drain_every": ranks.NEVER}
        job.call(ranks.open_run, runs["with the tier"], options, async_save=True, keep=1)
        job.call(ranks.open_run, runs["without"], None, async_save=True, keep=1)
        for number in range(2 * setting.rounds + 3):
            for name, run in list(runs.items())[:: 1 if number % 2 else -1]:
                job.call(ranks.change_state)
                results = job.call(ranks.save, run, f"save_{number}")
                job.call(ranks.wait_for_saves, run)
                if number >= 3:  # before, the slots are new
                    stalls[name].append(max(stall for stall, _ in results))
                    if run == setting.run:
                        tier.append(max(stall + local for stall, local in results) - stalls[name][-1])
    report("wait_local after an eager save, s", tier, 0.3)
    for name, times in stalls.items():
        report(f"stall of an eager save, {name}, s", times, None)
    pairs = [ours / other for ours, other in zip(*stalls.values(), strict=True)]
    report("stall with the tier / without", pairs, None)


def measure_copies(setting: Setting) -> None:
    """Measure saves with copies on another host, against DCP's stager that exchanges the state with another host."""
    ours: list[tuple[float, float]] = []
    theirs: list[float] = []
    with running_job(setting.hosts) as job:
        job.call(ranks.build, "FSDP2", setting.nbytes // 2, _SAVED)
        options = {"copies": 1, "drain_every": ranks.NEVER}
        job.call(ranks.open_run, setting.run, options, async_save=True)
        for number in range(setting.rounds + 2):
            saves = job.call(ranks.save_with_copies, setting.run, f"save_{number}")
            if number >= 2:  # before, the slots are new
                ours.append((max(stall for stall, _ in saves), max(done for _, done in saves)))
                theirs.append(max(job.call(ranks.replicate_with_dcp)))
    size = f"{setting.nbytes / 2e9:g} GB"
    report(f"save with copies=1, {size}: stall, s", [stall for stall, _ in ours], None)
    report(f"save with copies=1, {size}: until copied, s", [done for _, done in ours], None)
    report(f"_ReplicationStager of DCP, {size}: stall, s", theirs, None)


def measure_traffic(setting: Setting) -> None:
    """Measure how much longer the traffic of a training takes while copies are sent to other hosts."""
    for rate, limit in ((LINK_BYTES / 25, 1.1), (None, None)):
        plain, ratios, unfinished = [], [], []
        with running_job(setting.hosts) as job:
            job.call(ranks.build, "FSDP2", setting.nbytes, _SAVED)
            options = {"copies": 1, "drain_every": ranks.NEVER, "copy_rate": rate}
            job.call(ranks.open_run, setting.run, options, async_save=True)
            for number in range(setting.rounds + 1):
                before = _reduce_gradients(job)
                job.call(ranks.save, setting.run, f"save_{number}")
                during = _reduce_gradients(job)
                began = time.perf_counter()
                job.call(ranks.wait_for_saves, setting.run)
                if number:  # before, the slots are new
                    plain.append(before)
                    ratios.append(during / before)
                    unfinished.append(time.perf_counter() - began)
        title = "traffic while copies are sent / without" + (f", copy_rate={rate / 1e6:g} MB/s" if rate else "")
        note = f"of {statistics.median(plain):.2f} s; copies took {min(unfinished):.1f} s or more after it"
        report(title, ratios, limit, note)
        _empty(setting)


def _reduce_gradients(job: Job) -> float:
    """Return the mean seconds of some reductions of 50 MB: copies without a rate delay only the first ones."""
    steps = zip(*job.call(ranks.reduce_gradients, 10, 50_000_000), strict=True)
    slowest: list[float] = [max(of_step) for of_step in steps]
    return statistics.mean(slowest)


def measure_every_step(setting: Setting) -> None:
    """Measure steps with a save into memory after each, against steps without."""
    for copies, nbytes in ((0, setting.nbytes), (1, setting.nbytes // 2)):
        for processor, seconds in (("accelerator", 2.0), ("processor", 2.2)):
            plain, ratios = _compare_steps(setting, copies, nbytes, processor, seconds)
            title = f"save at each step, copies={copies}, {nbytes / 1e9:g} GB, {processor} busy: step / without a save"
            limit = 1.1 if copies == 0 else None
            report(title, ratios, limit, f"steps of {statistics.median(plain):.2f} s without a save")
            _empty(setting)


def _compare_steps(
    setting: Setting, copies: int, nbytes: int, processor: str, seconds: float
) -> tuple[list[float], list[float]]:
    """Return the median seconds of steps without saves, and those of steps with saves divided by them, each round."""
    plain, ratios = [], []
    with running_job(setting.hosts) as job:
        job.call(ranks.build, "FSDP2", nbytes, _SAVED)
        options = {"copies": copies, "drain_every": ranks.NEVER}
        job.call(ranks.open_run, setting.run, options, async_save=True, staging="overlapped")

        def train(*, saves: bool) -> float:
            results = job.call(ranks.train, setting.run, 4, seconds, processor, saves=saves)
            job.call(ranks.wait_for_saves, setting.run)
            slowest: list[float] = [max(of_step) for of_step in zip(*results, strict=True)]
            return statistics.median(slowest)

        train(saves=True)  # now the slots are there
        for _ in range(setting.rounds):
            plain.append(train(saves=False))
            ratios.append(train(saves=True) / plain[-1])
    return plain, ratios


def measure_frozen_disk(setting: Setting) -> None:
    """Measure the longest pause of a training while the disk is frozen, against that while it is not."""
    with running_job(setting.hosts) as job:
        job.call(ranks.build, "FSDP2", setting.nbytes, _SAVED)
        options = {"copies": 0, "drain_every": 1}
        job.call(ranks.open_run, setting.run, options, async_save=True, keep=2)
        job.call(ranks.record_pauses, setting.run, 20, 1.0)
        usual = [max(pauses) for pauses in zip(*job.call(ranks.record_pauses, setting.run, 60, 1.0), strict=True)]
        job.send(ranks.record_pauses, setting.run, 64, 1.0)
        time.sleep(2)
        with setting.disk.frozen():
            time.sleep(60)
        frozen = [max(pauses) for pauses in zip(*job.receive(), strict=True)]
        (tags, *_) = job.call(ranks.finish, setting.run)
        report("longest pause, disk not frozen, s", [max(usual)], None, f"median {statistics.median(usual):.3f}")
        note = f"median {statistics.median(frozen):.3f} of {len(frozen)} saves; afterwards on the disk: {tags}"
        report("longest pause, disk frozen for 60 s", [max(frozen)], 1.1 * max(usual), note)
    with running_job(setting.hosts) as job:
        job.call(ranks.remove_tier)
    with running_job(setting.hosts) as job:
        job.call(ranks.build, "FSDP2", setting.nbytes, None)
        job.call(ranks.open_run, setting.run, None)
        sources = {source for _, source in job.call(ranks.load, setting.run)}
        wrong = [name for names in job.call(ranks.find_wrong, _SAVED) for name in names]
        print(f"  loaded from the {sources}; wrong tensors: {wrong}", flush=True)


FIGURES: dict[str, Callable[[Setting], None]] = {
    "killed-rank": measure_killed_rank,
    "replaced-host": measure_replaced_host,
    "fewer-hosts": measure_fewer_hosts,
    "local-completion": measure_local_completion,
    "copies": measure_copies,
    "traffic": measure_traffic,
    "every-step": measure_every_step,
    "frozen-disk": measure_frozen_disk,
}
