"""Checksums of ranges of files, as formats of other systems have them: of entries of zip files, of records."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple


class RangeChecksum(NamedTuple):
    """Bytes ``[start, stop)`` of a file, called ``name`` in messages, have this CRC."""

    file: Path
    start: int
    stop: int
    crc: int
    kind: Literal["CRC-32", "CRC-64"]
    name: str
