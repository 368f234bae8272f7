"""The arguments of a save, checked before anything else."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.engine.comm.call_check import CallDescription
from holdfast.errors import TagExistsError
from holdfast.observe.events import OnEvent, ignore_event
from holdfast.ondisk import manifest
from holdfast.ondisk.files import parse_size
from holdfast.ondisk.validation import check_choice, check_number, check_tag, check_utf8
from holdfast.run.corruption import CorruptRecord, find_corrupt
from holdfast.run.retention import Retention
from holdfast.state.training import TrainingObjects
from holdfast.storage import posix

#: When the state is copied: before the call returns, or, where only steps of optimizers change it, until the next step.
STAGING = ("eager", "overlapped")

#: How much of what is copied later is proven not to have changed meanwhile.
STAGING_CHECK = ("sampled", "full")

#: How much of what several ranks hold is proven to be equal on them, at each save.
REPLICA_CHECK = ("sampled", "full")


@dataclass(frozen=True)
class BackgroundOptions:
    """How a save goes on in the background: see :data:`STAGING` and :data:`STAGING_CHECK`."""

    staging: str
    check: str

    def __str__(self) -> str:
        return f"{self.staging}, {self.check} check"


@dataclass(frozen=True)
class SaveRequest:
    """Where to save, and what to note of it. ``max_shard_size``: the most bytes of tensors in one file.

    ``staging``: how an asynchronous save copies; checked for others, too. ``runs``: the ids of those that may be
    continued. ``corrupt``: checkpoints that make way. ``began``: by ``time.perf_counter``.
    """

    path: Path
    tag: str
    training: TrainingObjects
    max_shard_size: int | str
    step: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    overwrite: bool = False
    keep: Retention | None = None
    async_save: bool = False
    staging: BackgroundOptions = BackgroundOptions(STAGING[0], STAGING_CHECK[0])
    replica_check: str = "sampled"
    runs: frozenset[str] = frozenset()
    corrupt: frozenset[CorruptRecord] = frozenset()
    on_event: OnEvent = ignore_event
    began: float = field(default_factory=time.perf_counter)

    @property
    def background(self) -> BackgroundOptions | None:
        """How it goes on when the call has returned; ``None`` if the call returns when all is done."""
        return self.staging if self.async_save else None

    def asked(self) -> CallDescription:
        """What all ranks must be asked for alike."""
        about = {
            "the path": repr(str(self.path)),
            "the tag": repr(self.tag),
            "what is saved": ", ".join(self.training.given()) or "nothing",
            "max_shard_size": str(self.max_shard_size),
            "overwrite": str(self.overwrite),
            "state_dict_hooks": str(self.training.state_dict_hooks),
            "what is kept": repr(self.keep),
            "async_save and staging": str(self.background or "synchronous"),
            "replica_check": repr(self.replica_check),
        }
        return CallDescription("save", about)

    def check(self) -> None:
        """Raise ``InvalidArgumentError`` for what cannot be noted."""
        check_tag(self.tag)
        parse_size(self.max_shard_size)
        self.numbers()
        check_choice("staging", self.staging.staging, STAGING)
        check_choice("staging_check", self.staging.check, STAGING_CHECK)
        check_choice("replica_check", self.replica_check, REPLICA_CHECK)
        if self.keep is not None:
            self.keep.check(self.step, self.metrics)

    def check_place(self) -> None:
        """Raise ``TagExistsError`` where the tag is taken, and is not to be overwritten."""
        final = self.path / self.tag
        there = posix.path_exists(final)
        if self.overwrite and posix.is_directory_without(final, manifest.NAME):
            raise TagExistsError(f"{final} is no checkpoint of ours, and is not overwritten; choose another tag")
        if there and not self.overwrite and self.find_corrupt() is None:
            raise TagExistsError(f"there is {final} already; choose another tag, or pass overwrite=True")

    def find_corrupt(self) -> CorruptRecord | None:
        """The checkpoint that has the tag, if it was found corrupt."""
        return find_corrupt(self.corrupt, self.path, self.tag)

    def packing(self) -> bytes:
        """All that decides, beside the tensors, what lies in which file."""
        return str(parse_size(self.max_shard_size)).encode()

    def numbers(self) -> tuple[int | float | None, dict[str, float | None]]:
        """The step and the metrics as the manifest has them; metrics that are not finite become ``None``."""
        step = None if self.step is None else check_number("step", self.step)
        metrics = {
            check_utf8(name, "a metric's name"): float(check_number(name, value))
            for name, value in self.metrics.items()
        }
        return step, {name: value if math.isfinite(value) else None for name, value in metrics.items()}
