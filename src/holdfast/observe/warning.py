"""Warnings that name the line of the caller, and that the ``holdfast`` logger has, too."""

from __future__ import annotations

import logging
import sys
import warnings

_PACKAGE = __name__.partition(".")[0]

_log = logging.getLogger(_PACKAGE)


def warn_caller(message: str) -> None:
    """Warn whoever called holdfast, however deep in it this is."""
    warnings.warn(message, stacklevel=_levels_to_caller())
    # Without a handler it would be on stderr a second time.
    if _log.hasHandlers():
        _log.warning(message)


def _levels_to_caller() -> int:
    """The ``stacklevel``, for :func:`warn_caller`, of the nearest frame outside of holdfast; in its threads the last one."""
    frame, level = sys._getframe(1), 1  # noqa: SLF001 - what inspect.stack() does, without reading source files
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE:
        frame, level = frame.f_back, level + 1
    return level
