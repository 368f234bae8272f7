"""The arguments of a load, checked before anything else."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.engine.comm.call_check import CallDescription
from holdfast.formats.reader import Reader
from holdfast.observe.events import OnEvent, ignore_event
from holdfast.ondisk.validation import check_choice, check_tag
from holdfast.state.restore import COMPONENTS, RestorePolicy
from holdfast.state.training import TrainingObjects

#: How ranks may read what several of them need.
SHARE_READS = ("auto", "always", "never")

#: What to do where the newest checkpoint is damaged and none was asked for by its tag.
ON_CORRUPTION = ("fall_back", "raise")


@dataclass(frozen=True)
class LoadRequest:
    """What to load from where. Without a ``tag``: the latest, or ``path`` itself where it is a checkpoint.

    ``seen`` makes of the checkpoint's reader another one, which has what is asked for under other names, or put
    together otherwise; ``seen_as`` says how, in words.
    """

    path: Path
    tag: str | None
    training: TrainingObjects
    policy: RestorePolicy
    verify: bool
    share_reads: str = "auto"
    on_corruption: str = "fall_back"
    keys: Mapping[str, str] = field(default_factory=dict)
    seen: Callable[[Reader], Reader] = lambda reader: reader
    seen_as: str = "as it is"
    on_event: OnEvent = ignore_event
    began: float = field(default_factory=time.perf_counter)

    def asked(self) -> CallDescription:
        """What all ranks must be asked for alike."""
        about = {
            "the path": repr(str(self.path)),
            "the tag": repr(self.tag),
            "what is loaded": ", ".join(self.training.given()) or "nothing",
            "share_reads": self.share_reads,
            "on_corruption": self.on_corruption,
            "keys": repr(sorted(self.keys.items())),
            "allow_missing": ", ".join(sorted(self.policy.allow_missing)),
            "how the checkpoint is seen": self.seen_as,
        }
        return CallDescription("load", about)

    def check(self) -> None:
        """Raise ``InvalidArgumentError`` for what cannot be asked for."""
        if self.tag is not None:
            check_tag(self.tag)
        check_choice("share_reads", self.share_reads, SHARE_READS)
        check_choice("on_corruption", self.on_corruption, ON_CORRUPTION)
        for part in self.policy.allow_missing:
            check_choice("each of allow_missing", part, COMPONENTS)
