"""The files of the guide, as they are printed: the training and the two batch scripts."""

from __future__ import annotations

import re
from pathlib import Path

_GUIDE = Path(__file__).parents[2] / "docs/guides/slurm.md"
_BLOCK = re.compile(r"^```(?:python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

#: The names of the files, in the order of the guide.
TRAINING, TORCHRUN, SRUN = "train.py", "train.sbatch", "srun.sbatch"


def write_files(folder: Path) -> None:
    """Write the files of the guide into a folder, from which jobs are submitted."""
    blocks = _BLOCK.findall(_GUIDE.read_text(encoding="utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip((TRAINING, TORCHRUN, SRUN), blocks, strict=False):
        (folder / name).write_text(text, encoding="utf-8")
