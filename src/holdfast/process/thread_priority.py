"""The priority of threads that work in the background, so that training has precedence."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

#: Added to the niceness of a thread.
_NICENESS = 10


def lower_priority() -> None:
    """Lower the priority of this thread, and of the threads that it starts."""
    with suppress(OSError, AttributeError):  # only some systems have priorities for single threads
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)
