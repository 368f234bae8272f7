"""Metrics of a save, such as ``{"loss": 0.5}``: numbers, or tensors of one element. A save reads these when it is due.

:meth:`rankless.Checkpointer.step` checks and copies metrics on each rank, at each step; a save reads them, on each rank
to check them, and on rank 0 for the manifest. A read of a tensor waits for its device: only a save that is due may do
that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch

from rankless.errors import InvalidArgumentError
from rankless.ondisk.validation import check_number, check_utf8


def copy_metrics(metrics: Any) -> Any:
    """Return metrics as they are now, without the graphs that tensors belong to. Nothing is checked.

    Copies stay on their device, so that nothing waits for it.
    """
    if not isinstance(metrics, Mapping):
        return metrics
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for name, value in metrics.items()
    }


def check_metrics(metrics: object) -> None:
    """Raise ``InvalidArgumentError`` unless these are metrics. No value of a tensor is read."""
    if not isinstance(metrics, Mapping):
        raise InvalidArgumentError(f"metrics must be a dict of numbers by name; got {type(metrics).__qualname__}")
    for name, value in metrics.items():
        if not isinstance(value, Real) and not _has_one_element(value):
            raise InvalidArgumentError(
                f"the metric {name!r} must be a number or a tensor of one element; got {value!r:.80}"
            )


def read_metrics(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Return metrics as the manifest stores them: those that are not finite are ``None``.

    Raises ``InvalidArgumentError``. For example, ``{"loss": nan}`` becomes ``{"loss": None}``.
    """
    check_metrics(metrics)
    numbers = {
        check_utf8(name, "a metric's name"): float(
            check_number(name, value.item() if _has_one_element(value) else value)
        )
        for name, value in metrics.items()
    }
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


def _has_one_element(value: Any) -> bool:
    """Return whether a value is a tensor or an array of NumPy with one element."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return getattr(value, "size", None) == 1 and hasattr(value, "item")
