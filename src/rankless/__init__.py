"""rankless: checkpoints of distributed PyTorch training. Their bytes depend on the training state, not on the ranks."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankless._version import __version__
    from rankless.api import (
        add_metrics,
        finalize,
        has_checkpoint,
        list_aliases,
        list_checkpoints,
        load_checkpoint,
        remove_alias,
        restore,
        save_checkpoint,
        set_alias,
    )
    from rankless.checkpointer import Checkpointer
    from rankless.components.api import (
        load_lr_scheduler,
        load_model,
        load_optimizer,
        save_lr_scheduler,
        save_model,
        save_optimizer,
    )
    from rankless.components.merged_export import merge_adapters
    from rankless.conversion.convert import convert
    from rankless.conversion.hub_export import export_model
    from rankless.data.loader import ResumableLoader
    from rankless.data.preemption import Preemption, preemption
    from rankless.data.workers import shield_worker
    from rankless.errors import (
        CheckpointReplacedError,
        CorruptCheckpointError,
        DeviceError,
        EmptyRunError,
        FormatError,
        InvalidArgumentError,
        MismatchError,
        NoCheckpointError,
        OptimizerMismatchError,
        PeerFailedError,
        RankFailedError,
        RanklessError,
        RankMismatchError,
        RankTimeoutError,
        ReadBudgetError,
        ReplicaMismatchError,
        StateError,
        StorageError,
        TagExistsError,
        TornSnapshotError,
        UnsafeNameError,
        UnsafePickleError,
        UnsupportedTensorError,
        UnsupportedValueError,
    )
    from rankless.evaluation import iterate_new, iterate_pinned, pin, wait_for_new
    from rankless.inspection.checkpoint_statistics import CheckpointStatistics, compute_statistics
    from rankless.inspection.diff import CheckpointDiff, TensorDiff, ValueDiff, diff
    from rankless.inspection.kept_statistics import read_statistics
    from rankless.inspection.tensor_statistics import TensorStatistics
    from rankless.live_copy.api import copy_state
    from rankless.live_copy.result import CopyResult
    from rankless.liveness.watch import Watch, watch
    from rankless.load.result import RestoreResult
    from rankless.observe.events import DrainFailed, Event, Loaded, Progress, Saved, SavedLocally, SaveFailed
    from rankless.run.retention import KeepBest, KeepEvery, KeepLast, KeepNewerThan, KeepTags
    from rankless.run.scan import CheckpointInfo
    from rankless.run.tags import LATEST, best
    from rankless.run_directory import RunDirectory
    from rankless.save.handle import SaveHandle
    from rankless.save.host_drain import DrainResult, drain
    from rankless.storage.azure.store import Azure
    from rankless.storage.gcs.store import GCS
    from rankless.storage.s3.store import S3
    from rankless.tier.options import LocalTier
    from rankless.tracing import Trace, merge_traces, trace
    from rankless.view import Checkpoint, open  # noqa: A004 - the public name

#: The module of each public name. It is imported at the first use, so that importing rankless does not import torch.
_MODULES = {
    "Azure": "rankless.storage.azure.store",
    "Checkpoint": "rankless.view",
    "CheckpointDiff": "rankless.inspection.diff",
    "CheckpointInfo": "rankless.run.scan",
    "CheckpointReplacedError": "rankless.errors",
    "CheckpointStatistics": "rankless.inspection.checkpoint_statistics",
    "Checkpointer": "rankless.checkpointer",
    "RunDirectory": "rankless.run_directory",
    "CopyResult": "rankless.live_copy.result",
    "CorruptCheckpointError": "rankless.errors",
    "DeviceError": "rankless.errors",
    "EmptyRunError": "rankless.errors",
    "Event": "rankless.observe.events",
    "FormatError": "rankless.errors",
    "GCS": "rankless.storage.gcs.store",
    "RanklessError": "rankless.errors",
    "InvalidArgumentError": "rankless.errors",
    "KeepBest": "rankless.run.retention",
    "KeepEvery": "rankless.run.retention",
    "KeepLast": "rankless.run.retention",
    "KeepNewerThan": "rankless.run.retention",
    "KeepTags": "rankless.run.retention",
    "LATEST": "rankless.run.tags",
    "Loaded": "rankless.observe.events",
    "MismatchError": "rankless.errors",
    "NoCheckpointError": "rankless.errors",
    "OptimizerMismatchError": "rankless.errors",
    "PeerFailedError": "rankless.errors",
    "Preemption": "rankless.data.preemption",
    "Progress": "rankless.observe.events",
    "RankFailedError": "rankless.errors",
    "RankMismatchError": "rankless.errors",
    "RankTimeoutError": "rankless.errors",
    "ReadBudgetError": "rankless.errors",
    "ReplicaMismatchError": "rankless.errors",
    "RestoreResult": "rankless.load.result",
    "ResumableLoader": "rankless.data.loader",
    "S3": "rankless.storage.s3.store",
    "SaveFailed": "rankless.observe.events",
    "SaveHandle": "rankless.save.handle",
    "Saved": "rankless.observe.events",
    "SavedLocally": "rankless.observe.events",
    "DrainFailed": "rankless.observe.events",
    "DrainResult": "rankless.save.host_drain",
    "LocalTier": "rankless.tier.options",
    "StateError": "rankless.errors",
    "StorageError": "rankless.errors",
    "TagExistsError": "rankless.errors",
    "TensorDiff": "rankless.inspection.diff",
    "TensorStatistics": "rankless.inspection.tensor_statistics",
    "TornSnapshotError": "rankless.errors",
    "Trace": "rankless.tracing",
    "UnsafeNameError": "rankless.errors",
    "UnsafePickleError": "rankless.errors",
    "UnsupportedTensorError": "rankless.errors",
    "UnsupportedValueError": "rankless.errors",
    "ValueDiff": "rankless.inspection.diff",
    "Watch": "rankless.liveness.watch",
    "__version__": "rankless._version",
    "add_metrics": "rankless.api",
    "best": "rankless.run.tags",
    "compute_statistics": "rankless.inspection.checkpoint_statistics",
    "convert": "rankless.conversion.convert",
    "copy_state": "rankless.live_copy.api",
    "diff": "rankless.inspection.diff",
    "drain": "rankless.save.host_drain",
    "finalize": "rankless.api",
    "has_checkpoint": "rankless.api",
    "iterate_new": "rankless.evaluation",
    "iterate_pinned": "rankless.evaluation",
    "list_aliases": "rankless.api",
    "list_checkpoints": "rankless.api",
    "load_checkpoint": "rankless.api",
    "load_lr_scheduler": "rankless.components.api",
    "load_model": "rankless.components.api",
    "load_optimizer": "rankless.components.api",
    "export_model": "rankless.conversion.hub_export",
    "merge_adapters": "rankless.components.merged_export",
    "merge_traces": "rankless.tracing",
    "open": "rankless.view",
    "pin": "rankless.evaluation",
    "preemption": "rankless.data.preemption",
    "read_statistics": "rankless.inspection.kept_statistics",
    "remove_alias": "rankless.api",
    "restore": "rankless.api",
    "save_checkpoint": "rankless.api",
    "save_lr_scheduler": "rankless.components.api",
    "save_model": "rankless.components.api",
    "save_optimizer": "rankless.components.api",
    "set_alias": "rankless.api",
    "shield_worker": "rankless.data.workers",
    "trace": "rankless.tracing",
    "wait_for_new": "rankless.evaluation",
    "watch": "rankless.liveness.watch",
}

__all__ = [
    "GCS",
    "LATEST",
    "S3",
    "Azure",
    "Checkpoint",
    "CheckpointDiff",
    "CheckpointInfo",
    "CheckpointReplacedError",
    "CheckpointStatistics",
    "Checkpointer",
    "CopyResult",
    "CorruptCheckpointError",
    "DeviceError",
    "DrainFailed",
    "DrainResult",
    "EmptyRunError",
    "Event",
    "FormatError",
    "InvalidArgumentError",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepNewerThan",
    "KeepTags",
    "Loaded",
    "LocalTier",
    "MismatchError",
    "NoCheckpointError",
    "OptimizerMismatchError",
    "PeerFailedError",
    "Preemption",
    "Progress",
    "RankFailedError",
    "RankMismatchError",
    "RankTimeoutError",
    "RanklessError",
    "ReadBudgetError",
    "ReplicaMismatchError",
    "RestoreResult",
    "ResumableLoader",
    "RunDirectory",
    "SaveFailed",
    "SaveHandle",
    "Saved",
    "SavedLocally",
    "StateError",
    "StorageError",
    "TagExistsError",
    "TensorDiff",
    "TensorStatistics",
    "TornSnapshotError",
    "Trace",
    "UnsafeNameError",
    "UnsafePickleError",
    "UnsupportedTensorError",
    "UnsupportedValueError",
    "ValueDiff",
    "Watch",
    "__version__",
    "add_metrics",
    "best",
    "compute_statistics",
    "convert",
    "copy_state",
    "diff",
    "drain",
    "export_model",
    "finalize",
    "has_checkpoint",
    "iterate_new",
    "iterate_pinned",
    "list_aliases",
    "list_checkpoints",
    "load_checkpoint",
    "load_lr_scheduler",
    "load_model",
    "load_optimizer",
    "merge_adapters",
    "merge_traces",
    "open",
    "pin",
    "preemption",
    "read_statistics",
    "remove_alias",
    "restore",
    "save_checkpoint",
    "save_lr_scheduler",
    "save_model",
    "save_optimizer",
    "set_alias",
    "shield_worker",
    "trace",
    "wait_for_new",
    "watch",
]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'rankless' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
