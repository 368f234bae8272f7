"""Checksums of file ranges in the formats of other systems, such as entries of zip files.

Loads, conversions and verifications of formats with such checksums collect them
(:mod:`rankless.formats.file_checksums`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple


class RangeChecksum(NamedTuple):
    """The CRC of bytes ``[start, stop)`` of a file. Messages call the range ``name``."""

    file: Path
    start: int
    stop: int
    crc: int
    kind: Literal["CRC-32", "CRC-64"]
    name: str
