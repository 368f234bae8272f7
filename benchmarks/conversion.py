"""``python -m benchmarks.conversion``: a DCP checkpoint into other formats and back, beside ``cp`` of the same bytes.

All begin with cold caches, and end when what they wrote is durable. *memory* is the most that a conversion had above
what its process had before, without what it has in common with the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import holdfast
from benchmarks import raw

#: From which into which, in this order: the later ones begin with what the earlier ones made.
WAYS = [("dcp", "hf"), ("dcp", "torch"), ("dcp", "native"), ("hf", "dcp"), ("torch", "dcp"), ("native", "dcp")]

#: Bytes of a tensor.
TENSOR = 128 * 2**20


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conversion", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where to write; the disk that is measured")
    parser.add_argument("--gb", type=float, default=4.0, help="size of the checkpoint (default: 4)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--no-verify", action="store_true", help="do not read back what was written")
    parser.add_argument("--only", nargs=3, metavar=("SRC", "DST", "FORMAT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(_measured(*options.only, verify=not options.no_verify)))
        return
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=options.folder))
    try:
        _save(folder / "dcp", options.gb)
        print("| | seconds | cp, seconds | speed / cp | memory, MB |")
        print("|---|---:|---:|---:|---:|")
        for source, to in WAYS:
            _compare(folder, source, to, options)
    finally:
        shutil.rmtree(folder)


def _save(path: Path, gigabytes: float) -> None:
    warnings.simplefilter("ignore")
    number = max(1, round(gigabytes * 1e9 / TENSOR))
    rows = TENSOR // 4 // 4096
    dcp.save({"model": {f"w{n}": torch.rand(rows, 4096) for n in range(number)}}, checkpoint_id=path, no_dist=True)


def _compare(folder: Path, source: str, to: str, options: argparse.Namespace) -> None:
    """One row. What is made the first time is kept, as a source for others."""
    seconds, copies, memory = [], [], 0
    for _ in range(options.rounds):
        made = folder / ("made" if (folder / to).exists() else to)
        raw.forget(folder / source)
        command = [sys.executable, "-m", "benchmarks.conversion", "--only", str(folder / source), str(made), to]
        command += ["--no-verify"] if options.no_verify else []
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        seconds.append(found["seconds"])
        memory = max(memory, found["memory"])
        if made.name == "made":
            _remove(made)
        copies.append(_copied(folder / source, folder / "copy"))
    ours, theirs = statistics.median(seconds), statistics.median(copies)
    print(f"| {source} to {to} | {ours:.2f} | {theirs:.2f} | {theirs / ours:.2f} | {memory / 2**20:.0f} |", flush=True)


def _copied(source: Path, target: Path) -> float:
    """Seconds of ``cp``, until the copy is durable."""
    raw.forget(source)
    started = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(target)], check=True)
    for file in [target] if target.is_file() else target.rglob("*"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    taken = time.perf_counter() - started
    _remove(target)
    return taken


def _remove(path: Path) -> None:
    path.unlink() if path.is_file() else shutil.rmtree(path)


def _measured(source: str, target: str, to: str, *, verify: bool) -> dict[str, float]:
    """One conversion in this process, after a small one that has loaded all there is to load."""
    with tempfile.TemporaryDirectory() as scratch:
        torch.save({"w": torch.zeros(10)}, Path(scratch) / "small.pt")
        holdfast.convert(Path(scratch) / "small.pt", Path(scratch) / "made", to=to)
    peak, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            peak[0] = max(peak[0], _resident())

    before = _resident()
    thread = threading.Thread(target=watch)
    thread.start()
    started = time.perf_counter()
    holdfast.convert(source, target, to=to, verify=verify)
    taken = time.perf_counter() - started
    ended.set()
    thread.join()
    return {"seconds": taken, "memory": peak[0] - before}


def _resident() -> int:
    """Bytes of memory that are this process's own."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))) * 1024


if __name__ == "__main__":
    main()
