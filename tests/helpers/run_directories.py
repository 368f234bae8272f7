"""A run directory with small checkpoints, and what lies in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

import rankless
from rankless.ondisk.hidden_names import HiddenName
from rankless.run import records_folder

DEAD = HiddenName("step_9", "0" * 16, "1" * 16, "partial")


def save_step(path: Path, step: int, **options: Any) -> None:
    rankless.save_checkpoint(path, f"step_{step}", {"w": torch.full((4,), float(step))}, step=step, **options)


def train_as_job(path: Path | str, last: int, tag: str | None = None) -> None:
    """Resume as a job of its own, from a tag or the latest checkpoint, and save each step up to the last."""
    run = rankless.RunDirectory(path)
    first = 0
    if rankless.has_checkpoint(path):
        restored = run.restore(tag, {"w": torch.zeros(2)}, resume=True)
        first = int(restored.step or 0)
    for step in range(first + 1, last + 1):
        run.save(f"step_{step}", {"w": torch.full((2,), float(step))}, step=step)


def list_tags(path: Path) -> list[str]:
    return [info.tag for info in rankless.list_checkpoints(path)]


def list_names(path: Path) -> list[str]:
    """Return the names in a run directory, without those of its journal and its history, which stay."""
    kept = {records_folder.JOURNAL, records_folder.OLDER_JOURNAL, records_folder.FOLDER}
    return sorted(entry.name for entry in path.iterdir() if entry.name not in kept)


def list_hidden_names(path: Path) -> list[str]:
    return [name for name in list_names(path) if name.startswith(".")]


def make_older(folder: Path, seconds: float) -> None:
    """Make a folder and all in it so many seconds older."""
    for path in (*folder.rglob("*"), folder):
        now = path.stat().st_mtime
        os.utime(path, (now - seconds, now - seconds))


def leave_draft(path: Path, run: str, state: str = "partial") -> Path:
    folder = path / DEAD._replace(run=run, state=state).name
    (folder / "model").mkdir(parents=True)
    (folder / "model/model.safetensors").write_bytes(b"half")
    return folder
