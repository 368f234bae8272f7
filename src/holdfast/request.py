"""What a save or a load is asked to do: the arguments of the calls, checked before anything else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.engine.asked import Asked
from holdfast.errors import InvalidArgumentError
from holdfast.layout.files import parse_size
from holdfast.layout.names import check_tag, check_text, number
from holdfast.retention import Retention
from holdfast.state.capture import Training
from holdfast.state.restore import Policy

#: How ranks may read what several of them need.
EXCHANGE = ("auto", "always", "never")

#: What to do where the newest checkpoint is damaged and none was asked for by its tag.
ON_DAMAGE = ("fall_back", "raise")


@dataclass(frozen=True)
class SaveRequest:
    """Where to save, and what to note of it. ``max_shard_size``: the most bytes of tensors in one file."""

    path: Path
    tag: str
    training: Training
    max_shard_size: int | str
    step: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    overwrite: bool = False
    keep: Retention | None = None

    def asked(self) -> Asked:
        """What all ranks must be asked for alike."""
        about = {
            "the path": repr(str(self.path)),
            "the tag": repr(self.tag),
            "what is saved": ", ".join(self.training.given()) or "nothing",
            "max_shard_size": str(self.max_shard_size),
            "overwrite": str(self.overwrite),
            "what is kept": repr(self.keep),
        }
        return Asked("save", about)

    def check(self) -> None:
        """Raise ``InvalidArgumentError`` for what cannot be noted."""
        check_tag(self.tag)
        parse_size(self.max_shard_size)
        self.numbers()
        if self.keep is not None:
            self.keep.check(self.step, self.metrics)

    def numbers(self) -> tuple[int | float | None, dict[str, float | None]]:
        """The step and the metrics as the manifest has them; metrics that are not finite become ``None``."""
        step = None if self.step is None else number("step", self.step)
        metrics = {
            check_text(name, "a metric's name"): float(number(name, value)) for name, value in self.metrics.items()
        }
        return step, {name: value if math.isfinite(value) else None for name, value in metrics.items()}


@dataclass(frozen=True)
class LoadRequest:
    """What to load from where. Without a ``tag``: the latest, or ``path`` itself where it is a checkpoint."""

    path: Path
    tag: str | None
    training: Training
    policy: Policy
    verify: bool
    exchange: str = "auto"
    on_damage: str = "fall_back"

    def asked(self) -> Asked:
        """What all ranks must be asked for alike."""
        about = {
            "the path": repr(str(self.path)),
            "the tag": repr(self.tag),
            "what is loaded": ", ".join(self.training.given()) or "nothing",
            "exchange": self.exchange,
            "on_damage": self.on_damage,
        }
        return Asked("load", about)

    def check(self) -> None:
        """Raise ``InvalidArgumentError`` for what cannot be asked for."""
        if self.tag is not None:
            check_tag(self.tag)
        if self.exchange not in EXCHANGE:
            raise InvalidArgumentError(f"exchange is one of {', '.join(EXCHANGE)}, not {self.exchange!r}")
        if self.on_damage not in ON_DAMAGE:
            raise InvalidArgumentError(f"on_damage is one of {', '.join(ON_DAMAGE)}, not {self.on_damage!r}")
