"""holdfast: checkpoints of distributed PyTorch training. Their bytes depend on the training state, not on the ranks."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast._version import __version__
    from holdfast.api import (
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
    from holdfast.checkpointer import Checkpointer
    from holdfast.components.api import (
        load_lr_scheduler,
        load_model,
        load_optimizer,
        save_lr_scheduler,
        save_model,
        save_optimizer,
    )
    from holdfast.components.merged_export import merge_adapters
    from holdfast.conversion.convert import convert
    from holdfast.conversion.hub_export import export_model
    from holdfast.data.loader import ResumableLoader
    from holdfast.data.preemption import Preemption, preemption
    from holdfast.data.workers import shield_worker
    from holdfast.errors import (
        CheckpointReplacedError,
        CorruptCheckpointError,
        DeviceError,
        EmptyRunError,
        FormatError,
        HoldfastError,
        InvalidArgumentError,
        MismatchError,
        NoCheckpointError,
        OptimizerMismatchError,
        PeerFailedError,
        RankFailedError,
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
    from holdfast.evaluation import iterate_new, iterate_pinned, pin, wait_for_new
    from holdfast.inspection.checkpoint_statistics import CheckpointStatistics, compute_statistics
    from holdfast.inspection.diff import CheckpointDiff, TensorDiff, ValueDiff, diff
    from holdfast.inspection.kept_statistics import read_statistics
    from holdfast.inspection.tensor_statistics import TensorStatistics
    from holdfast.live_copy.api import copy_state
    from holdfast.live_copy.result import CopyResult
    from holdfast.liveness.watch import Watch, watch
    from holdfast.load.result import RestoreResult
    from holdfast.observe.events import DrainFailed, Event, Loaded, Progress, Saved, SavedLocally, SaveFailed
    from holdfast.run.retention import KeepBest, KeepEvery, KeepLast, KeepNewerThan, KeepTags
    from holdfast.run.scan import CheckpointInfo
    from holdfast.run.tags import LATEST, best
    from holdfast.run_directory import RunDirectory
    from holdfast.save.handle import SaveHandle
    from holdfast.save.host_drain import DrainResult, drain
    from holdfast.storage.azure.store import Azure
    from holdfast.storage.gcs.store import GCS
    from holdfast.storage.s3.store import S3
    from holdfast.tier.options import LocalTier
    from holdfast.tracing import Trace, merge_traces, trace
    from holdfast.view import Checkpoint, open  # noqa: A004 - the public name

#: The module of each public name. It is imported at the first use, so that importing holdfast does not import torch.
_MODULES = {
    "Azure": "holdfast.storage.azure.store",
    "Checkpoint": "holdfast.view",
    "CheckpointDiff": "holdfast.inspection.diff",
    "CheckpointInfo": "holdfast.run.scan",
    "CheckpointReplacedError": "holdfast.errors",
    "CheckpointStatistics": "holdfast.inspection.checkpoint_statistics",
    "Checkpointer": "holdfast.checkpointer",
    "RunDirectory": "holdfast.run_directory",
    "CopyResult": "holdfast.live_copy.result",
    "CorruptCheckpointError": "holdfast.errors",
    "DeviceError": "holdfast.errors",
    "EmptyRunError": "holdfast.errors",
    "Event": "holdfast.observe.events",
    "FormatError": "holdfast.errors",
    "GCS": "holdfast.storage.gcs.store",
    "HoldfastError": "holdfast.errors",
    "InvalidArgumentError": "holdfast.errors",
    "KeepBest": "holdfast.run.retention",
    "KeepEvery": "holdfast.run.retention",
    "KeepLast": "holdfast.run.retention",
    "KeepNewerThan": "holdfast.run.retention",
    "KeepTags": "holdfast.run.retention",
    "LATEST": "holdfast.run.tags",
    "Loaded": "holdfast.observe.events",
    "MismatchError": "holdfast.errors",
    "NoCheckpointError": "holdfast.errors",
    "OptimizerMismatchError": "holdfast.errors",
    "PeerFailedError": "holdfast.errors",
    "Preemption": "holdfast.data.preemption",
    "Progress": "holdfast.observe.events",
    "RankFailedError": "holdfast.errors",
    "RankMismatchError": "holdfast.errors",
    "RankTimeoutError": "holdfast.errors",
    "ReadBudgetError": "holdfast.errors",
    "ReplicaMismatchError": "holdfast.errors",
    "RestoreResult": "holdfast.load.result",
    "ResumableLoader": "holdfast.data.loader",
    "S3": "holdfast.storage.s3.store",
    "SaveFailed": "holdfast.observe.events",
    "SaveHandle": "holdfast.save.handle",
    "Saved": "holdfast.observe.events",
    "SavedLocally": "holdfast.observe.events",
    "DrainFailed": "holdfast.observe.events",
    "DrainResult": "holdfast.save.host_drain",
    "LocalTier": "holdfast.tier.options",
    "StateError": "holdfast.errors",
    "StorageError": "holdfast.errors",
    "TagExistsError": "holdfast.errors",
    "TensorDiff": "holdfast.inspection.diff",
    "TensorStatistics": "holdfast.inspection.tensor_statistics",
    "TornSnapshotError": "holdfast.errors",
    "Trace": "holdfast.tracing",
    "UnsafeNameError": "holdfast.errors",
    "UnsafePickleError": "holdfast.errors",
    "UnsupportedTensorError": "holdfast.errors",
    "UnsupportedValueError": "holdfast.errors",
    "ValueDiff": "holdfast.inspection.diff",
    "Watch": "holdfast.liveness.watch",
    "__version__": "holdfast._version",
    "add_metrics": "holdfast.api",
    "best": "holdfast.run.tags",
    "compute_statistics": "holdfast.inspection.checkpoint_statistics",
    "convert": "holdfast.conversion.convert",
    "copy_state": "holdfast.live_copy.api",
    "diff": "holdfast.inspection.diff",
    "drain": "holdfast.save.host_drain",
    "finalize": "holdfast.api",
    "has_checkpoint": "holdfast.api",
    "iterate_new": "holdfast.evaluation",
    "iterate_pinned": "holdfast.evaluation",
    "list_aliases": "holdfast.api",
    "list_checkpoints": "holdfast.api",
    "load_checkpoint": "holdfast.api",
    "load_lr_scheduler": "holdfast.components.api",
    "load_model": "holdfast.components.api",
    "load_optimizer": "holdfast.components.api",
    "export_model": "holdfast.conversion.hub_export",
    "merge_adapters": "holdfast.components.merged_export",
    "merge_traces": "holdfast.tracing",
    "open": "holdfast.view",
    "pin": "holdfast.evaluation",
    "preemption": "holdfast.data.preemption",
    "read_statistics": "holdfast.inspection.kept_statistics",
    "remove_alias": "holdfast.api",
    "restore": "holdfast.api",
    "save_checkpoint": "holdfast.api",
    "save_lr_scheduler": "holdfast.components.api",
    "save_model": "holdfast.components.api",
    "save_optimizer": "holdfast.components.api",
    "set_alias": "holdfast.api",
    "shield_worker": "holdfast.data.workers",
    "trace": "holdfast.tracing",
    "wait_for_new": "holdfast.evaluation",
    "watch": "holdfast.liveness.watch",
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
    "HoldfastError",
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
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
