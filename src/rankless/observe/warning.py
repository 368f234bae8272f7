"""Warnings that name the line of the caller, and that are also logged by the ``rankless`` logger.

Any rank and any thread calls it. A warning may be an error: so call :func:`warn_caller` only where an error becomes
common in a vote, or on all ranks alike.
"""

from __future__ import annotations

import logging
import sys
import warnings

_PACKAGE = __name__.partition(".")[0]

#: The packages with frames that are not the caller's: ``contextlib`` is between frames of rankless.
_INNER = frozenset({_PACKAGE, "contextlib"})

_log = logging.getLogger(_PACKAGE)


def warn_caller(message: str) -> None:
    """Issue a warning for the line that called rankless, from any depth of calls."""
    warnings.warn(message, stacklevel=_levels_to_caller())
    # Without a handler, logging would print it to stderr a second time.
    if _log.hasHandlers():
        _log.warning(message)


def warn_or_log(message: str) -> None:
    """Issue a warning as :func:`warn_caller` does. If warnings are errors, log it instead.

    For work that one rank does alone after the last vote: if it raised, the others would wait for it in the next one.
    """
    try:
        warn_caller(message)
    except Warning:
        _log.error(message)


def _levels_to_caller() -> int:
    """Return the ``stacklevel`` of the nearest frame outside of rankless; in rankless's threads, of the last frame."""
    frame, level = sys._getframe(1), 1  # noqa: SLF001 - like inspect.stack(), without reading source files
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _INNER:
        frame, level = frame.f_back, level + 1
    return level
