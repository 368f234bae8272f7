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
    "rankless": "import rankless",
    "rankless, first use of save_checkpoint": "import rankless; rankless.save_checkpoint",
    "torch": "import torch",
    "PyTorch DCP": "import torch.distributed.checkpoint",
    "torch_checkpointing": "import torch_checkpointing",
    "safetensors": "import safetensors",
    "nothing": "pass",
}


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


def build_interpreter(*arguments: str, environment: Mapping[str, str] | None = None) -> Contender:
    """Return the contender that starts an interpreter and waits for its end."""
    command = [str(Path(sys.executable)), *arguments]
    return Contender(partial(subprocess.run, command, check=True, stdout=subprocess.DEVNULL, env=environment))
