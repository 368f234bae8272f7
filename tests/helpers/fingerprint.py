"""Fingerprints of trees of values, which are equal only for equal types and bits."""

from __future__ import annotations

import collections
import datetime as dt
import math
import struct
from argparse import Namespace
from typing import Any

import numpy as np
import torch


def fingerprint(value: Any) -> Any:
    """Equal only for values of equal types and equal bits; sets without an order, all else with it."""
    kind = type(value)
    return (kind.__name__, _content(kind, value))


def _content(kind: type, value: Any) -> Any:  # noqa: C901, PLR0911 - one line for each kind of type
    if kind is float:
        return "nan" if math.isnan(value) else struct.pack("d", value)
    if kind is complex:
        return [fingerprint(value.real), fingerprint(value.imag)]
    if kind in {list, tuple, torch.Size}:
        return [fingerprint(item) for item in value]
    if kind in {set, frozenset}:
        return sorted(map(repr, map(fingerprint, value)))
    if kind in {dict, collections.OrderedDict, collections.Counter}:
        return [(fingerprint(key), fingerprint(item)) for key, item in value.items()]
    if kind is collections.deque:
        return value.maxlen, [fingerprint(item) for item in value]
    if kind is Namespace:
        return fingerprint(vars(value))
    if kind in {dt.datetime, dt.time}:
        return repr(value), value.fold
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.name, value.shape, value.tobytes()
    if kind is torch.Tensor:
        return value.dtype, value.shape, value.contiguous().view(-1).view(torch.uint8).tolist()
    return repr(value)
