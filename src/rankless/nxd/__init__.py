"""NxD's checkpoint functions, for training scripts that use NxD: only the import changes.

``import rankless.nxd as nxd``. Saves are rankless checkpoints, which load on any number of ranks in any layout;
``rankless convert --to nxd`` converts them to NxD's format. Checkpoints that NxD has written are loaded directly.
Nothing here needs torch_xla.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankless.nxd.model_sharding import sharding_of
    from rankless.nxd.nxd_calls import finalize_checkpoint, has_checkpoint, load_checkpoint, save_checkpoint

__all__ = ["finalize_checkpoint", "has_checkpoint", "load_checkpoint", "save_checkpoint", "sharding_of"]


def __getattr__(name: str) -> object:
    """Import a name when it is first used: readers of NxD's format are in this package and need no torch."""
    if name in __all__:
        module = "model_sharding" if name == "sharding_of" else "nxd_calls"
        return getattr(import_module(f"rankless.nxd.{module}"), name)
    raise AttributeError(f"module 'rankless.nxd' has no attribute {name!r}")
