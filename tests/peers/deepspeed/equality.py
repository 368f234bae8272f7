"""Comparison of recorded states, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.helpers.equality import equal_bits
from tests.peers.deepspeed.launch import Record


def differing(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that are not equal bit for bit, or that one side lacks."""
    names = sorted(first.keys() | second.keys())
    return [n for n in names if n not in first or n not in second or not equal_bits(first[n], second[n])]


def differing_values(first: Record, second: Record, points: tuple[str, str]) -> dict[str, tuple[Any, Any]]:
    """Return the values that differ, without counters that depend on the number of ranks or on the process."""
    left, right = first.values[points[0]], second.values[points[1]]
    names = left.keys() - {"global_samples", "micro_steps", "scale", "scale_iteration"}
    return {name: (left[name], right[name]) for name in names if left[name] != right[name]}
