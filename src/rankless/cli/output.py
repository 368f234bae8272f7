"""The output of commands: JSON for programs, errors and warnings on stderr.

All commands print with it. Results are on stdout, everything else on stderr: scripts read stdout.
"""

from __future__ import annotations

import json
import sys

from rankless.errors import EmptyRunError, FormatError
from rankless.observe.terminal import escape_control_characters, terminal_console

_HINTS = {
    EmptyRunError: "Pass a checkpoint, or the folder of a run or of published weights.",
    FormatError: "Pass the folder or file of a checkpoint, or the folder of a run.",
}


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
