"""The machine and the command of a run: the heading of the tables."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.setting import Setting


def describe_machine(setting: Setting, cases: Sequence[str]) -> Iterator[str]:
    """Return lines of Markdown, which are equal for all runs on the same machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    file_system = _find_file_system(setting.folder)
    yield f"- {os.cpu_count()} cores ({_read_processor()}), {memory:.0f} GiB of memory, {file_system}"
    yield f"- {platform.system()} {platform.release()}, Python {platform.python_version()}, torch {torch.__version__}"
    options = ("--rounds", str(setting.rounds), "--gigabytes", f"{setting.nbytes / 1e9:g}")
    yield f"- `{' '.join(('python -m benchmarks', *cases, *options))}`; tables of other cases are from runs before"


def _read_processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def _find_file_system(folder: Path) -> str:
    """Return the kind of a directory's file system: that of its longest mount point."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    above = [(len(point), kind) for point, kind in mounts if folder.resolve().is_relative_to(point)]
    return max(above)[1]
