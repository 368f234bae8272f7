"""``python -m benchmarks.nxd``: converting ZeRO-1 states of NxD, against ``cp`` of the same bytes; and its memory.

Both end with what they wrote on the disk. The files to read are in the page cache for both, as far as they fit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

from benchmarks.measure import Contender, interleaved
from holdfast.conversion.names_hash import names_hash
from holdfast.conversion.planned import write
from holdfast.engine.runs import Box
from holdfast.engine.woven import Part, Place, row_major
from holdfast.formats.nxd import zero
from holdfast.formats.nxd.parts import Joined
from holdfast.formats.nxd.writing import rank_files
from holdfast.layout.files import TensorInfo

#: Rows and columns of each parameter; with two states and a master weight each, 4 bytes an element.
ROWS, COLUMNS = 8190, 4096

#: What one process does, and tells of: its memory when all is imported, and the most it took after that.
_CHILD = """
import resource, sys
from pathlib import Path
from holdfast.conversion.zero import ZeroRequest, convert_zero
print('ready', flush=True)
sys.stdin.readline()
status = lambda key: int(next(l for l in open('/proc/self/status') if l.startswith(key)).split()[1])
Path('/proc/self/clear_refs').write_text('5')
idle = status('VmRSS')
convert_zero(ZeroRequest(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
print((status('VmHWM') - idle) / 1024)
"""


def main() -> None:
    """Make states, convert them and copy them, several times each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nxd", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where to write; the disk that is measured")
    parser.add_argument("--plain", action="store_true", help="one file for each rank, not one for each tensor")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=options.folder))
    try:
        _measure(folder, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measure(folder: Path, options: argparse.Namespace) -> None:
    make(folder / "source", options.gigabytes, xser=not options.plain)
    nbytes = sum(file.stat().st_size for file in (folder / "source").rglob("*") if file.is_file())
    job = _Job(folder)
    contenders = {
        "holdfast, 2 to 3 ranks": Contender(job.run, job.prepare),
        "cp -r, and sync": Contender(partial(_copy, folder), partial(_clear, folder)),
    }
    found = interleaved(contenders, options.rounds).table("").figures
    copied = found["cp -r, and sync"].median
    for name, timing in found.items():
        speed = nbytes / timing.median / 1e9
        print(
            f"{name}: {timing.median:.2f} s ± {timing.spread:.0%}, {speed:.2f} GB/s, {copied / timing.median:.2f} x cp"
        )
    print(f"most memory above idle: {max(job.memory):.0f} MiB for {nbytes / 1e9:.2f} GB")


def make(folder: Path, gigabytes: float, *, xser: bool) -> None:
    """A checkpoint of 2 data-parallel ranks, with AdamW's states and master weights."""
    number = max(1, round(gigabytes * 1e9 / (3 * 4 * ROWS * COLUMNS)))
    data = folder.with_name("elements")
    data.write_bytes(torch.randn(ROWS, COLUMNS).numpy().tobytes())
    whole, step = _tensor(data, (ROWS, COLUMNS)), _tensor(data, ())
    root = {
        "state": {},
        "param_groups": [{"lr": 0.1, "params": list(range(number))}],
        zero.BASE: {
            pid: {"step": step, "exp_avg": _again(whole), "exp_avg_sq": _again(whole)} for pid in range(number)
        },
        zero.SHAPES: {pid: [ROWS, COLUMNS] for pid in range(number)},
        zero.MASTERS: {pid: _again(whole) for pid in range(number)},
    }
    for rank, part in enumerate(zero.divided(root, 2, folder)):
        name = f"optim/dp_rank_{rank:02}_tp_rank_00_pp_rank_00.pt"
        folder.mkdir(exist_ok=True)
        write(folder, rank_files(name, part, names_hash, xser=xser))
    data.unlink()


def _tensor(file: Path, shape: tuple[int, ...]) -> Joined:
    place = Place(file, 0, row_major(shape, 4))
    return Joined(TensorInfo("F32", shape), (Part(Box((0,) * len(shape), shape), lambda: place, (file, 0)),))


def _again(one: Joined) -> Joined:
    return Joined(one.info, one.parts)


class _Job:
    """A process that has imported all it needs before the clock runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self.memory: list[float] = []

    def prepare(self) -> None:
        command = [sys.executable, "-c", _CHILD, str(self._folder / "source"), str(self._folder / "out"), "3"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self._process.stdout is not None:
            self._process.stdout.readline()
        # Last, as for cp: memory that lies free for seconds goes back to the virtual machine's host.
        _clear(self._folder)

    def run(self) -> None:
        if self._process is not None:
            self.memory.append(float(self._process.communicate("go\n")[0]))


def _copy(folder: Path) -> None:
    subprocess.run(["cp", "-r", str(folder / "source"), str(folder / "out")], check=True)
    os.sync()


def _clear(folder: Path) -> None:
    shutil.rmtree(folder / "out", ignore_errors=True)
    os.sync()


if __name__ == "__main__":
    main()
