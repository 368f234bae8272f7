"""holdfast: checkpoints of distributed PyTorch training whose bytes depend only on the state, never on the ranks."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast._version import __version__
    from holdfast.checkpointer import Checkpointer
    from holdfast.conversion.convert import convert
    from holdfast.data.loader import ResumableLoader
    from holdfast.data.workers import shield_worker
    from holdfast.events import Event, Loaded, Progress, Saved, SaveFailed
    from holdfast.functions import finalize, has_checkpoint, list_checkpoints, load_checkpoint, restore, save_checkpoint
    from holdfast.handle import SaveHandle
    from holdfast.parts.calls import (
        load_lr_scheduler,
        load_model,
        load_optimizer,
        save_lr_scheduler,
        save_model,
        save_optimizer,
    )
    from holdfast.restored import Restored
    from holdfast.retention import KeepBest, KeepEvery, KeepLast, KeepNewerThan, KeepTags
    from holdfast.stopping import Preemption, preemption
    from holdfast.survey import CheckpointInfo
    from holdfast.view import Checkpoint, open  # noqa: A004 - the public name

#: Where each public name lives; looked up when first used, so that importing holdfast imports no torch.
_HOMES = {
    "Checkpoint": "holdfast.view",
    "CheckpointInfo": "holdfast.survey",
    "Checkpointer": "holdfast.checkpointer",
    "Event": "holdfast.events",
    "KeepBest": "holdfast.retention",
    "KeepEvery": "holdfast.retention",
    "KeepLast": "holdfast.retention",
    "KeepNewerThan": "holdfast.retention",
    "KeepTags": "holdfast.retention",
    "Loaded": "holdfast.events",
    "Preemption": "holdfast.stopping",
    "Progress": "holdfast.events",
    "Restored": "holdfast.restored",
    "ResumableLoader": "holdfast.data.loader",
    "SaveFailed": "holdfast.events",
    "SaveHandle": "holdfast.handle",
    "__version__": "holdfast._version",
    "Saved": "holdfast.events",
    "convert": "holdfast.conversion.convert",
    "finalize": "holdfast.functions",
    "has_checkpoint": "holdfast.functions",
    "list_checkpoints": "holdfast.functions",
    "load_checkpoint": "holdfast.functions",
    "load_lr_scheduler": "holdfast.parts.calls",
    "load_model": "holdfast.parts.calls",
    "load_optimizer": "holdfast.parts.calls",
    "open": "holdfast.view",
    "preemption": "holdfast.stopping",
    "restore": "holdfast.functions",
    "save_checkpoint": "holdfast.functions",
    "save_lr_scheduler": "holdfast.parts.calls",
    "save_model": "holdfast.parts.calls",
    "save_optimizer": "holdfast.parts.calls",
    "shield_worker": "holdfast.data.workers",
}

__all__ = [
    "Checkpoint",
    "CheckpointInfo",
    "Checkpointer",
    "Event",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepNewerThan",
    "KeepTags",
    "Loaded",
    "Preemption",
    "Progress",
    "Restored",
    "ResumableLoader",
    "SaveFailed",
    "SaveHandle",
    "Saved",
    "__version__",
    "convert",
    "finalize",
    "has_checkpoint",
    "list_checkpoints",
    "load_checkpoint",
    "load_lr_scheduler",
    "load_model",
    "load_optimizer",
    "open",
    "preemption",
    "restore",
    "save_checkpoint",
    "save_lr_scheduler",
    "save_model",
    "save_optimizer",
    "shield_worker",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
