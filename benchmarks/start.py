"""Startup costs: imports and commands, each in a new interpreter."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from benchmarks.measure import Contender, Table, time_interleaved
from benchmarks.setting import Setting

_IMPORTS = {
    "holdfast": "import holdfast",
    "holdfast, first use of save_checkpoint": "import holdfast; holdfast.save_checkpoint",
    "torch": "import torch",
    "PyTorch DCP": "import torch.distributed.checkpoint",
    "torch_checkpointing": "import torch_checkpointing",
    "safetensors": "import safetensors",
    "nothing": "pass",
}


#: The arguments of interpreters that start with holdfast alone.
STARTS = {
    "import holdfast": ("-c", "import holdfast"),
    "import of save_checkpoint": ("-c", "import holdfast; holdfast.save_checkpoint"),
    "holdfast --help": ("-m", "holdfast", "--help"),
}


def measure_start(setting: Setting) -> Iterator[Table]:
    """Measure interpreters that import holdfast, and the command's ``--help``."""
    imports = {name: build_interpreter("-c", code) for name, code in _IMPORTS.items()}
    yield time_interleaved(imports, setting.rounds).build_table("import")
    command = {"holdfast": build_interpreter("-m", "holdfast", "--help"), "nothing": build_interpreter("-c", "pass")}
    yield time_interleaved(command, setting.rounds).build_table("holdfast --help")


def build_interpreter(*arguments: str, environment: Mapping[str, str] | None = None) -> Contender:
    """Return the contender that starts an interpreter and waits for its end."""
    command = [str(Path(sys.executable)), *arguments]
    return Contender(partial(subprocess.run, command, check=True, stdout=subprocess.DEVNULL, env=environment))
