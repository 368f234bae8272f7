"""The random number generators of this process: Python's, NumPy's, torch's on the CPU and on the accelerator."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from holdfast.errors import DamagedError


def capture() -> dict[str, Any]:
    """The state of every generator, as plain values and arrays."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002 - the global generator is the one to save
        "torch": torch.get_rng_state(),
    }
    accelerator = _accelerator()
    if accelerator is not None:
        state[accelerator] = torch.get_device_module(accelerator).get_rng_state()
    return state


def check(state: Mapping[str, Any]) -> None:
    """Raise ``DamagedError`` where a state is not of the form of :func:`capture`'s; arrays need not be filled yet."""
    for name, own in capture().items():
        if (name in state or name in {"python", "numpy", "torch"}) and not _alike(state.get(name), own):
            raise DamagedError(f"the state of the random number generator {name!r} is not one")


def _alike(found: Any, own: Any) -> bool:
    if isinstance(own, dict):
        return (
            isinstance(found, dict) and found.keys() == own.keys() and all(_alike(found[key], own[key]) for key in own)
        )
    if isinstance(own, np.ndarray | torch.Tensor):
        return type(found) is type(own) and found.dtype == own.dtype and found.shape == own.shape
    return type(found) is type(own) or {type(found), type(own)} == {float, type(None)}


def restore(state: Mapping[str, Any]) -> None:
    """Put every generator that the state speaks of back; those of an accelerator that is not here are passed over."""
    try:
        _restore(state)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise DamagedError(f"the state of a random number generator is damaged: {error}") from error


def _restore(state: Mapping[str, Any]) -> None:
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    accelerator = _accelerator()
    if accelerator is not None and accelerator in state:
        torch.get_device_module(accelerator).set_rng_state(state[accelerator])


def _accelerator() -> str | None:
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else device.type
