"""``WeightPublisher``: publishes versions of a model's weights while a training goes on. Every rank calls it.

A publication is a save of one component (:mod:`rankless.components.component_content`) with a version as its output
(:mod:`rankless.weights.version_output`). So it has the same votes, copies, threads and errors as all saves.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rankless.components.component_calls import check_cast, saves
from rankless.components.component_content import ComponentContent
from rankless.components.component_request import ComponentRequest
from rankless.components.destination import Destination
from rankless.components.file_format import model_file_format
from rankless.engine.comm.collective_call import collective_call
from rankless.engine.comm.process_group_argument import ProcessGroupArgument, check_ranks_are_joined
from rankless.errors import InvalidArgumentError, RanklessError
from rankless.observe.spans import span
from rankless.observe.warning import warn_caller
from rankless.ondisk.data_files import NO_ADAPTERS, SHARD_SIZE, parse_size
from rankless.ondisk.validation import check_choice, check_integer, check_number
from rankless.ondisk.weight_versions import TrainingPoint
from rankless.run_directory import RunDirectory
from rankless.save.background import background_saves
from rankless.save.handle import SaveHandle
from rankless.save.metrics import read_metrics
from rankless.save.run_save import run_save
from rankless.state.training import TrainingObjects
from rankless.storage.location import parse_location
from rankless.weights.publication import Publication, WeightVersion
from rankless.weights.publisher_state import PublisherState
from rankless.weights.version_output import VersionOutput
from rankless.weights.weights_folders import WeightsDirectory

if TYPE_CHECKING:
    import torch


class WeightPublisher:
    """Publishes versions of a model's weights into a weights directory, which engines and evaluations follow.

    ```python
    with rankless.WeightPublisher("weights", dtype=torch.bfloat16) as publisher:
        for step in range(1000):
            train(model, optimizer)
            publisher.publish(model, step=step)
    ```

    The first version is an *anchor*: a folder of whole files, as :func:`rankless.save_model` writes it. Later ones are
    *deltas*: each rank writes how its own bytes differ from the version before. Nothing is gathered. A version appears
    in one step, when all ranks have written, and can be proven block by block. Each rank keeps a copy of the bytes that
    it published last, in host memory.

    Args:
        path: The weights directory, or its URL in an object store. It may be in memory, such as in ``/dev/shm``. Only
            one job may publish into it at a time.
        dtype: The dtype of the published floating-point tensors, such as ``torch.bfloat16``. By default they are as in
            the model.
        anchor_every: How many versions there are from one anchor to the next.
        keep: How many anchors are kept, with all versions since the oldest of them; ``None``: all.
        training: The :class:`rankless.RunDirectory` that the training saves with. Then each version names the run, the
            incarnation, and the checkpoint that the training has begun to save last, or else has loaded.
        async_save: :meth:`publish` returns as soon as the model may change; the rest is done in the background.
        on_busy: If a publication is still in progress at the next call, ``"wait"`` for it, or ``"skip"`` the new one.
        on_failure: ``"raise"`` the error of a failed publication, or ``"warn"``, and go on.
        max_shard_size: The maximum size of the tensors in one file.
        process_group: The ranks that publish together; ``"self"`` is this process alone.
        timeout: How many seconds ranks wait for each other before all of them fail.

    Raises:
        InvalidArgumentError: An argument is invalid.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        anchor_every: int = 100,
        keep: int | None = 2,
        training: RunDirectory | None = None,
        async_save: bool = True,
        on_busy: str = "wait",
        on_failure: str = "raise",
        max_shard_size: int | str = SHARD_SIZE,
        process_group: ProcessGroupArgument = None,
        timeout: float = 600.0,
    ) -> None:
        with collective_call(process_group, timeout):
            self._path = parse_location(path)
            self._dtype = None if dtype is None else check_cast(dtype)
            self._anchor_every = check_integer("anchor_every", anchor_every, smallest=1)
            self._keep = None if keep is None else check_integer("keep", keep, smallest=1)
            self._training = _check_training(training)
            check_choice("on_busy", on_busy, ("wait", "skip"))
            check_choice("on_failure", on_failure, ("raise", "warn"))
            self._async_save, self._is_skipping = bool(async_save), on_busy == "skip"
            self._is_warning = on_failure == "warn"
            self._limit = parse_size(max_shard_size)
            self._group, self._timeout = process_group, timeout
            self._state = PublisherState()
            self._handle: SaveHandle[WeightVersion] | None = None

    @property
    def path(self) -> Path:
        """The weights directory."""
        return self._path

    def publish(
        self, model: Any, step: float | None = None, metrics: Mapping[str, Any] | None = None
    ) -> SaveHandle[WeightVersion] | None:
        """Publish the weights of a model as the next version. Every rank calls it.

        The first call of a job publishes an anchor, and so does the first one after the training went back, or if the
        tensors of the model or its configuration have changed. For example, a model with one more layer than in the
        version before is published as an anchor.

        Args:
            model: A module in any layout, or a state dict. A list holds the modules of one model.
            step: The step of the training.
            metrics: Numbers by name to store with the version, or tensors of one element.

        Returns:
            A handle. Its ``wait()`` returns the :class:`rankless.WeightVersion` when it is published. ``None`` if this
            publication was skipped, or has failed and ``on_failure="warn"``.

        Raises:
            WeightsConflictError: Another job has published into the directory. The next publication is an anchor.
            InvalidArgumentError: The path is a file, or has checkpoints and no versions.
            UnsupportedTensorError, ReplicaMismatchError, RankMismatchError, RankTimeoutError, StorageError: As in
                :func:`rankless.save_model`. All ranks raise it, and no version appears. With ``async_save``, the next
                call or :meth:`wait` raises it.
        """
        before = self._handle
        with self._tolerating(), collective_call(self._group, self._timeout):
            check_ranks_are_joined(self._group)
            publication = self._describe(step, metrics)
            if not (self._is_skipping and self._is_busy()):
                self._run(model, publication)
        # The tolerated error may be from the publication before: this one has begun nevertheless.
        return self._handle if self._handle is not before else None

    def _describe(self, step: float | None, metrics: Mapping[str, Any] | None) -> Publication:
        if step is not None and not math.isfinite(check_number("step", step)):
            raise InvalidArgumentError(f"step must be a finite number; got {step!r}")
        return Publication(
            self._path,
            None if step is None else check_number("step", step),
            read_metrics(metrics or {}),
            None if self._training is None else describe_training(self._training),
            self._anchor_every,
            self._keep,
        )

    def _is_busy(self) -> bool:
        """Return whether the publication before is in progress on rank 0: all ranks do the same."""
        session = saves.rank_group(self._group).open_session(self._timeout)
        handle = self._handle if self._state.process == os.getpid() else None  # a parent's handle never ends here
        _, raw = session.vote(
            "deciding whether to publish",
            lambda: None,
            lambda _: b"",
            lambda _: b"" if handle is None or handle.done() else b"busy",
        )
        session.leave()
        return bool(raw)

    def _run(self, model: Any, publication: Publication) -> None:
        folder = Destination(self._path, folder=True)
        file_format = model_file_format(folder, self._limit, use_safetensors=True, model=model, dtype=self._dtype)
        training = TrainingObjects(model, rng=False, adapters=NO_ADAPTERS, dtype=self._dtype)
        text = f"weights of step {publication.step}, an anchor every {self._anchor_every}, in {file_format.text}"
        request = ComponentRequest(
            WeightsDirectory(self._path, is_known=self._handle is not None),
            training,
            file_format.layout,
            text,
            async_save=self._async_save,
        )
        with span("publish", "call", self._path.name), background_saves.path_turn(self._path, self._group):
            content = ComponentContent(
                request,
                saves.rank_group(self._group),
                self._timeout,
                partial(VersionOutput, publication, self._state),
            )
            self._handle = run_save(content, self._path, self._group, asynchronous=self._async_save)

    def wait(self) -> None:
        """Wait until all publications have ended, and raise the error of one that has failed. Every rank calls it."""
        with self._tolerating():
            background_saves.finalize(self._path)

    @contextmanager
    def _tolerating(self) -> Iterator[None]:
        """Turn an error of a publication, which all ranks have, into a warning if the caller wants that."""
        try:
            yield
        except InvalidArgumentError:
            raise
        except RanklessError as error:
            if not self._is_warning:
                raise
            warn_caller(f"a version of the weights was not published into {self._path}: {error}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()


def describe_training(directory: RunDirectory) -> TrainingPoint | None:
    """Return the current point of a training; ``None`` if it has neither saved nor loaded in its run directory."""
    history = directory.history
    of_job = history.claim or history.base
    if of_job is None:
        return None
    checkpoint, tag = history.newest
    return TrainingPoint(run=of_job.run, incarnation=of_job.incarnation, checkpoint=checkpoint, tag=tag)


def _check_training(training: object) -> RunDirectory | None:
    if training is not None and not isinstance(training, RunDirectory):
        raise InvalidArgumentError(
            f"training must be the RunDirectory that the training saves with; got {type(training).__qualname__}"
        )
    return training
