"""Accelerate's ``Accelerator`` with rankless's checkpoints: a drop-in replacement for ``accelerate.Accelerator``.

``reader`` reads the folders of Accelerate and of transformers' ``Trainer``, and needs neither of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankless.accelerate.accelerator import Accelerator

__all__ = ["Accelerator"]

#: The modules of the public names.
_MODULES = {"Accelerator": "accelerator"}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: the readers in this package need no Accelerate."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
