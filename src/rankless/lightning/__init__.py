"""Lightning's ``Trainer`` strategies, which save and load through rankless. They take three more arguments.

``checkpoint_format``: ``"native"`` writes rankless's format; ``"lightning"`` writes the files that Lightning itself
writes and reads, and gives them their final name only when they are complete. ``async_save``: native checkpoints are
written in the background; a checkpoint that they replace is removed only when they are durable. ``frozen``:
``"apart"`` puts parameters that are not trained into files of their own, which later checkpoints share.

``Trainer``, ``ModelCheckpoint`` and ``ckpt_path`` are used as usual. For a run in an object store there is a
:class:`ModelCheckpoint` here. A native ``.ckpt`` is a folder, which ``load_from_checkpoint`` of the
:class:`LightningModule` here opens; for a module of Lightning's own class there is the function
:func:`load_from_checkpoint`. Fabric's strategies are in :mod:`rankless.lightning.fabric`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankless.lightning.from_checkpoint import load_from_checkpoint
    from rankless.lightning.model_checkpoint import ModelCheckpoint
    from rankless.lightning.modules import LightningDataModule, LightningModule
    from rankless.lightning.trainer import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

__all__ = [
    "DDPStrategy",
    "FSDPStrategy",
    "LightningDataModule",
    "LightningModule",
    "ModelCheckpoint",
    "ModelParallelStrategy",
    "SingleDeviceStrategy",
    "load_from_checkpoint",
]

#: The modules of the names that are not in ``trainer``.
_MODULES = {
    "load_from_checkpoint": "from_checkpoint",
    "LightningDataModule": "modules",
    "LightningModule": "modules",
    "ModelCheckpoint": "model_checkpoint",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: the command in this package needs no Lightning."""
    if name in __all__:
        return getattr(import_module(f"rankless.lightning.{_MODULES.get(name, 'trainer')}"), name)
    raise AttributeError(f"module 'rankless.lightning' has no attribute {name!r}")
