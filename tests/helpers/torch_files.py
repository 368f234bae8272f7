"""Files of ``torch.save`` in both of its formats, and zip archives of any entries."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

LEGACY_OPTIONS = {"_use_new_zipfile_serialization": False}


SAVE_OPTIONS = [pytest.param({}, id="zip"), pytest.param(LEGACY_OPTIONS, id="legacy")]


def save_tree(path: Path, tree: Any, **options: Any) -> Path:
    torch.save(tree, path / "some.pt", **options)
    return path / "some.pt"


def write_archive(path: Path, entries: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return path


def make_net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
