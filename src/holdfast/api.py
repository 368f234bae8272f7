"""The whole training state in one call: the default ``Checkpointer`` of a path."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch.distributed as dist

from holdfast.checkpointer import Checkpointer
from holdfast.load.result import RestoreResult
from holdfast.observe.events import OnEvent
from holdfast.run import catalog
from holdfast.run.corruption import CorruptRecord
from holdfast.run.retention import Retention
from holdfast.run.scan import CheckpointInfo
from holdfast.save.background import background_saves
from holdfast.save.handle import SaveHandle
from holdfast.storage.posix import local_path

#: What a default instance is made with: a path, the size of shards, the timeout and the process group.
_Setting = tuple[Path, int | str, float, dist.ProcessGroup | None]

#: Most default instances that are kept: each one holds a plan and a process group.
_MOST_DEFAULTS = 16


class _DefaultCheckpointers:
    """The default instances: those that were used last. They have loaded and saved the same runs."""

    def __init__(self) -> None:
        self._checkpointers: dict[_Setting, Checkpointer] = {}
        self._runs: set[str] = set()
        self._corrupt: set[CorruptRecord] = set()

    def get(self, setting: _Setting) -> Checkpointer:
        """Return the instance with these settings."""
        checkpointer = self._checkpointers.pop(setting, None) or self._make(*setting)
        self._checkpointers[setting] = checkpointer  # now it is the one that was used last
        if len(self._checkpointers) > _MOST_DEFAULTS:
            del self._checkpointers[next(iter(self._checkpointers))]
        return checkpointer

    def _make(self, path: Path, size: int | str, timeout: float, group: dist.ProcessGroup | None) -> Checkpointer:
        checkpointer = Checkpointer(path, max_shard_size=size, process_group=group, timeout=timeout)
        checkpointer.runs, checkpointer.corrupt = self._runs, self._corrupt
        return checkpointer

    def clear(self) -> None:
        """Forget all of them, and what they have loaded."""
        self._checkpointers, self._runs, self._corrupt = {}, set(), set()


_defaults = _DefaultCheckpointers()


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
    per_rank_content: Any = None,
    step: float | None = None,
    metrics: Mapping[str, float] | None = None,
    async_save: bool = False,
    staging: str = "eager",
    staging_check: str = "sampled",
    replica_check: str = "sampled",
    num_kept_ckpts: int | None = None,
    keep: Retention | int | None = None,
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
    rng: bool = True,
    state_dict_hooks: bool = True,
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
        per_rank_content: the same as ``user_content``, but each rank's own is kept and given back to that rank.
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
            save with ``TornSnapshotError``.
        replica_check: proof, before anything is written, that ranks hold the same values of what several of them hold:
            hashes of 4 KiB of every tensor, others each time, and of 64 MiB beside that (``"sampled"``; of all at the
            first save), or of all at each save (``"full"``). It is a part of the time that the call takes;
            :class:`Saved` tells which.
        num_kept_ckpts: keep the newest so many checkpoints of this run, and remove the older ones once this one is
            committed. Nothing is removed without it. This process continues the run that it has loaded from; one
            that has not loaded begins another, and leaves alone what others saved here, like what was renamed.
        keep: the same as a policy: ``KeepLast(5) | KeepEvery(1000) | KeepBest("val_loss", 3)``.
        overwrite: replace a checkpoint of this tag in one atomic step, instead of raising.
        max_shard_size: the most bytes of tensors in one file, as a number or as text such as ``"5GB"``.
        rng: keep the states of the random number generators, per rank.
        state_dict_hooks: store tensors under the names that the model's ``state_dict`` hooks give them, also where
            these split a parameter into several; the optimizer's states are stored alike. ``False``: parameters,
            buffers and extra state under the names that the modules have for them, and nothing that hooks make. A load
            takes either.
        on_event: is told what happens: :class:`Progress`, :class:`Saved` or :class:`SaveFailed`.
        process_group: the ranks that save together; the default group, or this process alone where there is none.
        timeout: seconds that ranks wait for each other before all of them fail.

    Returns:
        A handle. The checkpoint is complete and durable when this returns, or with ``async_save`` when its ``wait()``
        does.

    Raises:
        TagExistsError: there is such a checkpoint already. One that a load of this process found corrupt, and fell
            back from, makes way: it gets a hidden name.
        UnsupportedValueError: values that cannot be stored, each named by its path.
        StateError: objects that contradict each other, or hooks that make up tensors: see ``state_dict_hooks``.
        ReplicaMismatchError: ranks hold different values of one tensor.
        RankMismatchError: ranks were called with different arguments, or see different file systems.
        RankTimeoutError: a rank did not come in time.
        StorageError: the file system refused.

        Whatever is raised is raised on every rank, and checkpoints that were there before are as they were.
    """
    options: dict[str, Any] = {"per_rank_content": per_rank_content, "step": step, "metrics": metrics, "rng": rng}
    options |= {"state_dict_hooks": state_dict_hooks}
    options |= {"dataloader": dataloader, "stateful": stateful}
    options |= {"async_save": async_save, "staging": staging, "staging_check": staging_check}
    options |= {"replica_check": replica_check}
    options |= {"num_kept_ckpts": num_kept_ckpts, "keep": keep, "overwrite": overwrite, "on_event": on_event}
    checkpointer = _defaults.get((local_path(path), max_shard_size, timeout, process_group))
    return checkpointer.save(tag, model, optimizer, scheduler, user_content, **options)


def load_checkpoint(
    path: str | PathLike[str],
    tag: str | None = None,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
    **options: Any,
) -> Any:
    """Load a checkpoint in place and return its user content, ``None`` when it has none.

    The arguments are those of :func:`restore`, which tells more about what was done, and gives ``per_rank_content`` back:
    if the checkpoint has that and training is resumed, this function warns.
    """
    return _defaults.get((local_path(path), "5GB", timeout, process_group)).load(
        tag, model, optimizer, scheduler, **options
    )


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
    allow_missing: Collection[str] = (),
    verify: bool = True,
    on_corruption: str = "fall_back",
    share_reads: str = "auto",
    rng: bool | None = None,
    cast_dtype: bool = False,
    keys: Mapping[str, str] | None = None,
    on_event: OnEvent | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
) -> RestoreResult:
    """Load a checkpoint in place, on any number of ranks and in any layout. Every rank of the process group calls it.

    What is asked for and cannot be given back is an error before anything is changed; if it may be missing (``strict``,
    ``allow_missing``) it is a warning, and in ``missing`` of the result.

    Args:
        path: a run's folder, or one checkpoint of any format that holdfast reads. A folder that holds checkpoints of
            holdfast is a run's folder, whatever else is in it.
        tag: which checkpoint of the run; the latest when left out.
        model: a module or a state dict, whose tensors are filled in place.
        optimizer: a ``torch.optim.Optimizer``; one that has never stepped gets its state without a step.
        scheduler: its ``load_state_dict`` is called.
        dataloader: its ``load_state_dict`` is called if as many ranks load as saved. Another number needs one that has
            ``load_state_dicts``, as :class:`ResumableLoader` has.
        stateful: the ``load_state_dict`` of each object is called.
        strict: names must match; with ``False`` what matches is loaded, and the rest is left as it is and reported. An
            optimizer's parameters are matched by name: those without a saved state are left without.
        allow_missing: the parts that may be missing though names are strict: ``"dataloader"``, ``"rng"``,
            ``"scheduler"``, ``"stateful"``, ``"model"``, ``"optimizer"``. What is given back without being asked for,
            ``per_rank_content``, may be missing anyway, with a warning if training is resumed.
        verify: check every byte that is read against its CRC.
        on_corruption: where the newest checkpoint is damaged and no tag was given, load the newest sound one with a warning
            (``"fall_back"``) or raise (``"raise"``).
        share_reads: what several ranks need is read by one of them and passed on (``"always"``), or by each (``"never"``);
            ``"auto"`` does the first between hosts, the second where all ranks share a page cache.
        rng: put the states of random number generators back; by default when an optimizer is loaded, and then a
            checkpoint may lack them. Each rank gets its own; another number of ranks derives new ones from them, other
            ones for each rank.
        cast_dtype: cast where floating point dtypes differ, instead of raising. Nothing else is cast: not complex
            numbers to real ones, nor floating point to integers.
        keys: where a checkpoint of another system has its parts, if they are not found by their names:
            ``{"model": "app.net", "optimizer": "app.opt"}``.
        on_event: is told what happens: :class:`Progress` and :class:`Loaded`.
        process_group: the ranks that load together.
        timeout: seconds that ranks wait for each other before all of them fail.

    Raises:
        NoCheckpointError: there is none; ``CheckpointReplacedError`` where others replace them faster than one can be loaded.
        MismatchError: names, shapes, dtypes or groups do not match. Nothing was changed.
        CorruptCheckpointError: bytes are not what was saved; names the file and tensor.
        RankMismatchError, RankTimeoutError, StorageError: as in :func:`save_checkpoint`.
    """
    options: dict[str, Any] = {
        "dataloader": dataloader,
        "stateful": stateful,
        "strict": strict,
        "allow_missing": allow_missing,
        "verify": verify,
        "on_corruption": on_corruption,
        "share_reads": share_reads,
        "rng": rng,
        "cast_dtype": cast_dtype,
        "keys": keys,
        "on_event": on_event,
    }
    checkpointer = _defaults.get((local_path(path), "5GB", timeout, process_group))
    return checkpointer.restore(tag, model, optimizer, scheduler, **options)


def finalize() -> None:
    """Wait for all saves that are under way. When all have ended, raises what went wrong with the first that failed."""
    background_saves.finalize()


def has_checkpoint(path: str | PathLike[str]) -> bool:
    """Whether a run's folder has a complete checkpoint. Looks at this process's file system only.

    Raises ``StorageError`` where that does not tell.
    """
    return any(info.status == "complete" for info in catalog.list_checkpoints_strictly(local_path(path)))


def list_checkpoints(path: str | PathLike[str]) -> list[CheckpointInfo]:
    """The checkpoints in a run's folder, oldest first; those whose manifest is damaged before all others."""
    return catalog.list_checkpoints(local_path(path))
