"""``python -m campaigns.tier.peers``: the local tier beside other tiers in memory, on one machine without accelerators.

Four ranks save a state of FSDP2 into memory. Then one is killed, the launcher starts all again, and they load it. At
the end, fewer ranks try to load what four have saved. Peers take part if they are installed::

    pip install --no-deps --target PEERS lm-resiliency==0.2.0 dlrover==0.6.1
    pip install --no-deps --target PEERS pynvml deprecated wrapt kubernetes
    pip install --no-deps --target PEERS requests-oauthlib oauthlib websocket-client durationpy
    PYTHONPATH=PEERS python -m campaigns.tier.peers

DLRover's agent needs a master even on one machine. ``dlrover-run --standalone`` cannot start one with PyTorch 2.13
(``SubprocessHandler.__init__`` takes another argument since), so the campaign does.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from campaigns.common.case_runner import format_table
from campaigns.common.reserved_port import reserve_port

_RANKS, _FEWER_RANKS = 4, (3, 2)

#: What is measured, as the ranks name it.
_KINDS = ("stall", "complete", "restart", "load")

#: The package of each tier.
_PACKAGES = {
    "rankless": "rankless",
    "lm-resiliency": "lm_resiliency",
    "lm-resiliency, CRC-32": "lm_resiliency",
    "DLRover": "dlrover",
}

#: The store that torchrun shares between attempts still has the addresses of the ranks that died.
_ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Trial:
    """A tier, the folder of its run, whose ``memory`` is on a tmpfs, and the bytes over all ranks."""

    tier: str
    folder: Path
    nbytes: int

    def run(self, ranks: int, saves: int) -> list[dict[str, Any]]:
        """Start ranks, again after a failure if they save, and return what they measured."""
        measured = self.folder / "measured"
        measured.unlink(missing_ok=True)
        job = (f"--nproc-per-node={ranks}", f"--max-restarts={1 if saves else 0}", "-m", "campaigns.tier.peer_rank")
        arguments = (*job, self.tier, str(self.folder), str(self.nbytes), str(saves))
        launch = _launch_with_dlrover if self.tier == "DLRover" else _launch_with_torchrun
        with (self.folder / "output").open("a") as output:
            launch(arguments, {**os.environ, **_ENVIRONMENT}, output)
        return [json.loads(line) for line in measured.read_text().splitlines()] if measured.exists() else []


def _launch_with_torchrun(arguments: Sequence[str], env: Mapping[str, str], output: Any) -> None:
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments)
    subprocess.run(command, env=env, stdout=output, stderr=output, check=False, timeout=300)


def _launch_with_dlrover(arguments: Sequence[str], env: Mapping[str, str], output: Any) -> None:
    with _running_master(env, output) as address:
        command = (sys.executable, "-m", "dlrover.trainer.torch.elastic_run", "--nnodes=1", *arguments)
        env = {**env, "DLROVER_MASTER_ADDR": address}
        subprocess.run(command, env=env, stdout=output, stderr=output, check=False, timeout=300)


@contextmanager
def _running_master(env: Mapping[str, str], output: Any) -> Iterator[str]:
    """Run DLRover's master, and return its address."""
    with reserve_port() as port:
        options = ("--platform=local", f"--port={port}", "--node_num=1", "--job_name=peers")
        command = (sys.executable, "-m", "dlrover.python.master.main", *options)
        master = subprocess.Popen(command, env=env, stdout=output, stderr=output)
        try:
            _wait_for_port(port, master)
            yield f"127.0.0.1:{port}"
        finally:
            master.kill()
            master.wait()


def _wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < ends:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise RuntimeError("DLRover's master did not start")


@contextmanager
def _folder() -> Iterator[Path]:
    """Return a folder whose ``memory`` is on a tmpfs, and remove both."""
    with (
        tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as disk,
        tempfile.TemporaryDirectory(prefix="peers-", dir="/dev/shm", ignore_cleanup_errors=True) as memory,
    ):
        Path(disk, "memory").symlink_to(memory)
        yield Path(disk)


def _report(times: Mapping[str, Mapping[str, list[float]]]) -> str:
    head = ("seconds, median (range)", "stall of a save", "complete in memory", "from the loss to the load", "load")
    rows = [[tier, *(_format(of_tier[kind]) for kind in _KINDS)] for tier, of_tier in times.items()]
    return format_table(head, rows)


def _format(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})" if seconds else "-"


def main() -> int:
    """Measure the tiers that are installed. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.tier.peers", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the state over four ranks (default: 1)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--saves", type=int, default=3, help="saves in a round (default: 3)")
    parser.add_argument("--output", type=Path, help="a folder for what the processes print")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(_PACKAGES)} (default: all)")
    options = parser.parse_args()
    names = [name for name in options.names or _PACKAGES if importlib.util.find_spec(_PACKAGES[name])]
    times: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in names}
    failed = False
    for number in range(options.rounds):
        for name in names if number % 2 else reversed(names):
            with _folder() as folder:
                trial = Trial(name, folder, int(options.gigabytes * 1e9))
                print(f"round {number}, {name}: load {os.getloadavg()[0]:.0f}", flush=True)
                failed |= not _run(trial, options.saves, times[name])
                if number == options.rounds - 1:
                    for ranks in _FEWER_RANKS:
                        print(f"  {name} on {ranks} ranks: {trial.run(ranks, 0)[-1:]}", flush=True)
                if options.output:
                    shutil.copy(folder / "output", options.output / f"{name}-{number}")
    print(_report(times))
    return int(failed)


def _run(trial: Trial, saves: int, times: dict[str, list[float]]) -> bool:
    """Measure a round. Return whether its ranks loaded what they had saved."""
    loaded = False
    for measured in trial.run(_RANKS, saves):
        print(f"  {measured}", flush=True)
        for kind in measured.keys() & set(_KINDS):
            times[kind].append(measured[kind])
        loaded |= measured.get("wrong") == []
    return loaded


if __name__ == "__main__":
    sys.exit(main())
