"""The directory and the size of a benchmark run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Setting:
    """The directory on the measured disk, the rounds of each contender, and the bytes of a large state."""

    folder: Path
    rounds: int
    nbytes: int

    @property
    def gigabytes(self) -> str:
        """The size, as shown in titles."""
        return f"{self.nbytes / 1e9:g} GB"
