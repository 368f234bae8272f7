"""The output of commands: counts, metrics and dates for people, JSON for programs, errors on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime

from holdfast.errors import FormatError, NoCheckpointError
from holdfast.observe.terminal import escape_control_characters, terminal_console

_HINTS = {
    NoCheckpointError: "Pass the folder or file of a checkpoint, or the folder of a run that has one.",
    FormatError: "Pass the folder or file of a checkpoint, or the folder of a run.",
}


def format_metrics(metrics: Mapping[str, float | None]) -> str:
    """Format metrics as ``val_loss=2.31``; one that was not finite is ``n/a``."""
    return escape_control_characters(
        " ".join(f"{name}={'n/a' if value is None else f'{value:.5g}'}" for name, value in metrics.items())
    )


def format_time(seconds: float) -> str:
    """Format seconds since 1970 as local date and time."""
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


def print_json(value: object) -> None:
    """Print a JSON value, indented on a terminal and on one line in a pipe."""
    print(json.dumps(value, indent=2 if sys.stdout.isatty() else None, allow_nan=False))


def format_error_message(error: Exception) -> str:
    """Return the message of an error, without the number of an ``OSError``."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error.args[-1]) if error.args else str(error)


def print_warning(message: Warning | str) -> None:
    """Print a warning on stderr."""
    err = terminal_console(stderr=True)
    err.print("warning:", style="bold yellow", end=" ")
    err.print("\n".join(escape_control_characters(line) for line in str(message).splitlines()))


def print_error(error: Exception | str, hint: str = "") -> None:
    """Print an error, and a hint how to fix it, on stderr."""
    text = format_error_message(error) if isinstance(error, Exception) else error
    hint = hint or next((hint for kind, hint in _HINTS.items() if isinstance(error, kind)), "")
    err = terminal_console(stderr=True)
    err.print("error:", style="bold red", end=" ")
    err.print("\n".join(escape_control_characters(line) for line in text.splitlines()))
    if hint:
        err.print(hint, style="dim")
