"""Functions that save and load a whole training state, each with the default ``RunDirectory`` of its path."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Unpack

import torch.distributed as dist

from rankless.load.result import RestoreResult
from rankless.observe.events import OnEvent
from rankless.ondisk.files import SHARD_SIZE
from rankless.run import aliases, catalog
from rankless.run.aliases import delete_alias
from rankless.run.corruption import CorruptRecord
from rankless.run.retention import Retention
from rankless.run.scan import CheckpointInfo
from rankless.run.tags import TagArgument, check_tag_argument, give_alias, give_metrics
from rankless.run_directory import RestoreOptions, RunDirectory
from rankless.save.background import background_saves
from rankless.save.handle import SaveHandle
from rankless.save.metrics import read_metrics
from rankless.save.request import FULL_EVERY
from rankless.storage.object_path import parse_location
from rankless.tier.options import LocalTier, as_local_tier

#: The options of a local tier, or its folder, or none.
_Local = LocalTier | str | PathLike[str] | None

#: The settings of a default run directory: path, maximum shard size, timeout in seconds, process group, local tier.
_Settings = tuple[Path, int | str, float, dist.ProcessGroup | None, LocalTier | None]

#: The largest number of default run directories that are kept: each one holds a plan and a process group.
_MAX_DEFAULTS = 16


class _DefaultDirectories:
    """The most recently used default run directories.

    They share the record of the runs that this process has saved or loaded, and of the checkpoints it found corrupt.
    Those of one path share the base of incremental saves.
    """

    def __init__(self) -> None:
        self._directories: dict[_Settings, RunDirectory] = {}
        self._runs: set[str] = set()
        self._corrupt: set[CorruptRecord] = set()

    def get_directory(self, settings: _Settings) -> RunDirectory:
        """Return the run directory with these settings, and create it if there is none."""
        try:
            directory = self._directories.pop(settings, None) or self._create_directory(*settings)
        except TypeError:  # a setting is of a type without a hash: the checks of the directory name it
            return self._create_directory(*settings)
        self._directories[settings] = directory  # now it is the most recently used one
        if len(self._directories) > _MAX_DEFAULTS:
            del self._directories[next(iter(self._directories))]
        return directory

    def _create_directory(
        self, path: Path, max_shard_size: int | str, timeout: float, group: dist.ProcessGroup | None, local: _Local
    ) -> RunDirectory:
        directory = RunDirectory(path, max_shard_size=max_shard_size, process_group=group, timeout=timeout, local=local)
        directory.runs, directory.corrupt = self._runs, self._corrupt
        for other in self._directories.values():
            if other.path == directory.path:
                directory.base = other.base
        return directory

    def drain(self) -> None:
        """Write what only a local tier has into its run directory."""
        for directory in self._directories.values():
            directory.drain()

    def clear(self) -> None:
        """Forget all run directories, and the runs and corrupt checkpoints that they have recorded."""
        self._directories, self._runs, self._corrupt = {}, set(), set()


_defaults = _DefaultDirectories()


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
    metrics: Mapping[str, Any] | None = None,
    async_save: bool = False,
    staging: str = "eager",
    staging_check: str = "sampled",
    replica_check: str = "sampled",
    incremental: bool = True,
    keep_full_every: int = FULL_EVERY,
    frozen: str = "together",
    num_kept_ckpts: int | None = None,
    keep: Retention | int | None = None,
    overwrite: bool = False,
    max_shard_size: int | str = SHARD_SIZE,
    rng: bool = True,
    state_dict_hooks: bool = True,
    adapter_only: bool = False,
    files: Mapping[str, bytes] | None = None,
    stats: bool = False,
    on_event: OnEvent | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
    local: LocalTier | str | PathLike[str] | None = None,
) -> SaveHandle[CheckpointInfo]:
    """Save a training state as the checkpoint ``path/tag``. Every rank of the process group must call it.

    Args:
        path: The run directory, on a file system that all ranks share. It is created if it does not exist.
        tag: The checkpoint's name: one path component, such as ``"step_1000"``.
        model: A module in any layout (plain, DDP, FSDP1, FSDP2, HSDP, tensor parallel, compiled) or a state dict. Pass
            a list for the parts of one model, such as pipeline stages. Pass a dict for separate models; each gets a
            directory of its own, such as ``model/generator``.
        optimizer: A ``torch.optim.Optimizer`` (also a ``ZeroRedundancyOptimizer``), the state dict of one, or a list
            or dict of them. It is not stepped, and its states keep their own dtypes.
        scheduler: An object with ``state_dict`` and ``load_state_dict``, or a state dict. Saved from rank 0.
        user_content: A tree of plain values, tensors and arrays. Saved from rank 0.
        dataloader: An object with ``state_dict`` and ``load_state_dict``, such as torchdata's ``StatefulDataLoader``.
            Each rank's state is saved.
        stateful: A dict of objects with ``state_dict`` and ``load_state_dict`` whose state is the same on all ranks,
            such as ``{"scaler": scaler}``.
        per_rank_content: A tree of values like ``user_content``, but saved from each rank and returned to that rank.
        step: The training step, stored in the manifest and used by retention policies.
        metrics: Numbers or tensors of one element by name, stored in the manifest and used by retention policies.
            Values that are not finite are stored as null.
        async_save: Return as soon as the training state may change again, and write in the background. The next save
            to the same path, :func:`finalize` and the end of the process wait for the background save.
        staging: When an asynchronous save copies the state. ``"eager"``: everything is copied before the call
            returns. ``"overlapped"``: the parameters and states of the ``torch.optim`` optimizers passed are copied
            during the next forward and backward pass, and the next step of any optimizer waits for these copies;
            everything else is copied before the call returns. Do not use ``"overlapped"`` if parameters change
            outside of optimizer steps: through ``.data``, raw kernels, or a CUDA graph of the step.
        staging_check: How much of an overlapped copy is checked for changes made while it was copied.
            ``"sampled"``: hashes of 12 chunks of 4 MiB, different ones in each save. ``"full"``: hashes of everything,
            which takes as long as an eager copy. A difference fails that save with ``TornSnapshotError``.
        replica_check: How much of the tensors that several ranks hold is checked to be equal before anything is
            written. ``"sampled"``: hashes of 4 KiB of every tensor and of 64 MiB in addition, different ones in each
            save, and of everything in the first save. ``"full"``: hashes of everything in each save. The check takes
            part of the time for which the call blocks; :class:`Saved` reports how long.
        incremental: Do not write bytes that the checkpoint saved or loaded before has already. A file without changes
            becomes a hard link of the earlier one, which is made read-only. On file systems that can share parts of
            files (XFS, Btrfs), unchanged parts of other files are shared, too. The checkpoint is complete by itself
            and has the same bytes as one that was written in full. Every byte that is not written was hashed for this
            save. With ``staging="overlapped"`` frozen parameters are hashed after the call has returned; if one has
            changed meanwhile, the save fails with ``TornSnapshotError``.
        keep_full_every: Of this many checkpoints of a run directory, one is written in full.
        frozen: ``"apart"`` puts parameters with ``requires_grad=False`` into files of their own, so that these do not
            change while others are trained. All ranks must agree about which parameters are frozen.
        num_kept_ckpts: The number of newest checkpoints of this run to keep; older ones are removed after this one is
            committed. If it is ``None``, nothing is removed. Only checkpoints of the same run are removed. A process
            continues the run that it loaded from; if it loaded nothing, it starts a new run. Renamed or copied
            checkpoints are never removed.
        keep: A number of checkpoints, or a policy such as ``KeepLast(5) | KeepEvery(1000) | KeepBest("val_loss", 3)``.
            Pass this or ``num_kept_ckpts``.
        overwrite: Replace a checkpoint with this tag in one atomic step instead of raising ``TagExistsError``.
        max_shard_size: The maximum size of the tensors in one file, as a number of bytes or as text such as
            ``"1GB"``.
        rng: Whether to save the states of the random number generators of each rank.
        state_dict_hooks: Store tensors under the names that the model's ``state_dict`` hooks give them, also if a hook
            splits a parameter into several tensors; optimizer states are stored likewise. If ``False``, parameters,
            buffers and extra state are stored under the names that the modules have for them, without anything that
            hooks add. Checkpoints of both kinds can be loaded.
        adapter_only: Of a model with PEFT adapters save only the adapters, not the base model. They are in the folder
            ``adapter``, as PEFT stores them. Without ``adapter_only`` the checkpoint has this folder in addition to
            ``model``, which contains all weights.
        files: Small files to store in the checkpoint's directory, as bytes by name, such as a tokenizer's. Rank 0
            writes them; all ranks pass the same names.
        stats: After the commit, let rank 0 compute the statistics of all tensors in the background and keep them with
            the checkpoint: :func:`read_statistics` returns them. It reads the checkpoint once for this, and pauses
            while a save is in progress. :func:`finalize` waits for it; the end of the process, for 5 seconds. A
            failure is a warning.
        on_event: A function that is called with each event: :class:`Progress`, :class:`Saved` or :class:`SaveFailed`.
        process_group: The ranks that save together. By default the default process group, or this process alone if
            there is none.
        timeout: The number of seconds that ranks wait for each other before all of them fail.
        local: The local tier: a folder of each host, such as ``"/dev/shm/job"``, or a :class:`LocalTier`.

    Returns:
        A handle of the save. The checkpoint is complete and durable when this function returns, or, with
        ``async_save``, when the handle's ``wait()`` returns. With a local tier, that holds for the checkpoints that are
        drained; all others are complete in the tier then.

    Every rank raises the same error. Existing checkpoints are left unchanged then.

    Raises:
        TagExistsError: A checkpoint with this tag exists. A corrupt one that an earlier load in this process had to
            skip is hidden instead, and does not raise.
        UnsupportedValueError: Some values cannot be stored; the message names each by its path.
        InvalidArgumentError: ``adapter_only`` was passed, and the model has no PEFT adapters.
        StateError: The objects contradict each other, or ``state_dict`` hooks add tensors of their own (see
            ``state_dict_hooks``); or, with ``adapter_only``, PEFT computes what it stores from shards.
        ReplicaMismatchError: Ranks hold different values of one tensor.
        RankMismatchError: Ranks were called with different arguments, or do not share a file system.
        RankTimeoutError: A rank did not arrive in time.
        StorageError: The file system reported an error.
    """
    directory = _defaults.get_directory(
        (parse_location(path), max_shard_size, timeout, process_group, as_local_tier(local))
    )
    return directory.save(
        tag,
        model,
        optimizer,
        scheduler,
        user_content,
        dataloader=dataloader,
        stateful=stateful,
        per_rank_content=per_rank_content,
        step=step,
        metrics=metrics,
        overwrite=overwrite,
        num_kept_ckpts=num_kept_ckpts,
        keep=keep,
        async_save=async_save,
        staging=staging,
        staging_check=staging_check,
        replica_check=replica_check,
        incremental=incremental,
        keep_full_every=keep_full_every,
        frozen=frozen,
        rng=rng,
        state_dict_hooks=state_dict_hooks,
        adapter_only=adapter_only,
        files=files,
        stats=stats,
        on_event=on_event,
    )


def load_checkpoint(
    path: str | PathLike[str],
    tag: TagArgument = None,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
    local: LocalTier | str | PathLike[str] | None = None,
    **options: Unpack[RestoreOptions],
) -> Any:
    """Return ``restore(...).user_content``: load a checkpoint in place and return its user content.

    The function takes the arguments of :func:`restore`, which also returns ``per_rank_content`` and a report of what
    was loaded.

    Args:
        path: A run directory, or one checkpoint of any format that rankless reads.
        tag: The checkpoint of the run to load: its tag or an alias, :func:`rankless.best`, or :data:`rankless.LATEST`,
            which is the default.
        model: A module or a state dict whose tensors are filled in place.
        optimizer: A ``torch.optim.Optimizer`` to restore.
        scheduler: An object whose ``load_state_dict`` is called.
        process_group: The ranks that load together.
        timeout: The number of seconds that ranks wait for each other before all of them fail.
        local: As in :func:`restore`.
        options: The other arguments of :func:`restore`.

    Returns:
        The user content, or ``None`` if the checkpoint has none. If the checkpoint has ``per_rank_content`` and an
        optimizer or data loader is passed, the function warns, because it does not return that.

    Raises:
        NoCheckpointError: As in :func:`restore`, like all other errors.
    """
    settings = (parse_location(path), SHARD_SIZE, timeout, process_group, as_local_tier(local))
    return _defaults.get_directory(settings).load(tag, model, optimizer, scheduler, **options)


def restore(
    path: str | PathLike[str],
    tag: TagArgument = None,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    dataloader: Any = None,
    stateful: Mapping[str, Any] | None = None,
    strict: bool | Mapping[str, bool] = True,
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
    local: LocalTier | str | PathLike[str] | None = None,
) -> RestoreResult:
    """Load a checkpoint in place, on any number of ranks and in any layout. Every rank of the group must call it.

    Everything that is requested must be in the checkpoint, or an error is raised before anything is changed. Things
    that may be missing (see ``strict`` and ``allow_missing``) cause a warning instead, and are listed in ``missing`` of
    the result.

    Args:
        path: A run directory, or one checkpoint of any format that rankless reads. A directory that contains rankless
            checkpoints is treated as a run directory, whatever else it contains.
        tag: The checkpoint of the run to load: its tag or an alias, :func:`rankless.best`, or :data:`rankless.LATEST`,
            which is the default.
        model: A module or a state dict whose tensors are filled in place.
        optimizer: A ``torch.optim.Optimizer``. If it has never stepped, its state is created without a step.
        scheduler: An object whose ``load_state_dict`` is called.
        dataloader: An object whose ``load_state_dict`` is called if as many ranks load as saved. For another number of
            ranks the object needs a method ``load_state_dicts``, as :class:`ResumableLoader` has.
        stateful: A dict of objects whose ``load_state_dict`` is called.
        strict: Whether names must match. If ``False``, matching names are loaded, and all others are left unchanged
            and reported. An optimizer's parameters are matched by name; those without a saved state get no state. A
            dict such as ``{"model": False}`` is for single components; all others are strict.
        allow_missing: The components that may be missing although ``strict`` is set: ``"dataloader"``, ``"rng"``,
            ``"scheduler"``, ``"stateful"``, ``"model"``, ``"optimizer"``, or one of several, such as
            ``"stateful/scaler"`` or ``"model/generator"``. ``per_rank_content`` may always be missing, with a warning
            if training is resumed.
        verify: Whether to check every byte that is read against its CRC.
        on_corruption: What to do if the newest checkpoint is corrupt and no tag was given. ``"fall_back"``: load the
            newest intact checkpoint, with a warning. ``"raise"``: raise ``CorruptCheckpointError``.
        share_reads: How to read bytes that several ranks need. ``"always"``: one rank reads them and sends them to the
            others. ``"never"``: each rank reads them. ``"auto"``: ``"always"`` if the ranks are on several hosts, else
            ``"never"``, because ranks of one host share a page cache.
        rng: Whether to restore the states of the random number generators. By default they are restored if an
            optimizer is loaded, and may then be missing in the checkpoint. Each rank gets its own states back; if the
            number of ranks has changed, each rank derives new states from the saved ones, different on each rank.
        cast_dtype: Whether to cast between floating point dtypes instead of raising if they differ. No other dtypes
            are cast, for example complex to real or floating point to integer.
        keys: The keys at which a checkpoint of another system has its components, if rankless does not find them by
            their names: ``{"model": "app.net", "optimizer": "app.opt"}``.
        on_event: A function that is called with each event: :class:`Progress` and :class:`Loaded`.
        process_group: The ranks that load together. By default the default process group, or this process alone if
            there is none.
        timeout: The number of seconds that ranks wait for each other before all of them fail.
        local: The local tier of the run, as in :func:`save_checkpoint`: it may have a newer checkpoint than the run
            directory. That is loaded from the memory of the hosts, and written into the run directory in the
            background.

    Returns:
        The user content and the per-rank content of the checkpoint, and a report of what was loaded.

    Raises:
        NoCheckpointError: There is no checkpoint.
        CheckpointReplacedError: Other processes replace checkpoints faster than one can be loaded.
        MismatchError: Names, shapes, dtypes or param groups do not match. Nothing was changed.
        CorruptCheckpointError: Stored bytes differ from what was saved; the message names the file and the tensor.
        RankMismatchError: As in :func:`save_checkpoint`.
        RankTimeoutError: As in :func:`save_checkpoint`.
        StorageError: As in :func:`save_checkpoint`.
    """
    directory = _defaults.get_directory(
        (parse_location(path), SHARD_SIZE, timeout, process_group, as_local_tier(local))
    )
    return directory.restore(
        tag,
        model,
        optimizer,
        scheduler,
        dataloader=dataloader,
        stateful=stateful,
        strict=strict,
        allow_missing=allow_missing,
        verify=verify,
        rng=rng,
        cast_dtype=cast_dtype,
        share_reads=share_reads,
        on_corruption=on_corruption,
        keys=keys,
        on_event=on_event,
    )


def finalize() -> None:
    """Wait for all background saves of this process, and for statistics that they compute.

    With a local tier, all ranks must call it: what only the tier has is written into the run directory.

    Raises:
        Exception: The error of the first save that failed, after all saves have ended. Each error is raised once: if
            several saves failed, the next call raises the next error.
    """
    from rankless.inspection.background_statistics import background_statistics  # noqa: PLC0415 - saves need none

    background_saves.finalize()
    _defaults.drain()
    background_statistics.wait()


def has_checkpoint(path: str | PathLike[str]) -> bool:
    """Return whether a run directory has a complete checkpoint. Only this process's file system is checked.

    Args:
        path: The run directory.

    Returns:
        ``True`` if there is at least one complete checkpoint.

    Raises:
        StorageError: The file system reported an error, so the answer is unknown.
    """
    return any(info.status == "complete" for info in catalog.list_checkpoints_strictly(parse_location(path)))


def list_checkpoints(path: str | PathLike[str]) -> list[CheckpointInfo]:
    """Return the checkpoints in a run directory, oldest first.

    Args:
        path: The run directory.

    Returns:
        One entry for each checkpoint. Checkpoints that cannot be read, for example because their manifest is corrupt,
        come before all others.
    """
    return catalog.list_checkpoints(parse_location(path))


def set_alias(path: str | PathLike[str], alias: str, tag: TagArgument = None) -> CheckpointInfo:
    """Give a checkpoint a further name, under which it can be loaded and opened. Call it on one rank.

    Retention does not remove a checkpoint that has an alias. If another process replaces the checkpoint, loads by the
    alias fail until it is set again. A checkpoint whose tag is the alias is preferred to it.

    Args:
        path: The run directory.
        alias: The name, such as ``"production"``. If it is an alias already, it then means the other checkpoint.
        tag: The checkpoint, as in :func:`restore`; the latest by default.

    Returns:
        The checkpoint.

    Raises:
        NoCheckpointError: There is no such checkpoint.
        TagExistsError: There is a checkpoint whose tag is the alias.
        InvalidArgumentError: The alias cannot be the name of a checkpoint.
        StorageError: The file system reported an error.
    """
    return give_alias(parse_location(path), alias, check_tag_argument(tag))


def add_metrics(path: str | PathLike[str], tag: TagArgument, metrics: Mapping[str, Any]) -> CheckpointInfo:
    """Add metrics to a finished checkpoint, such as the score of an evaluator. Call it on one rank.

    They count like those of the save: for :func:`best`, for :class:`KeepBest`, and in lists. The checkpoint itself does
    not change: each added metric is a hidden file next to it, which a copy of the checkpoint's directory alone lacks.

    Args:
        path: The run directory.
        tag: The checkpoint, as in :func:`restore`; ``None`` or ``LATEST`` for the latest.
        metrics: Numbers, or tensors of one element, by name. A metric that was added before gets the new value.

    Returns:
        The checkpoint, with all its metrics.

    Raises:
        NoCheckpointError: There is no such checkpoint, or it was removed meanwhile.
        InvalidArgumentError: A metric is no number, or the save has stored a metric of this name.
        StorageError: The file system reported an error.
    """
    return give_metrics(parse_location(path), check_tag_argument(tag), read_metrics(metrics))


def remove_alias(path: str | PathLike[str], alias: str) -> None:
    """Remove an alias. The checkpoint stays. Call it on one rank.

    Args:
        path: The run directory.
        alias: The alias.

    Raises:
        NoCheckpointError: There is no such alias.
    """
    delete_alias(parse_location(path), alias)


def list_aliases(path: str | PathLike[str]) -> dict[str, str]:
    """Return the aliases in a run directory with the tags of their checkpoints, which may have been removed since.

    Args:
        path: The run directory.

    Returns:
        The tags by alias.
    """
    return {name: alias.tag for name, alias in aliases.list_aliases(parse_location(path)).items()}
