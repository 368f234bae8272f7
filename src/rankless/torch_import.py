"""The import of torch, which is not a dependency: reading needs none, and a training brings its own.

Code that works without torch calls it where it needs a tensor; ``import rankless`` explains errors with it. Importing
this module must not import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from rankless.errors import RanklessError, TorchMissingError, TorchVersionError

#: The oldest version of torch that rankless works with.
OLDEST = (2, 7)


def import_torch(purpose: str) -> Any:
    """Return the module ``torch``. Code that also works without it calls this where it first needs a tensor.

    Raises ``TorchMissingError``, which names the ``purpose``, or ``TorchVersionError``.
    """
    with explain_imports(purpose):
        return check_version(import_module("torch"))


@contextmanager
def explain_imports(purpose: str) -> Iterator[None]:
    """Name the package to install if an import in the ``with`` block fails because torch is missing or too old.

    Raises ``TorchMissingError``, which names the ``purpose``, or ``TorchVersionError``.
    """
    try:
        yield
    except ImportError as error:
        if isinstance(error, RanklessError):
            raise
        if error.name == "torch" and isinstance(error, ModuleNotFoundError):
            raise TorchMissingError(
                f"{purpose} needs PyTorch, which is not installed: run pip install torch", name="torch"
            ) from None
        if "torch" in sys.modules:
            check_version(sys.modules["torch"])
        raise


def check_version(torch: Any) -> Any:
    """Return the module ``torch``. Raises ``TorchVersionError`` if it is too old."""
    version = str(torch.__version__)
    if _parse_release(version) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise TorchVersionError(
            f"rankless needs torch {oldest} or newer; torch {version} is installed: run pip install 'torch>={oldest}'"
        )
    return torch


def _parse_release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
