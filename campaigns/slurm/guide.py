"""The files of the guide, as they are printed: the training and the two batch scripts."""

from __future__ import annotations

import re
from pathlib import Path

_GUIDE = Path(__file__).parents[2] / "docs/guides/slurm.md"
_TRAINING = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SCRIPT = re.compile(r"^```sh\n(#!/bin/bash\n.*?)^```$", re.MULTILINE | re.DOTALL)

#: The names of the files, in the order of the guide.
TRAINING, TORCHRUN, SRUN = "train.py", "train.sbatch", "srun.sbatch"


def write_files(folder: Path) -> None:
    """Write the files of the guide into a folder, from which jobs are submitted."""
    guide = _GUIDE.read_text(encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    blocks = [*_TRAINING.findall(guide), *_SCRIPT.findall(guide)]
    for name, text in zip((TRAINING, TORCHRUN, SRUN), blocks, strict=True):
        (folder / name).write_text(text, encoding="utf-8")
