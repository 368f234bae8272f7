"""The hooks that get a checkpoint's dict. State that no hook gets is moved between files and tensors directly.

A ``Trainer`` strategy asks it on each rank, at each save and load. A wrong answer would keep the state from a hook of
the user.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.hooks import CheckpointHooks
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

#: The hooks of modules, callbacks and precision plugins that get the dict.
ON_LOAD, ON_SAVE = "on_load_checkpoint", "on_save_checkpoint"


class NotRead:
    """The place of a state in a dict that no hook gets. It has no entries, so that reading it fails."""


def is_hook_overridden(hook: str, module: LightningModule | None) -> bool:
    """Return whether the module, or a callback or plugin of its trainer, overrides a hook; true without a trainer."""
    trainer = None if module is None else module._trainer  # noqa: SLF001 - the property raises without a trainer
    if module is None or trainer is None:
        return True
    return (
        is_overridden(hook, module, parent=CheckpointHooks)
        or is_overridden(hook, trainer.precision_plugin, parent=Precision)
        or any(is_overridden(hook, callback, parent=Callback) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    )
