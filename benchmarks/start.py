"""Startup costs: imports, commands and first saves, each in a new interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from benchmarks.first_save import LIBRARIES, LIMITS
from benchmarks.measure import Contender, SelfTimed, Table, time_interleaved
from benchmarks.setting import Setting

_IMPORTS = {
    "rankless": "import rankless",
    "rankless, first use of save_checkpoint": "import rankless; rankless.save_checkpoint",
    "torch": "import torch",
    "PyTorch DCP": "import torch.distributed.checkpoint",
    "torch_checkpointing": "import torch_checkpointing",
    "safetensors": "import safetensors",
    "nothing": "pass",
}


#: Later saves of a process, of which the median counts.
_LATER_SAVES = 5

#: The arguments of interpreters that start with rankless alone.
STARTS = {
    "import rankless": ("-c", "import rankless"),
    "import of save_checkpoint": ("-c", "import rankless; rankless.save_checkpoint"),
    "rankless --help": ("-m", "rankless", "--help"),
}


def measure_start(setting: Setting) -> Iterator[Table]:
    """Measure interpreters that import rankless, and the command's ``--help``."""
    imports = {name: build_interpreter("-c", code) for name, code in _IMPORTS.items()}
    yield time_interleaved(imports, setting.rounds).build_table("import")
    command = {"rankless": build_interpreter("-m", "rankless", "--help"), "nothing": build_interpreter("-c", "pass")}
    yield time_interleaved(command, setting.rounds).build_table("rankless --help")
    places = {"memory disk": Path("/dev/shm"), "disk": setting.folder}  # noqa: S108 - a tmpfs is what is measured
    first = {library: _build_process(library, places["memory disk"], "first", 0) for library in LIBRARIES}
    yield time_interleaved(first, setting.rounds).build_table("import, first save and load of 33 kB, processor time")
    for name, folder in places.items():
        later = {library: _build_process(library, folder, "later", _LATER_SAVES) for library in LIBRARIES | LIMITS}
        title = f"later save of 33 kB, durable, {name}"
        yield time_interleaved(later, setting.rounds).build_table(title, tuple(LIMITS))


def _build_process(library: str, root: Path, figure: str, saves: int) -> Contender:
    """Return the contender that runs :mod:`benchmarks.first_save` in a new folder, and reports one of its figures."""

    def run() -> SelfTimed:
        with tempfile.TemporaryDirectory(dir=root) as folder:
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.first_save", library, folder, str(saves)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
        return SelfTimed(json.loads(done.stdout.splitlines()[-1])[figure])

    return Contender(run)


def build_interpreter(*arguments: str, environment: Mapping[str, str] | None = None) -> Contender:
    """Return the contender that starts an interpreter and waits for its end."""
    command = [str(Path(sys.executable)), *arguments]
    return Contender(partial(subprocess.run, command, check=True, stdout=subprocess.DEVNULL, env=environment))
