"""Saves and loads of DeepSpeed engines: two calls instead of ``engine.save_checkpoint`` and ``engine.load_checkpoint``.

Checkpoints are rankless's own, and do not depend on the number of ranks or the stage of ZeRO. ``reader`` reads
DeepSpeed's checkpoints, ``writer`` writes universal ones; neither needs DeepSpeed. Not affiliated with the owners of
that name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankless.deepspeed.engine_calls import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]

#: The modules of the public names.
_MODULES = {"load_checkpoint": "engine_calls", "save_checkpoint": "engine_calls"}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: the readers in this package need no torch."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
