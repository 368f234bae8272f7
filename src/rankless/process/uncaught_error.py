"""The exception that ends this process, as far as it can be known while functions are called at exit.

:class:`~rankless.liveness.watch.Watch` asks it in the main thread, at the end of a block or of the process.
"""

from __future__ import annotations

import sys


def find_uncaught_error() -> BaseException | None:
    """Return the exception that ends this process. ``None`` also if it was ``sys.exit`` in a script.

    Before Python 3.13, a process of :mod:`multiprocessing` calls the functions at exit while it handles the exception.
    Later versions call them after that: then the exception is not known.
    """
    if hasattr(sys, "ps1"):  # an interactive session goes on after an error
        return None
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return None if is_success(error) else error


def is_success(error: BaseException | None) -> bool:
    """Return whether a process or block that ends with this exception ends normally."""
    return error is None or (isinstance(error, SystemExit) and error.code in {None, 0})
