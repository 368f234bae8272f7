"""The faults, and the kinds of saves and loads in which they are injected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from campaigns.faults.faulty import ERRORS


@dataclass(frozen=True)
class Setting:
    """A kind of save, or a load if there is no ``how``, the number of ranks, and the rank with the faults."""

    how: str
    background: bool
    ranks: int
    victim: int

    def __str__(self) -> str:
        call = f"{self.how}, {'asynchronous' if self.background else 'synchronous'}" if self.how else "load"
        return f"{call}; rank {self.victim} of {self.ranks}"


SETTINGS = (
    Setting("new", background=False, ranks=1, victim=0),
    Setting("new", background=True, ranks=1, victim=0),
    Setting("overwrite", background=False, ranks=1, victim=0),
    Setting("two renames", background=False, ranks=1, victim=0),
    Setting("retention", background=True, ranks=1, victim=0),
    Setting("new", background=False, ranks=3, victim=0),
    Setting("new", background=False, ranks=3, victim=1),
    Setting("overwrite", background=True, ranks=3, victim=0),
    Setting("overwrite", background=True, ranks=3, victim=1),
    Setting("", background=False, ranks=1, victim=0),
    Setting("", background=False, ranks=3, victim=0),
    Setting("", background=False, ranks=3, victim=1),
)


@dataclass(frozen=True)
class Fault:
    """A fault at the n-th call: the way it fails, or a removal before it."""

    nth: int
    call: str
    kind: str
    forever: bool = False

    def __str__(self) -> str:
        return f"{self.kind}{' from then on' if self.forever else ''} at call {self.nth}, {self.call}"


def faults(calls: Sequence[str], setting: Setting) -> Iterator[Fault]:
    """Yield every fault of every call."""
    removed = ("run", "draft") if setting.how else ("run", "checkpoint", "file")
    for nth, call in enumerate(calls):
        yield from (Fault(nth, call, kind) for kind in ERRORS[call])
        yield Fault(nth, call, "EIO", forever=True)
        yield from (Fault(nth, call, f"{what} removed") for what in removed)
