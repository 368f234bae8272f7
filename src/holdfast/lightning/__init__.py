"""Lightning's ``Trainer`` strategies, which save and load through holdfast. They take three more arguments.

``checkpoint_format``: ``"native"`` writes holdfast's format; ``"lightning"`` writes the files that Lightning itself
writes and reads, and gives them their final name only when they are complete. ``async_save``: native checkpoints are
written in the background; a checkpoint that they replace is removed only when they are durable. ``frozen``:
``"apart"`` puts parameters that are not trained into files of their own, which later checkpoints share.

``Trainer``, ``ModelCheckpoint`` and ``ckpt_path`` are used as usual. A native ``.ckpt`` is a folder, which
:func:`load_from_checkpoint` opens in place of ``LightningModule.load_from_checkpoint``. Fabric's strategies are in
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
    """Import a public name when it is first used: the command in this package needs no Lightning."""
    if name in __all__:
        module_name = "from_checkpoint" if name == "load_from_checkpoint" else "trainer"
        return getattr(import_module(f"holdfast.lightning.{module_name}"), name)
    raise AttributeError(f"module 'holdfast.lightning' has no attribute {name!r}")
