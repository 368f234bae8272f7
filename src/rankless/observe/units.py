"""Human-readable sizes, rates, times and metrics, in one format for logs, messages, commands and notebooks.

Messages, commands and reports format with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

_UNITS = ("B", "kB", "MB", "GB", "TB")

#: Numbers from here on, which would be shown as 1000, are shown in the next unit.
_NEXT_UNIT = 999.5

#: Shorter times, in seconds, are shown in milliseconds.
_MIN_SECONDS = 0.1


def format_size(nbytes: float) -> str:
    """Format bytes as ``1.23 GB``: three digits and a decimal unit, as in ``max_shard_size``."""
    value, units = nbytes, list(_UNITS)
    while value >= _NEXT_UNIT and len(units) > 1:
        value, units = value / 1000, units[1:]
    digits = 0 if units[0] == "B" else max(0, 3 - len(str(int(value))))
    return f"{value:.{digits}f} {units[0]}"


def format_rate(nbytes: float, seconds: float) -> str:
    """Format the rate of ``nbytes`` in ``seconds`` as ``1.23 GB/s``."""
    return f"{format_size(nbytes / seconds)}/s"


def format_seconds(seconds: float) -> str:
    """Format a duration as ``1.23 s`` or ``45.6 ms``."""
    return f"{seconds:.2f} s" if seconds >= _MIN_SECONDS else f"{seconds * 1000:.1f} ms"


def format_count(n: int, noun: str) -> str:
    """Format a count with a noun: ``1 file``, ``2,000 files``."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def format_time(seconds: float) -> str:
    """Format seconds since 1970 as local date and time. For example, ``2026-11-27 11:40``."""
    try:
        return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):  # a manifest may contain any number
        return str(seconds)


#: The units of ages, the smallest first, with their seconds.
_AGES = (("s", 1), ("m", 60), ("h", 3_600), ("d", 86_400))


def format_age(seconds: float) -> str:
    """Format the age of a checkpoint: ``5m``. It is empty if the clock of the host that saved it is ahead."""
    if seconds < 0:
        return ""
    unit, size = next(entry for entry in reversed(_AGES) if seconds >= 2 * entry[1] or entry[1] == 1)
    return f"{seconds // size:,.0f}{unit}"


def format_metrics(metrics: Mapping[str, float | None]) -> str:
    """Format metrics as ``val_loss=2.31``; one that was not finite is ``n/a``. Their names are not escaped."""
    return " ".join(f"{name}={'n/a' if value is None else f'{value:.5g}'}" for name, value in metrics.items())
