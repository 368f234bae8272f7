"""The checkpoint interface of ColossalAI 0.5.0's Booster: change the import, and keep the training script.

Not affiliated with the owners of that name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankless.colossalai.booster import Booster, CheckpointIO

__all__ = ["Booster", "CheckpointIO"]

#: The modules of the public names.
_MODULES = {"Booster": "booster", "CheckpointIO": "booster"}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: a conversion needs no Booster."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
