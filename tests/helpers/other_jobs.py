"""Saves of another job into a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import rankless
from rankless import RunDirectory


def save_as_other_job(
    path: Path, tag: str, value: float, *, group: dist.ProcessGroup | None = None, **options: Any
) -> None:
    """As another job does, which resumes the run. A rank passes a group that has no other rank."""
    run = RunDirectory(path, process_group=group)
    run.history.runs = {info.run for info in rankless.list_checkpoints(path)}
    run.save(tag, {"w": torch.full((64,), value)}, user_content=value, **options)
