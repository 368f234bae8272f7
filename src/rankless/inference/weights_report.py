"""The result of loading weights into an engine's model.

Each rank has one when the block of :func:`rankless.open_weights` has ended. It is public: the names of its attributes
must stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rankless.observe.units import format_count, format_rate, format_seconds, format_size


@dataclass(frozen=True)
class WeightsReport:
    """A report of one rank's reads of the weights of a model.

    Attributes:
        path: The checkpoint, the folder or the file.
        needed: The size in bytes of the elements that the model's loader asked for.
        read: The number of bytes that were read: with the bytes between needed ones that are too near to be left out.
        verified: Whether every byte that any rank used was compared with a CRC of the files, or with the SHA-256 of the
            Hub.
        seconds: The time from the beginning of the block to its end.
        computed: The tensors with elements that the loader computed with instead of copying them, each with the first
            operation. Their elements were read when they were used.
        whole: The tensors that the loader changed in place, each with the first operation. They were read whole.
    """

    path: Path
    needed: int
    read: int
    verified: bool
    seconds: float
    computed: Mapping[str, str]
    whole: Mapping[str, str]

    def __str__(self) -> str:
        notes = [
            f"{format_size(self.needed)} needed, {format_size(self.read)} read",
            "verified" if self.verified else "not verified",
            f"{format_seconds(self.seconds)} ({format_rate(self.read, self.seconds)} a rank)",
        ]
        for tensors, verb in ((self.computed, "computed with"), (self.whole, "changed, and read whole")):
            if tensors:
                name, operation = next(iter(tensors.items()))
                notes.append(f"{verb}: {format_count(len(tensors), 'tensor')}, such as {name} ({operation})")
        return "; ".join(notes)
