"""The random number generators of this process: Python's, NumPy's, torch's on the CPU and on the accelerator.

:mod:`rankless.state.rank_states` calls it on each rank: captures in the first vote of a save, restores as the last step
of a load. The names of generators are in ``ranks.json``; :func:`seed_generators` must give the same numbers for a text
in all versions.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rankless.engine.io.device_streams import require_no_capture
from rankless.errors import MismatchError

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
    """Raise ``MismatchError`` if this process cannot have a state. Arrays need not be filled yet."""
    for name in generator_names():
        if name in state and not _has_same_form(state[name], _get_state_like(name, state[name])):
            raise MismatchError(
                f"the state of the random number generator {name!r} is of another kind than those of this process: use "
                "the same kind, or pass rng=False to leave the generators as they are"
            )


def _numpy_kinds() -> dict[str, Any]:
    """Return the kinds of NumPy's global generator. ``mtrand.set_bit_generator`` may have chosen any of them.

    A load without generators does not import ``np.random``, which takes 2 MB.
    """
    kinds = (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)
    return {kind.__name__: kind for kind in kinds}


def _get_state_like(name: str, saved: Any) -> Any:
    """Return a state of a generator; for NumPy's one of the same kind as a saved one, if NumPy has this kind."""
    kind = _numpy_kinds().get(str(saved.get("bit_generator"))) if name == NUMPY and isinstance(saved, dict) else None
    return _get_state(name) if kind is None else np.random.RandomState(kind(0)).get_state(legacy=False)


def _has_same_form(saved: Any, current: Any) -> bool:
    if isinstance(current, dict):
        return (
            isinstance(saved, dict)
            and saved.keys() == current.keys()
            and all(_has_same_form(saved[key], current[key]) for key in current)
        )
    if isinstance(current, str):  # the kind of a generator
        return bool(saved == current)
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
        raise MismatchError(f"the state of a random number generator cannot be restored: {error}") from error


def _set_state(name: str, state: Any) -> None:
    if name == PYTHON:
        random.setstate((state["version"], tuple(state["words"].tolist()), state["gauss"]))
    elif name == NUMPY:
        if state["bit_generator"] != _numpy_generator().__class__.__name__:
            np.random.mtrand.set_bit_generator(_numpy_kinds()[state["bit_generator"]](0))
        np.random.set_state(state)  # noqa: NPY002
    elif name == TORCH:
        torch.set_rng_state(state)
    else:
        torch.get_device_module(name).set_rng_state(state)


def _numpy_generator() -> Any:
    """Return the bit generator of NumPy's global generator."""
    return np.random.mtrand.get_bit_generator()


def seed_generators(name: str, text: str) -> None:
    """Seed a generator from a text. Equal texts give equal random numbers, different texts different ones."""
    digest = hashlib.blake2b(text.encode(), digest_size=32).digest()
    if name == PYTHON:
        random.seed(int.from_bytes(digest))
    elif name == NUMPY:
        words = np.frombuffer(digest, "<u4")
        if isinstance(_numpy_generator(), np.random.MT19937):
            np.random.seed(words)  # noqa: NPY002
        else:  # which have no legacy seeding
            np.random.mtrand.set_bit_generator(type(_numpy_generator())(words))
    else:
        number = int.from_bytes(digest[:8]) >> 1
        generator = torch.default_generator if name == TORCH else torch.get_device_module(name)
        generator.manual_seed(number)
