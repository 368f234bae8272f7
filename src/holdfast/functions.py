"""The whole training state in one call: the default ``Checkpointer`` of a path."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch.distributed as dist

from holdfast import catalog
from holdfast.checkpointer import Checkpointer
from holdfast.events import OnEvent
from holdfast.handle import SaveHandle
from holdfast.parts.calls import finalize as finalize_parts
from holdfast.restored import Restored
from holdfast.retention import Retention
from holdfast.storage.local import local_path
from holdfast.survey import CheckpointInfo

#: The default instances, one for each path and what was set with it.
_defaults: dict[tuple[Path, int | str, float, dist.ProcessGroup | None], Checkpointer] = {}


def save_checkpoint(  # noqa: PLR0917 - the positional order that NxD's users know
    path: str | PathLike[str],
    tag: str,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    user_content: Any = None,
    *,
    dataloader: Any = None,
    stateful: Mapping[str, Any] | None = None,
    rank_content: Any = None,
    step: float | None = None,
    metrics: Mapping[str, float] | None = None,
    async_save: bool = False,
    staging: str = "eager",
    staging_check: str = "sampled",
    num_kept_ckpts: int | None = None,
    keep: Retention | int | None = None,
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
    rng: bool = True,
    on_event: OnEvent | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
) -> SaveHandle[CheckpointInfo]:
    """Save a training state into the folder ``path/tag``. Every rank of the process group calls it.

    Args:
        path: the run's folder, shared by all ranks; made if it is not there.
        tag: one path component, such as ``"step_1000"``.
        model: a module in any layout (plain, DDP, FSDP1, FSDP2, HSDP, tensor parallel, compiled) or a state dict. A
            list holds parts of one model (stages of a pipeline), a dict separate models, which get folders of
            their own: ``model/generator``.
        optimizer: a ``torch.optim.Optimizer`` (``ZeroRedundancyOptimizer`` too) or a state dict of one; a list or dict
            likewise. It is not stepped, and its state is kept at its own dtypes.
        scheduler: anything with ``state_dict`` and ``load_state_dict``, or a state dict; taken from rank 0.
        user_content: any tree of plain values, tensors and arrays; taken from rank 0.
        dataloader: an object with ``state_dict`` and ``load_state_dict``, each rank's own, such as torchdata's
            ``StatefulDataLoader``.
        stateful: a dict of such objects that are the same on all ranks, such as ``{"scaler": scaler}``.
        rank_content: the same as ``user_content``, but each rank's own is kept and given back to that rank.
        step: kept in the manifest, for people and for retention.
        metrics: numbers by name, likewise. Those that are not finite are kept as null.
        async_save: return as soon as the state is safe to change, and write in the background. The next save of the
            path, :func:`finalize` and the end of the process wait for it.
        staging: ``"eager"``: all is copied when the call returns, and everything passed may change at once.
            ``"overlapped"``: parameters and states of the ``torch.optim`` optimizers passed are copied beside the next
            forward and backward, and the next step of any optimizer waits until they are; all else is copied at the
            call. Not for training that changes parameters otherwise: by ``.data``, raw kernels, or a CUDA graph of
            the step.
        staging_check: proof that nothing else has changed them meanwhile: hashes of 12 chunks of 4 MiB, others each
            time (``"sampled"``), or of all, which takes as long as an eager copy (``"full"``). A difference fails that
            save with ``TornError``.
        num_kept_ckpts: keep the newest so many checkpoints of this run, and remove the older ones once this one is
            committed. Nothing is removed without it. This process continues the run that it has loaded from; one
            that has not loaded begins another, and leaves alone what others saved here, like what was renamed.
        keep: the same as a policy: ``KeepLast(5) | KeepEvery(1000) | KeepBest("val_loss", 3)``.
        overwrite: replace a checkpoint of this tag in one atomic step, instead of raising.
        max_shard_size: the most bytes of tensors in one file, as a number or as text such as ``"5GB"``.
        rng: keep the states of the random number generators, per rank.
        on_event: is told what happens: :class:`Progress`, :class:`Saved` or :class:`SaveFailed`.
        process_group: the ranks that save together; the default group, or this process alone where there is none.
        timeout: seconds that ranks wait for each other before all of them fail.

    Returns:
        A handle. The checkpoint is complete and durable when this returns, or with ``async_save`` when its ``wait()``
        does.

    Raises:
        TagExistsError: there is such a checkpoint already.
        UnstorableError: values that cannot be stored, each named by its path.
        ReplicaMismatchError: ranks hold different values of one tensor.
        DisagreementError: ranks were called with different arguments, or see different file systems.
        RankTimeoutError: a rank did not come in time.
        StorageError: the file system refused.

        Whatever is raised is raised on every rank, and checkpoints that were there before are as they were.
    """
    options: dict[str, Any] = {"rank_content": rank_content, "step": step, "metrics": metrics, "rng": rng}
    options |= {"dataloader": dataloader, "stateful": stateful}
    options |= {"async_save": async_save, "staging": staging, "staging_check": staging_check}
    options |= {"num_kept_ckpts": num_kept_ckpts, "keep": keep, "overwrite": overwrite, "on_event": on_event}
    checkpointer = _default(path, max_shard_size, process_group, timeout)
    for other in list(_defaults.values()):
        if other.path == checkpointer.path:
            other.finalize()
        checkpointer.runs |= other.runs
    return checkpointer.save(tag, model, optimizer, scheduler, user_content, **options)


def load_checkpoint(
    path: str | PathLike[str],
    tag: str | None = None,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    **options: Any,
) -> Any:
    """Load a checkpoint in place and return its user content, ``None`` when it has none.

    The arguments are those of :func:`restore`, which tells more about what was done.
    """
    return restore(path, tag, model, optimizer, scheduler, **options).user_content


def restore(
    path: str | PathLike[str],
    tag: str | None = None,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    dataloader: Any = None,
    stateful: Mapping[str, Any] | None = None,
    strict: bool = True,
    verify: bool = True,
    on_damage: str = "fall_back",
    exchange: str = "auto",
    rng: bool | None = None,
    map_dtype: bool = False,
    keys: Mapping[str, str] | None = None,
    on_event: OnEvent | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
) -> Restored:
    """Load a checkpoint in place, on any number of ranks and in any layout. Every rank of the process group calls it.

    Args:
        path: a run's folder, or one checkpoint of any format that holdfast reads.
        tag: which checkpoint of the run; the latest when left out.
        model: a module or a state dict, whose tensors are filled in place.
        optimizer: a ``torch.optim.Optimizer``; one that has never stepped gets its state without a step.
        scheduler: its ``load_state_dict`` is called.
        dataloader: its ``load_state_dict`` is called where as many ranks load as saved; else it is in ``missing``.
        stateful: the ``load_state_dict`` of each object is called.
        strict: names must match; with ``False`` what matches is loaded, and the rest is reported.
        verify: check every byte that is read against its CRC.
        on_damage: where the newest checkpoint is damaged and no tag was given, load the newest sound one with a warning
            (``"fall_back"``) or raise (``"raise"``).
        exchange: what several ranks need is read by one of them and passed on (``"always"``), or by each (``"never"``);
            ``"auto"`` does the first between hosts, the second where all ranks share a page cache.
        rng: put the states of random number generators back; by default when an optimizer is loaded.
        map_dtype: cast where dtypes differ, instead of raising.
        keys: where a checkpoint of another system has its parts, if they are not found by their names:
            ``{"model": "app.net", "optimizer": "app.opt"}``.
        on_event: is told what happens: :class:`Progress` and :class:`Loaded`.
        process_group: the ranks that load together.
        timeout: seconds that ranks wait for each other before all of them fail.

    Raises:
        NoCheckpointError: there is none; ``GoneError`` where others replace them faster than one can be loaded.
        MismatchError: names, shapes, dtypes or groups do not match. Nothing was changed.
        DamagedError: bytes are not what was saved; names the file and tensor.
        DisagreementError, RankTimeoutError, StorageError: as in :func:`save_checkpoint`.
    """
    options: dict[str, Any] = {
        "dataloader": dataloader,
        "stateful": stateful,
        "strict": strict,
        "verify": verify,
        "on_damage": on_damage,
        "exchange": exchange,
        "rng": rng,
        "map_dtype": map_dtype,
        "keys": keys,
        "on_event": on_event,
    }
    return _default(path, "5GB", process_group, timeout).restore(tag, model, optimizer, scheduler, **options)


def finalize() -> None:
    """Wait for all saves that are under way. When all have ended, raises what went wrong with the first that failed."""
    errors: list[Exception] = []
    for wait in [*(checkpointer.finalize for checkpointer in _defaults.values()), finalize_parts]:
        try:
            wait()
        except Exception as error:  # noqa: BLE001 - raised when all have ended
            errors.append(error)
    if errors:
        raise errors[0]


def has_checkpoint(path: str | PathLike[str]) -> bool:
    """Whether a run's folder has a complete checkpoint. Looks at this process's file system only.

    Raises ``StorageError`` where that does not tell.
    """
    return any(info.status == "complete" for info in catalog.every_checkpoint(local_path(path)))


def list_checkpoints(path: str | PathLike[str]) -> list[CheckpointInfo]:
    """The checkpoints in a run's folder, oldest first; those whose manifest is damaged before all others."""
    return catalog.list_checkpoints(local_path(path))


def _default(
    path: str | PathLike[str], max_shard_size: int | str, process_group: dist.ProcessGroup | None, timeout: float
) -> Checkpointer:
    key = (local_path(path), max_shard_size, timeout, process_group)
    if key not in _defaults:
        _defaults[key] = Checkpointer(path, max_shard_size=max_shard_size, process_group=process_group, timeout=timeout)
    return _defaults[key]
