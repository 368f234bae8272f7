"""Lightning's tests with rankless's strategies and modules in the place of Lightning's.

``--rankless native`` or ``--rankless lightning`` is the format that the strategies write. ``--rankless off`` replaces
nothing: these are the results that count as passed by Lightning itself.

A native checkpoint is a folder. So that a test can look into it as it looks into Lightning's file, ``torch.load`` and
Lightning's function for that read such a folder, and ``os.path.isfile`` is true of it. What a user calls instead is
``rankless.open``. What Lightning itself calls is not replaced.
"""

# ruff: noqa: PLC0415 - nothing of Lightning is imported if nothing is replaced
from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy", "ModelParallelStrategy")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that says what the strategies write."""
    parser.addoption("--rankless", choices=["off", "native", "lightning"], default="off")


def pytest_configure(config: pytest.Config) -> None:
    """Replace the strategies, before a test is imported."""
    if (kind := config.getoption("--rankless")) == "off":
        return
    _replace_strategies(kind)
    if kind == "native":
        _replace_modules()
        _open_folders_as_files()


def _replace_strategies(kind: str) -> None:
    import lightning.pytorch.strategies as theirs
    import lightning.pytorch.trainer.connectors.accelerator_connector  # noqa: F401 - which has names to replace

    import rankless.lightning.trainer as ours

    before = ours._TrainerStrategy.__init__

    def create(self: Any, *args: Any, checkpoint_format: str = kind, **options: Any) -> None:
        before(self, *args, checkpoint_format=checkpoint_format, **options)

    ours._TrainerStrategy.__init__ = create  # type: ignore[method-assign]
    for name in _STRATEGIES:
        own, original = getattr(ours, name), getattr(theirs, name)
        _replace_everywhere(name, original, own)
        for entry in theirs.StrategyRegistry.values():
            if entry["strategy"] is original:
                entry["strategy"] = own


def _replace_modules() -> None:
    import lightning.pytorch as theirs

    import rankless.lightning as ours

    for name in ("LightningModule", "LightningDataModule"):
        _replace_everywhere(name, getattr(theirs, name), getattr(ours, name))


def _replace_everywhere(name: str, original: object, own: object) -> None:
    """Replace a name in each module of Lightning that has imported it, except where it is defined."""
    for module in list(sys.modules.values()):
        where = getattr(module, "__name__", "")
        is_theirs = where.startswith("lightning.pytorch") and where != original.__module__
        if is_theirs and module.__dict__.get(name) is original:
            setattr(module, name, own)


def _open_folders_as_files() -> None:
    import torch
    from lightning.fabric.utilities import cloud_io

    import rankless
    from rankless.formats.native import is_native

    is_file, load_file, load_path = os.path.isfile, torch.load, cloud_io._load

    def is_folder(path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and Path(path).is_dir() and is_native(Path(path))

    def reading_folders(load: Callable[..., Any]) -> Callable[..., Any]:
        def load_any(file: Any, *args: Any, **options: Any) -> Any:
            if not is_folder(file):
                return load(file, *args, **options)
            with tempfile.TemporaryDirectory() as folder:
                rankless.convert(Path(file).resolve(), f"{folder}/one.ckpt", to="lightning")
                return load_file(f"{folder}/one.ckpt", *args, **options)

        return load_any

    os.path.isfile = lambda path: is_folder(path) or is_file(path)
    setattr(torch, "load", reading_folders(load_file))  # noqa: B010 - its signature is another one
    cloud_io._load = reading_folders(load_path)
