"""Where and how large a run of the benchmarks is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Setting:
    """The folder on the disk that is measured, how often each contender runs, and the bytes of a large state."""

    folder: Path
    rounds: int
    nbytes: int

    @property
    def gigabytes(self) -> str:
        """The size as it stands in titles."""
        return f"{self.nbytes / 1e9:g} GB"
