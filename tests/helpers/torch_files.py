"""Files of ``torch.save`` in both of its formats, and zip archives of any entries."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

LEGACY = {"_use_new_zipfile_serialization": False}


KINDS = [pytest.param({}, id="zip"), pytest.param(LEGACY, id="legacy")]


def saved(path: Path, tree: Any, **options: Any) -> Path:
    torch.save(tree, path / "some.pt", **options)
    return path / "some.pt"


def stored(path: Path, entries: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return path


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
