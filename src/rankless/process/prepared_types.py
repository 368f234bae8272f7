"""Types that threads decode: msgspec looks at them when their module is imported, and not at their first use.

msgspec 0.22 keeps its knowledge of a type from the first use on. Two threads that use a type for the first time at the
same time can crash the process. Evidence: six threads that decoded new types of 25 fields crashed it (SIGSEGV) within
300 types in every run, and never if a decoder had been made before; and a job that listed a run in an object store,
with threads that read the pointers, crashed once in some thousand starts.

All modules that define types for threads or votes use it: the votes of a background save are in its thread, too. A type
that a thread decodes must have the decorator.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T", bound=type)


def prepared(kind: T) -> T:
    """Decorate a ``Struct`` or a ``NamedTuple`` that is decoded anywhere: an import runs in one thread."""
    msgspec.json.Decoder(kind)
    return kind
