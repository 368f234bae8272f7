"""Functions that save and load a whole training state, each with the default ``RunDirectory`` of its path.

Each rank has its own list of default directories; the calls themselves are on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from rankless.engine.comm.collective_call import collective_call
from rankless.engine.comm.process_group_argument import ProcessGroupArgument
from rankless.options import LoadKeywords, LoadOptions, SaveKeywords, SaveOptions, with_keywords
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.retention import Retention
from rankless.run.tag_arguments import TagArgument, check_tag_argument, give_metrics
from rankless.run_directory import RunDirectory
from rankless.save.background import background_saves
from rankless.save.deferred_errors import DeferredErrors
from rankless.save.handle import SaveHandle
from rankless.save.job_memory import JobMemory
from rankless.storage.location import parse_location
from rankless.tier.tier_options import LocalTier, as_local_tier

if TYPE_CHECKING:
    from rankless.load.restore_result import RestoreResult  # a job that only saves needs no code of loads

#: The settings of a default run directory: path, timeout in seconds, process group, local tier.
_Settings = tuple[Path, float, ProcessGroupArgument, LocalTier | None]

#: The largest number of default run directories that are kept: each one holds a plan and a process group.
_MAX_DEFAULTS = 16


class _DefaultDirectories:
    """The most recently used default run directories. They share the memory of this process's loads and saves."""

    def __init__(self) -> None:
        self._directories: dict[_Settings, RunDirectory] = {}
        self._memory = JobMemory()

    def get_directory(self, settings: _Settings) -> RunDirectory:
        """Return the run directory with these settings, and create it if there is none."""
        try:
            directory = self._directories.pop(settings, None) or self._create_directory(*settings)
        except TypeError:  # a setting is of a type without a hash: the checks of the directory name it
            return self._create_directory(*settings)
        self._directories[settings] = directory  # now it is the most recently used one
        without_tier = [known for known in self._directories if known[3] is None]
        if len(without_tier) > _MAX_DEFAULTS:  # a tier may have a checkpoint that is to be drained at the end
            del self._directories[without_tier[0]]
        return directory

    def _create_directory(
        self, path: Path, timeout: float, group: ProcessGroupArgument, local: LocalTier | None
    ) -> RunDirectory:
        directory = RunDirectory(path, process_group=group, timeout=timeout, local=local)
        directory.memory = self._memory
        return directory

    def drain(self) -> None:
        """Write checkpoints that only a local tier has into its run directory."""
        failures = DeferredErrors()
        for directory in self._directories.values():
            failures.run(directory.drain)
        failures.raise_first()

    def clear(self) -> None:
        """Forget all run directories, and their loads and saves."""
        self._directories, self._memory = {}, JobMemory()


_defaults = _DefaultDirectories()


def save_checkpoint(  # noqa: PLR0917 - the objects in the order of restore(), which needs no names for them
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
    keep: Retention | int | None = None,
    overwrite: bool = False,
    async_save: bool = False,
    process_group: ProcessGroupArgument = None,
    timeout: float = 600.0,
    local: LocalTier | str | PathLike[str] | None = None,
    options: SaveOptions | None = None,
    **more: Unpack[SaveKeywords],
) -> SaveHandle[CheckpointInfo]:
    """Save a training state as the checkpoint ``path/tag``, on all ranks.

    Args:
        path: The run directory on a shared file system, or its URL in a store.
        tag: The checkpoint's name, such as ``"step_1000"``.
        model: A module in any layout, a list of parts, or a dict of models.
        optimizer: An optimizer, or a list or dict of them. It is not stepped.
        scheduler: An object with ``state_dict``, or a list or dict of them.
        user_content: Plain values, tensors and arrays. Saved from rank 0.
        dataloader: An object with ``state_dict``. Saved from each rank.
        stateful: Objects with ``state_dict`` by name. Ranks compare them.
        per_rank_content: Like ``user_content``. Saved from each rank.
        step: The training step, for lists and retention.
        metrics: Numbers by name, for lists and retention.
        keep: How many checkpoints of the run stay, or a policy; ``None``: all.
        overwrite: Replace a checkpoint with this tag atomically.
        async_save: Return after the copy, and write in the background.
        process_group: The ranks that save; by default the default group. ``"self"``: this process alone.
        timeout: For how many seconds ranks wait for each other.
        local: The local tier: a folder of each host, or a ``LocalTier``.
        options: Others: ``help(rankless.SaveOptions)`` has them.
        more: Single fields of ``SaveOptions``, such as ``staging``.

    Returns:
        A handle; with ``async_save``, its ``wait()`` waits for the commit.

    Raises:
        RanklessError: The same on all ranks; no other checkpoint is changed.
            ``help(rankless.RunDirectory.save)`` has a list, and more on Args.
    """
    with collective_call(process_group, timeout):
        directory = _defaults.get_directory((parse_location(path), timeout, process_group, as_local_tier(local)))
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
            keep=keep,
            overwrite=overwrite,
            async_save=async_save,
            options=with_keywords(SaveOptions(), options, more, save_checkpoint),
        )


def load_checkpoint(
    path: str | PathLike[str],
    tag: TagArgument = None,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    dataloader: Any = None,
    stateful: Mapping[str, Any] | None = None,
    process_group: ProcessGroupArgument = None,
    timeout: float = 600.0,
    local: LocalTier | str | PathLike[str] | None = None,
    options: LoadOptions | None = None,
    **more: Unpack[LoadKeywords],
) -> Any:
    """Return ``restore(...).user_content``: load a checkpoint in place and return its user content.

    The arguments and errors are as in :func:`restore`, which also returns ``per_rank_content`` and a report of the
    load. ``help(rankless.LoadOptions)`` documents ``options``.

    Returns:
        The user content, or ``None`` if the checkpoint has none. If the checkpoint has ``per_rank_content`` and an
        optimizer or data loader is passed, the function warns, because it does not return this content.
    """
    with collective_call(process_group, timeout):
        directory = _defaults.get_directory((parse_location(path), timeout, process_group, as_local_tier(local)))
        return directory.load(
            tag,
            model,
            optimizer,
            scheduler,
            dataloader=dataloader,
            stateful=stateful,
            options=with_keywords(LoadOptions(), options, more, load_checkpoint),
        )


def restore(
    path: str | PathLike[str],
    tag: TagArgument = None,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    dataloader: Any = None,
    stateful: Mapping[str, Any] | None = None,
    process_group: ProcessGroupArgument = None,
    timeout: float = 600.0,
    local: LocalTier | str | PathLike[str] | None = None,
    options: LoadOptions | None = None,
    **more: Unpack[LoadKeywords],
) -> RestoreResult:
    """Load a checkpoint in place, on any ranks and in any layout, on all ranks.

    A requested part that the checkpoint lacks is an error, before anything is
    changed. With ``strict`` and ``allow_missing`` of the options it is a warning.

    Args:
        path: A run directory, or one checkpoint of any format, or a URL. A folder
            that contains rankless checkpoints counts as a run directory.
        tag: The tag, an alias, ``best(...)`` or ``LATEST``, the default.
        model: A module, or a state dict with tensors to fill in place.
        optimizer: An optimizer. Its state is created if it never stepped.
        scheduler: An object with ``load_state_dict``, which is called.
        dataloader: As ``scheduler``. For another number of ranks it needs
            ``load_state_dicts``, as ``ResumableLoader`` has.
        stateful: Objects with ``load_state_dict``, by name.
        process_group: The ranks that load; by default the default group. ``"self"``: this process alone.
        timeout: For how many seconds ranks wait for each other.
        local: The local tier, as in ``save_checkpoint``. If it has a newer
            checkpoint, that is loaded, and then written into the run directory.
        options: Others: ``help(rankless.LoadOptions)`` has them.
        more: Single fields of ``LoadOptions``, such as ``strict``.

    Returns:
        The user content, the per-rank content, and a report of the load.

    Raises:
        NoCheckpointError: There is no checkpoint.
        CheckpointReplacedError: Others replace it faster than it can be loaded.
        MismatchError: Names, shapes, dtypes or param groups do not match.
        CorruptCheckpointError: Stored bytes differ from the saved ones.
        RanklessError: Further ones as in ``save_checkpoint``.
    """
    with collective_call(process_group, timeout):
        directory = _defaults.get_directory((parse_location(path), timeout, process_group, as_local_tier(local)))
        return directory.restore(
            tag,
            model,
            optimizer,
            scheduler,
            dataloader=dataloader,
            stateful=stateful,
            options=with_keywords(LoadOptions(), options, more, restore),
        )


def finalize() -> None:
    """Wait for all background saves of this process, and for statistics that they compute.

    With a local tier, all ranks must call it: checkpoints that only the tier has are written into the run directory.

    Raises:
        Exception: The error of the first save that failed, after all saves have ended. Each error is raised once: if
            several saves failed, the next call raises the next error.
    """
    from rankless.inspection.background_statistics import background_statistics  # noqa: PLC0415 - saves need none

    failures = DeferredErrors()
    failures.run(background_saves.finalize)
    if not failures.is_rank_missing:
        failures.run(_defaults.drain)
    failures.run(background_statistics.wait)
    failures.raise_first()


def add_metrics(path: str | PathLike[str], tag: TagArgument, metrics: Mapping[str, Any]) -> CheckpointInfo:
    """Add metrics to a finished checkpoint, such as the score of an evaluator. Call it on one rank.

    They count like metrics of the save: for :func:`best`, for :class:`KeepBest`, and in lists. The checkpoint itself
    does not change: each added metric is a hidden file next to it, which a copy of the checkpoint's directory alone
    lacks.

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
    from rankless.save.metrics import read_metrics  # noqa: PLC0415 - saves and loads do not need it here

    return give_metrics(parse_location(path), check_tag_argument(tag), read_metrics(metrics))
