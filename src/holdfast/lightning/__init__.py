"""Lightning's strategies, saving and loading through holdfast. Same arguments as Lightning's, and two more.

``checkpoint_format``: ``"native"`` writes holdfast's format; ``"lightning"`` the files that Lightning itself writes and
reads, under their final name only when they are complete. ``async_save``: native ones are written in the background;
what they replace is removed only when they are durable.

``Trainer``, ``ModelCheckpoint`` and ``ckpt_path`` are used as ever. A native ``.ckpt`` is a folder, which
:func:`load_from_checkpoint` opens for ``LightningModule.load_from_checkpoint``. Fabric's strategies are in
:mod:`holdfast.lightning.fabric`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.lightning.from_checkpoint import load_from_checkpoint
    from holdfast.lightning.trainer import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

__all__ = ["DDPStrategy", "FSDPStrategy", "ModelParallelStrategy", "SingleDeviceStrategy", "load_from_checkpoint"]


def __getattr__(name: str) -> object:
    """Looked up when first used: the command in this package needs no Lightning."""
    if name in __all__:
        room = "from_checkpoint" if name == "load_from_checkpoint" else "trainer"
        return getattr(import_module(f"holdfast.lightning.{room}"), name)
    raise AttributeError(f"module 'holdfast.lightning' has no attribute {name!r}")
