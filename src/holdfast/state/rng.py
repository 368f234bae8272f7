"""The random number generators of this process: Python's, NumPy's, torch's on the CPU and on the accelerator."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from holdfast.errors import CorruptCheckpointError

#: The generators that every process has.
PYTHON, NUMPY, TORCH = "python", "numpy", "torch"
EVERYWHERE = (PYTHON, NUMPY, TORCH)


def generator_names() -> list[str]:
    """The generators of this process; the accelerator's has the name of its kind."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return [*EVERYWHERE, *([] if accelerator is None else [accelerator.type])]


def capture_generators() -> dict[str, Any]:
    """The state of every generator, as plain values and arrays."""
    return {name: _state(name) for name in generator_names()}


def _state(name: str) -> Any:
    if name == PYTHON:
        version, words, gauss = random.getstate()
        return {"version": version, "words": np.array(words, np.uint32), "gauss": gauss}
    if name == NUMPY:
        return np.random.get_state(legacy=False)  # noqa: NPY002 - the global generator is the one to save
    return torch.get_rng_state() if name == TORCH else torch.get_device_module(name).get_rng_state()


def check_generators(state: Mapping[str, Any]) -> None:
    """Raise ``CorruptCheckpointError`` where a state is not of the form of :func:`capture_generators`'s; arrays need not be filled yet."""
    for name, own in capture_generators().items():
        if name in state and not _alike(state[name], own):
            raise CorruptCheckpointError(f"the state of the random number generator {name!r} is not one")


def _alike(found: Any, own: Any) -> bool:
    if isinstance(own, dict):
        return (
            isinstance(found, dict) and found.keys() == own.keys() and all(_alike(found[key], own[key]) for key in own)
        )
    if isinstance(own, np.ndarray | torch.Tensor):
        return type(found) is type(own) and found.dtype == own.dtype and found.shape == own.shape
    return type(found) is type(own) or {type(found), type(own)} == {float, type(None)}


def restore_generators(state: Mapping[str, Any]) -> None:
    """Put every generator that the state speaks of back; those of an accelerator that is not here are passed over."""
    try:
        for name in generator_names():
            if name in state:
                _put(name, state[name])
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise CorruptCheckpointError(f"the state of a random number generator is damaged: {error}") from error


def _put(name: str, state: Any) -> None:
    if name == PYTHON:
        random.setstate((state["version"], tuple(state["words"].tolist()), state["gauss"]))
    elif name == NUMPY:
        np.random.set_state(state)  # noqa: NPY002
    elif name == TORCH:
        torch.set_rng_state(state)
    else:
        torch.get_device_module(name).set_rng_state(state)


def seed_generators(name: str, text: str) -> None:
    """Start a generator anew: from equal texts it draws equal numbers, from others others."""
    digest = hashlib.blake2b(text.encode(), digest_size=32).digest()
    if name == PYTHON:
        random.seed(int.from_bytes(digest))
    elif name == NUMPY:
        np.random.seed(np.frombuffer(digest, "<u4"))  # noqa: NPY002
    else:
        number = int.from_bytes(digest[:8]) >> 1
        generator = torch.default_generator if name == TORCH else torch.get_device_module(name)
        generator.manual_seed(number)
