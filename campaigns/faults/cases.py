"""The faults, and the kinds of saves and loads in which they are injected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from campaigns.faults.faulty_file_system import ERRORS


@dataclass(frozen=True)
class FaultyCall:
    """A kind of save, or a load if there is no ``save_kind``, the number of ranks, and the rank with the faults."""

    save_kind: str
    asynchronous: bool
    ranks: int
    victim: int

    def __str__(self) -> str:
        call = (
            f"{self.save_kind}, {'asynchronous' if self.asynchronous else 'synchronous'}" if self.save_kind else "load"
        )
        return f"{call}; rank {self.victim} of {self.ranks}"


FAULTY_CALLS = (
    FaultyCall("new", asynchronous=False, ranks=1, victim=0),
    FaultyCall("new", asynchronous=True, ranks=1, victim=0),
    FaultyCall("overwrite", asynchronous=False, ranks=1, victim=0),
    FaultyCall("two renames", asynchronous=False, ranks=1, victim=0),
    FaultyCall("retention", asynchronous=True, ranks=1, victim=0),
    FaultyCall("new", asynchronous=False, ranks=3, victim=0),
    FaultyCall("new", asynchronous=False, ranks=3, victim=1),
    FaultyCall("overwrite", asynchronous=True, ranks=3, victim=0),
    FaultyCall("overwrite", asynchronous=True, ranks=3, victim=1),
    FaultyCall("", asynchronous=False, ranks=1, victim=0),
    FaultyCall("", asynchronous=False, ranks=3, victim=0),
    FaultyCall("", asynchronous=False, ranks=3, victim=1),
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


def generate_faults(calls: Sequence[str], faulty_call: FaultyCall) -> Iterator[Fault]:
    """Yield every fault of every call."""
    removed = ("run", "pending directory") if faulty_call.save_kind else ("run", "checkpoint", "file")
    for nth, call in enumerate(calls):
        yield from (Fault(nth, call, kind) for kind in ERRORS[call])
        yield Fault(nth, call, "EIO", forever=True)
        yield from (Fault(nth, call, f"{what} removed") for what in removed)
