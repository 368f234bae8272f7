"""How every command speaks: counts, metrics and dates for people, JSON for programs, errors on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime

from holdfast.errors import FormatError, NoCheckpointError
from holdfast.observe.terminal import escape_control_characters, terminal_console

_HINTS = {
    NoCheckpointError: "Name a checkpoint's folder or file, or the folder of a run that has one.",
    FormatError: "Name a checkpoint's folder or file, or the folder of a run.",
}


def human_metrics(metrics: Mapping[str, float | None]) -> str:
    """``val_loss=2.31``; a metric that was not finite has no number."""
    return escape_control_characters(
        " ".join(f"{name}={'n/a' if value is None else f'{value:.5g}'}" for name, value in metrics.items())
    )


def human_time(seconds: float) -> str:
    """Seconds since 1970 as local date and time."""
    try:
        return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):  # what a manifest says may be anything
        return str(seconds)


def format_count(n: int, noun: str) -> str:
    """``1 file``, ``2,000 files``."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def print_json(value: object) -> None:
    """One JSON value: indented where a person looks on, on one line for programs."""
    print(json.dumps(value, indent=2 if sys.stdout.isatty() else None, allow_nan=False))


def format_error_message(error: Exception) -> str:
    """What an error says, without the number that an ``OSError`` puts before it."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error.args[-1]) if error.args else str(error)


def print_error(error: Exception | str, hint: str = "") -> None:
    """An error and what to do about it, on stderr."""
    text = format_error_message(error) if isinstance(error, Exception) else error
    hint = hint or next((hint for kind, hint in _HINTS.items() if isinstance(error, kind)), "")
    err = terminal_console(stderr=True)
    err.print("error:", style="bold red", end=" ")
    err.print("\n".join(escape_control_characters(line) for line in text.splitlines()))
    if hint:
        err.print(hint, style="dim")
