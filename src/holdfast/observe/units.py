"""Sizes, rates and times as people read them: the same in logs, messages and commands."""

from __future__ import annotations

_UNITS = ("B", "kB", "MB", "GB", "TB")

#: What is shown with three digits as 1000 gets the next unit.
_FULL = 999.5

#: Seconds below which a time is shown in milliseconds.
_SHORT = 0.1


def format_size(nbytes: float) -> str:
    """Format bytes as ``1.23 GB``: three digits and a decimal unit, as in ``max_shard_size``."""
    number, units = nbytes, list(_UNITS)
    while number >= _FULL and len(units) > 1:
        number, units = number / 1000, units[1:]
    digits = 0 if units[0] == "B" else max(0, 3 - len(str(int(number))))
    return f"{number:.{digits}f} {units[0]}"


def format_rate(nbytes: float, seconds: float) -> str:
    """Format bytes that took so many seconds as ``1.23 GB/s``."""
    return f"{format_size(nbytes / seconds)}/s"


def format_seconds(seconds: float) -> str:
    """Format how long something took, as ``1.23 s`` or ``45.6 ms``."""
    return f"{seconds:.2f} s" if seconds >= _SHORT else f"{seconds * 1000:.1f} ms"
