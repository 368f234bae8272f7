"""The number of files that may be open at a time."""

from __future__ import annotations

import resource

#: The most files that one reader or writer of many files keeps open.
_MOST = 192

#: The part of the limit of the process that one reader or writer takes: each file has up to two descriptors, and a
#: conversion, or two saves at a time, have several readers and writers.
_SHARE = 8


def max_open_files() -> int:
    """Return how many files one reader or writer of many files may keep open, each with up to two descriptors.

    It depends on the limit of the process (``ulimit -n``), which is 1,024 on most systems.
    """
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft_limit == resource.RLIM_INFINITY else max(1, min(_MOST, soft_limit // _SHARE))
