"""Tests of PyTorch's DCP, or of a framework that saves with it, on the storage of :mod:`rankless.dcp`.

``--rankless native`` puts rankless's writer and reader in the place of DCP's; ``--rankless off`` replaces nothing.
Tests that need GPUs run on the CPU with gloo: in a copy, replace ``cuda`` and ``nccl`` by ``cpu`` and ``gloo``.
"""

# ruff: noqa: PLC0415 - rankless is only imported if something is replaced
from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.testing._internal.common_distributed as common
import torch.testing._internal.distributed._tensor.common_dtensor as dtensors

_GPU_MARKS = ("skip_if_lt_x_gpu", "requires_nccl", "requires_accelerator_dist_backend", "requires_nccl_version")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that says whether the storage is replaced."""
    parser.addoption("--rankless", choices=["off", "native"], default="off")


def pytest_configure(config: pytest.Config) -> None:
    """Let tests run without a GPU, and replace the storage, before a test is imported."""
    for module in (common, dtensors):
        for name in _GPU_MARKS:
            if hasattr(module, name):
                setattr(module, name, _keep_test)
    setattr(common.MultiProcessTestCase, "_spawn_processes", _fork_processes)  # noqa: B010 - it is a method to mypy
    torch.cuda.set_device = lambda *_: None
    if config.getoption("--rankless") == "native":
        _replace_storage()


def _keep_test(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda test: test


def _fork_processes(case: Any) -> None:
    """Start the ranks of a test as forks: they have what is replaced here."""
    case._start_processes(torch.multiprocessing.get_context("fork").Process)


def _replace_storage() -> None:
    from torch.distributed.checkpoint import filesystem

    import rankless.dcp
    from rankless.dcp import storage_writer

    original = types.SimpleNamespace(**vars(filesystem))
    storage_writer.filesystem = original  # type: ignore[assignment]  # which writes with torch's own class
    for name in ("FileSystemWriter", "FileSystemReader"):
        own, theirs = getattr(rankless.dcp, name), getattr(filesystem, name)
        for module in list(sys.modules.values()):
            where = getattr(module, "__name__", "")
            if where.startswith("torch.distributed.checkpoint") and module.__dict__.get(name) is theirs:
                setattr(module, name, own)
