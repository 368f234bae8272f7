"""Startup costs: imports and commands, each in a new interpreter."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.measure import Contender, Table, interleaved
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


def start(setting: Setting) -> Iterator[Table]:
    """Measure interpreters that import holdfast, and the command's ``--help``."""
    imports = {name: _interpreter("-c", code) for name, code in _IMPORTS.items()}
    yield interleaved(imports, setting.rounds).table("import")
    command = {"holdfast": _interpreter("-m", "holdfast", "--help"), "nothing": _interpreter("-c", "pass")}
    yield interleaved(command, setting.rounds).table("holdfast --help")


def _interpreter(*arguments: str) -> Contender:
    command = [str(Path(sys.executable)), *arguments]
    return Contender(partial(subprocess.run, command, check=True, stdout=subprocess.DEVNULL))
