"""What a save or a load is asked to do: the arguments of the calls, checked before anything else."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.corruption import Corrupt, find_corrupt
from holdfast.engine.asked import Asked
from holdfast.errors import InvalidArgumentError, TagExistsError
from holdfast.events import OnEvent, unheard
from holdfast.formats.reader import Reader
from holdfast.layout import manifest
from holdfast.layout.files import parse_size
from holdfast.layout.names import check_tag, check_text, number
from holdfast.retention import Retention
from holdfast.state.capture import Training
from holdfast.state.restore import PARTS, Policy
from holdfast.storage import local

#: When the state is copied: before the call returns, or, where only steps of optimizers change it, until the next step.
STAGING = ("eager", "overlapped")

#: How much of what is copied later is proven not to have changed meanwhile.
STAGING_CHECK = ("sampled", "full")

#: How much of what several ranks hold is proven to be equal on them, at each save.
REPLICA_CHECK = ("sampled", "full")

#: How ranks may read what several of them need.
EXCHANGE = ("auto", "always", "never")

#: What to do where the newest checkpoint is damaged and none was asked for by its tag.
ON_DAMAGE = ("fall_back", "raise")


@dataclass(frozen=True)
class Background:
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
    training: Training
    max_shard_size: int | str
    step: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    overwrite: bool = False
    keep: Retention | None = None
    async_save: bool = False
    staging: Background = Background(STAGING[0], STAGING_CHECK[0])
    replica_check: str = "sampled"
    runs: frozenset[str] = frozenset()
    corrupt: frozenset[Corrupt] = frozenset()
    on_event: OnEvent = unheard
    began: float = field(default_factory=time.perf_counter)

    @property
    def background(self) -> Background | None:
        """How it goes on when the call has returned; ``None`` if the call returns when all is done."""
        return self.staging if self.async_save else None

    def asked(self) -> Asked:
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
        return Asked("save", about)

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
        there = local.exists(final)
        if self.overwrite and local.lacks(final, manifest.NAME):
            raise TagExistsError(f"{final} is no checkpoint of ours, and is not overwritten; choose another tag")
        if there and not self.overwrite and self.find_corrupt() is None:
            raise TagExistsError(f"there is {final} already; choose another tag, or pass overwrite=True")

    def find_corrupt(self) -> Corrupt | None:
        """The checkpoint that has the tag, if it was found corrupt."""
        return find_corrupt(self.corrupt, self.path, self.tag)

    def packing(self) -> bytes:
        """All that decides, beside the tensors, what lies in which file."""
        return str(parse_size(self.max_shard_size)).encode()

    def numbers(self) -> tuple[int | float | None, dict[str, float | None]]:
        """The step and the metrics as the manifest has them; metrics that are not finite become ``None``."""
        step = None if self.step is None else number("step", self.step)
        metrics = {
            check_text(name, "a metric's name"): float(number(name, value)) for name, value in self.metrics.items()
        }
        return step, {name: value if math.isfinite(value) else None for name, value in metrics.items()}


@dataclass(frozen=True)
class LoadRequest:
    """What to load from where. Without a ``tag``: the latest, or ``path`` itself where it is a checkpoint.

    ``seen`` makes of the checkpoint's reader another one, which has what is asked for under other names, or put
    together otherwise; ``seen_as`` says how, in words.
    """

    path: Path
    tag: str | None
    training: Training
    policy: Policy
    verify: bool
    exchange: str = "auto"
    on_damage: str = "fall_back"
    keys: Mapping[str, str] = field(default_factory=dict)
    seen: Callable[[Reader], Reader] = lambda reader: reader
    seen_as: str = "as it is"
    on_event: OnEvent = unheard
    began: float = field(default_factory=time.perf_counter)

    def asked(self) -> Asked:
        """What all ranks must be asked for alike."""
        about = {
            "the path": repr(str(self.path)),
            "the tag": repr(self.tag),
            "what is loaded": ", ".join(self.training.given()) or "nothing",
            "exchange": self.exchange,
            "on_damage": self.on_damage,
            "keys": repr(sorted(self.keys.items())),
            "allow_missing": ", ".join(sorted(self.policy.allow_missing)),
            "how the checkpoint is seen": self.seen_as,
        }
        return Asked("load", about)

    def check(self) -> None:
        """Raise ``InvalidArgumentError`` for what cannot be asked for."""
        if self.tag is not None:
            check_tag(self.tag)
        check_choice("exchange", self.exchange, EXCHANGE)
        check_choice("on_damage", self.on_damage, ON_DAMAGE)
        for part in self.policy.allow_missing:
            check_choice("each of allow_missing", part, PARTS)


def check_choice(what: str, given: object, known: Sequence[str]) -> None:
    """Raise ``InvalidArgumentError`` naming the argument if it is none of those known."""
    if given not in known:
        raise InvalidArgumentError(f"{what} is one of {', '.join(known)}, not {given!r}")
