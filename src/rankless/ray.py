"""Ray Train's checkpoints by rankless: a ``Checkpointer`` for the function that ``TorchTrainer`` runs on each worker.

All workers save one checkpoint straight into the storage folder of the run, without a copy or an upload, and report it
to Ray with its metrics. So ``result.checkpoint``, ``ray.train.get_checkpoint()`` and ``CheckpointConfig`` keep their
meaning: Ray decides which checkpoints are kept, and removes all others. A run resumes on any number of workers.

It needs Ray Train V2, which is Ray's default.

Ray calls the training function on every worker, in a thread that is not the main thread. All workers make the same
calls.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Unpack

import ray.train
import ray.train.collective
import torch.distributed as dist
from ray.train import CheckpointConsistencyMode, CheckpointUploadMode

from rankless.checkpointer import Checkpointer
from rankless.engine.comm.process_group_argument import ProcessGroupArgument, current_process_group
from rankless.errors import InvalidArgumentError, NoCheckpointError
from rankless.formats.native import RANKS, STATE
from rankless.observe.warning import warn_caller
from rankless.ondisk import manifest
from rankless.options import LoadKeywords, LoadOptions
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.tag_arguments import Best, TagArgument, check_tag_argument, resolve_tag
from rankless.save.handle import SaveHandle
from rankless.save.metrics import read_metrics
from rankless.storage import posix

#: The arguments of other ``Checkpointer``s that this one does not take, and the replacements.
_REFUSED = {
    "path": "checkpoints are in the storage folder of the run: pass RunConfig(storage_path=…, name=…)",
    "keep": "Ray removes checkpoints: pass CheckpointConfig(num_to_keep=…)",
    "signals": "Ray does not run the training in the main thread, which alone handles signals",
}


class RayCheckpointer(Checkpointer):
    """A :class:`rankless.Checkpointer` that reports each checkpoint to Ray Train. All workers make the same calls.

    ::

        def train_loop_per_worker(config):
            ...
            with rankless.ray.RayCheckpointer(model=model, optimizer=optimizer, save_every=100) as checkpointer:
                for step in range(checkpointer.resume() + 1, 1001):
                    ...
                    checkpointer.step(step, {"loss": loss})

    The run directory is the storage folder of the run. The metrics that are passed to :meth:`step` are reported with
    each checkpoint; :meth:`step` reports nothing if it does not save. With ``async_save`` a checkpoint is reported as
    soon as it is committed, and Ray waits for it at the end of the training.

    Args:
        options: The arguments of :class:`rankless.Checkpointer`, except ``path``, ``keep`` and ``signals``.

    Raises:
        InvalidArgumentError: The storage is an object store, or any file system of pyarrow except the local one;
            there is no storage (``num_workers=0``); a process group lacks some of the workers; or an argument is
            invalid.
    """

    def __init__(self, **options: Any) -> None:
        for name in _REFUSED.keys() & options.keys():
            raise InvalidArgumentError(f"RayCheckpointer has no argument {name}: {_REFUSED[name]}")
        _check_workers(options.get("process_group"))
        path, self._file_system = _find_storage()
        super().__init__(path, signals=(), **options)
        self._is_async = bool(options.get("async_save"))

    def resume(
        self,
        tag: TagArgument = None,
        *,
        new_ok: Collection[str] = (),
        init_from: str | PathLike[str] | None = None,
        options: LoadOptions | None = None,
        **more: Unpack[LoadKeywords],
    ) -> int:
        """Load the latest checkpoint of the run, if there is one, into the objects of the training.

        Checkpoints that were saved, but not reported because of a failure, count: they are reported now. Other
        checkpoints that the training function has reported to Ray do not count.

        Args:
            tag: The checkpoint to load; the latest by default. There must be none of a later step.
            new_ok: See :meth:`rankless.Checkpointer.resume`.
            init_from: See there, too.
            options: See :class:`rankless.LoadOptions`; its ``on_corruption`` is ignored.
            more: Fields of :class:`rankless.LoadOptions`, except ``on_corruption``.

        Returns:
            The last step that was completed, or 0 if there is no checkpoint. The next step is one more.

        Raises:
            NoCheckpointError: The latest checkpoint that was reported to Ray is missing or has no valid manifest.
            CorruptCheckpointError: The checkpoint is corrupt. There is no fallback to an older one, because the
                steps after it would get the names of checkpoints that Ray knows.
            InvalidArgumentError: ``on_corruption`` was passed, or there are checkpoints of later steps than ``tag``, or
                than the one that ``rankless rollback`` went back to; and all other errors of
                :meth:`rankless.Checkpointer.resume`.
        """
        if "on_corruption" in more:
            raise InvalidArgumentError("resume has no argument on_corruption under Ray: there is no fallback")
        selected = check_tag_argument(tag)
        self._check_latest(selected)
        unreported = self._find_unreported()
        reports = (
            selected is None and not self._has_begun
        )  # else they are of this process, which has passed them to Ray
        more["on_corruption"] = "raise"
        step = super().resume(tag, new_ok=new_ok, init_from=init_from, options=options, **more)
        for name, metrics in unreported if reports else ():
            self._report(self.path / name, metrics)
        return step

    def _find_unreported(self) -> list[tuple[str, dict[str, float]]]:
        """Return the tags and metrics of the checkpoints that are newer than the latest one that Ray knows.

        Ray forgets the reports that it has not processed when a worker fails, so there can be several. Raises
        ``NoCheckpointError`` if the latest one that Ray knows is lost.
        """
        reported, complete = ray.train.get_checkpoint(), [info for info in self._list_complete() if info.is_current]
        known = None if reported is None else Path(reported.path)
        number = self._count_known(known, [info.tag for info in complete])
        # Another host may list the folder as it was before.
        newer = ray.train.collective.broadcast_from_rank_zero(None if number is None else complete[number:])
        if newer is None:
            raise NoCheckpointError(
                f"Ray's latest checkpoint {known and known.name!r} in {self.path} is missing or cannot be read, and "
                "only Ray may remove checkpoints there: use another RunConfig(name=…), and load an older one with "
                "rankless.restore"
            )
        return [(info.tag, _as_numbers(info.metrics)) for info in newer]

    def _count_known(self, latest: Path | None, tags: list[str]) -> int | None:
        """Return how many checkpoints, oldest first, are not newer than all that Ray knows; ``None`` if that is lost.

        ``latest`` is the path of Ray's latest checkpoint.
        """
        if latest is None:
            return 0
        if latest.name in tags:
            return tags.index(latest.name) + 1
        if not _is_of_caller(latest):
            return None
        reported = ray.train.get_all_reported_checkpoints(consistency_mode=CheckpointConsistencyMode.COMMITTED)
        names = {Path(entry.checkpoint.path).name for entry in reported}
        if not tags and ray.train.get_context().get_world_rank() == 0:
            warn_caller(
                f"{self.path} has no checkpoint of rankless, only others that were reported to Ray, the latest is "
                f"{latest.name!r}: training begins at step 1"
            )
        return max((number for number, tag in enumerate(tags, 1) if tag in names), default=0)

    def _list_complete(self) -> list[CheckpointInfo]:
        return [info for info in self.list() if info.status == "complete"]

    def _check_latest(self, tag: str | Best | None) -> None:
        """Raise ``InvalidArgumentError`` if there are checkpoints of later steps: their names would be used again.

        Without a tag there are some if the command ``rankless rollback`` has abandoned the latest one that Ray knows.
        """
        complete, reported = self._list_complete(), ray.train.get_checkpoint()
        if tag is None:
            name, known = complete[-1].tag if complete else "", Path(reported.path).name if reported else ""
            later = [info.tag for info in complete if info.tag == known and not info.is_current]
        else:
            name = resolve_tag(self.path, tag)
            steps = [info.step for info in complete if info.tag == name and info.step is not None]
            later = [info.tag for info in complete if steps and info.step is not None and info.step > steps[0]]
        later = ray.train.collective.broadcast_from_rank_zero(later)
        if later:
            raise InvalidArgumentError(
                f"this run cannot go on at {name!r}: it has {later[-1]!r}, and Ray does not take a checkpoint of the "
                f"same name again; use another RunConfig(name=…), and load {str(self.path / name)!r} with "
                "rankless.restore"
            )

    def _save(self, tag: str, *, overwrite: bool = False, forced: bool = False) -> SaveHandle[CheckpointInfo]:
        if overwrite:
            raise InvalidArgumentError("overwrite=True is not possible under Ray, which would know the path twice")
        handle = super()._save(tag, forced=forced)
        metrics = read_metrics(self._pending.get("metrics", {}))
        self._report(handle.path, _as_numbers(metrics), handle if self._is_async else None)
        return handle

    def _report(
        self, path: Path, metrics: Mapping[str, float], handle: SaveHandle[CheckpointInfo] | None = None
    ) -> None:
        """Report a checkpoint to Ray: now, or when its save is committed."""
        ray.train.report(
            dict(metrics),
            checkpoint=ray.train.Checkpoint(str(path), self._file_system),
            checkpoint_dir_name=path.name,
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC if handle else CheckpointUploadMode.NO_UPLOAD,
            delete_local_checkpoint_after_upload=False,
            checkpoint_upload_fn=partial(_wait_for_save, handle) if handle else None,
        )


def _is_of_caller(path: Path) -> bool:
    """Return whether a checkpoint is not one of rankless. One of rankless may have lost a file."""
    return posix.is_directory(path) and not posix.list_names(path) & {manifest.NAME, STATE, RANKS}


def _as_numbers(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Return metrics of a manifest, which has ``None`` for values that are not finite."""
    return {name: math.nan if value is None else value for name, value in metrics.items()}


def _wait_for_save(handle: SaveHandle[CheckpointInfo], checkpoint: Any, name: str) -> Any:
    """Return the checkpoint once it is committed. Ray calls this in a thread in place of an upload."""
    del name
    handle.wait()
    return checkpoint


def _find_storage() -> tuple[str, Any]:
    """Return the storage folder of the run and its file system. Raises ``InvalidArgumentError``."""
    try:
        storage = ray.train.get_context().get_storage()
    except NotImplementedError as error:
        raise InvalidArgumentError("Ray's local mode has no storage: pass ScalingConfig with num_workers=1") from error
    if storage.storage_filesystem.type_name != "local":
        raise InvalidArgumentError(
            f"the storage {storage.experiment_fs_path} is on the file system {storage.storage_filesystem.type_name!r}. "
            "Object stores are not supported, because Ray removes the files of a checkpoint there, and not the object "
            "that names them: pass a shared folder to RunConfig(storage_path=…), or save with "
            'rankless.Checkpointer("s3://…"), and report metrics to Ray without a checkpoint'
        )
    return storage.experiment_fs_path, storage.storage_filesystem


def _check_workers(process_group: ProcessGroupArgument) -> None:
    """Raise ``InvalidArgumentError`` if only some of Ray's workers would save."""
    workers, group = ray.train.get_context().get_world_size(), current_process_group(process_group)
    ranks = 1 if group is None else dist.get_world_size(group)
    if ranks != workers:
        raise InvalidArgumentError(
            f"Ray has {workers} workers, but {ranks} would save: use TorchTrainer, and a process group of all workers"
        )
