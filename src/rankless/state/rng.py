"""The random number generators of this process: Python's, NumPy's, torch's on the CPU and on the accelerator."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rankless.engine.io.device_streams import require_no_capture
from rankless.errors import CorruptCheckpointError

#: The generators that every process has.
PYTHON, NUMPY, TORCH = "python", "numpy", "torch"
EVERYWHERE = (PYTHON, NUMPY, TORCH)


def generator_names() -> list[str]:
    """Return the names of this process's generators. The accelerator's is named by its device type."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return [*EVERYWHERE, *([] if accelerator is None else [accelerator.type])]


def capture_generators() -> dict[str, Any]:
    """Return the state of every generator, as plain values and arrays."""
    return {name: _get_state(name) for name in generator_names()}


def _get_state(name: str) -> Any:
    if name == PYTHON:
        version, words, gauss = random.getstate()
        return {"version": version, "words": np.array(words, np.uint32), "gauss": gauss}
    if name == NUMPY:
        return np.random.get_state(legacy=False)  # noqa: NPY002 - the global generator is the one to save
    if name == TORCH:
        return torch.get_rng_state()
    require_no_capture(name)
    return torch.get_device_module(name).get_rng_state()


def check_generators(state: Mapping[str, Any]) -> None:
    """Raise ``CorruptCheckpointError`` if a state does not have the form of :func:`capture_generators`'s.

    Arrays need not be filled yet.
    """
    for name, current in capture_generators().items():
        if name in state and not _has_same_form(state[name], current):
            raise CorruptCheckpointError(f"the state of the random number generator {name!r} has an unexpected form")


def _has_same_form(saved: Any, current: Any) -> bool:
    if isinstance(current, dict):
        return (
            isinstance(saved, dict)
            and saved.keys() == current.keys()
            and all(_has_same_form(saved[key], current[key]) for key in current)
        )
    if isinstance(current, np.ndarray | torch.Tensor):
        return type(saved) is type(current) and saved.dtype == current.dtype and saved.shape == current.shape
    return type(saved) is type(current) or {type(saved), type(current)} == {float, type(None)}


def restore_generators(state: Mapping[str, Any]) -> None:
    """Restore every generator that ``state`` contains. States of an accelerator that is not present are skipped."""
    try:
        for name in generator_names():
            if name in state:
                _set_state(name, state[name])
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise CorruptCheckpointError(f"the state of a random number generator is corrupt: {error}") from error


def _set_state(name: str, state: Any) -> None:
    if name == PYTHON:
        random.setstate((state["version"], tuple(state["words"].tolist()), state["gauss"]))
    elif name == NUMPY:
        np.random.set_state(state)  # noqa: NPY002
    elif name == TORCH:
        torch.set_rng_state(state)
    else:
        torch.get_device_module(name).set_rng_state(state)


def seed_generators(name: str, text: str) -> None:
    """Seed a generator from a text. Equal texts give equal random numbers, different texts different ones."""
    digest = hashlib.blake2b(text.encode(), digest_size=32).digest()
    if name == PYTHON:
        random.seed(int.from_bytes(digest))
    elif name == NUMPY:
        np.random.seed(np.frombuffer(digest, "<u4"))  # noqa: NPY002
    else:
        number = int.from_bytes(digest[:8]) >> 1
        generator = torch.default_generator if name == TORCH else torch.get_device_module(name)
        generator.manual_seed(number)
