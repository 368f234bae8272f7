"""The states of random number generators as Accelerate and the ``Trainer`` save them, in the form of rankless's own.

:mod:`rankless.accelerate.reader.rank_values` converts with it, on each rank that opens a folder. Rankless's own
checkpoints have the same form: a load restores both alike.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rankless.formats.pickles.numpy_arrays import as_plain_array
from rankless.formats.pickles.unpickler import OpaqueObject
from rankless.formats.stored_tensor import InlineTensor, StoredTensor
from rankless.ondisk.data_files import TensorInfo

#: The keys of the generators that every process has: Accelerate's, the ``Trainer``'s, and rankless's.
_PYTHON, _NUMPY, _TORCH = (
    ("random_state", "python", "python"),
    ("numpy_random_seed", "numpy", "numpy"),
    ("torch_manual_seed", "cpu", "torch"),
)

#: The names of accelerators. Accelerate's keys are ``torch_cuda_manual_seed`` and so on.
_ACCELERATORS = ("cuda", "xpu", "mlu", "musa", "hpu", "npu")

#: The version of Python's state, and the number of its words.
_VERSION, _WORDS = 3, 625

#: The number of fields of NumPy's state, and its number of words.
_FIELDS, _KEYS = 5, 624


@dataclass(frozen=True)
class StoredArray:
    """A tensor that is a NumPy array in the values."""

    tensor: StoredTensor


def convert_generators(tree: Any, rank: int) -> dict[str, Any]:
    """Return the states of one rank's generators by their names, with stored tensors and arrays.

    Raises ``ValueError`` with a clause for messages if a state has an unexpected form.
    """
    if not isinstance(tree, dict):
        raise ValueError("is not a dict")  # noqa: TRY004 - the file is wrong, not the call
    states = {
        "python": _convert_python(_get_state(tree, _PYTHON)),
        "numpy": _convert_numpy(_get_state(tree, _NUMPY)),
        "torch": _check_torch(_get_state(tree, _TORCH)),
    }
    for name in _ACCELERATORS:
        state = tree.get(f"torch_{name}_manual_seed", tree.get(name))
        if isinstance(state, list) and state:  # of all devices of the host
            state = state[rank % len(state)]
        if state is not None and state != []:
            states[name] = _check_torch(state)
    return states


def _get_state(tree: Mapping[Any, Any], keys: tuple[str, str, str]) -> Any:
    key = next((key for key in keys[:2] if key in tree), None)
    if key is None:
        raise ValueError(f"has no state of {keys[2]}'s generator")
    return tree[key]


def _convert_python(state: Any) -> dict[str, Any]:
    try:
        version, words, gauss = state
        data = struct.pack(f"<{_WORDS}I", *words)
    except (TypeError, ValueError, struct.error) as error:
        raise ValueError("has a state of Python's generator of an unexpected form") from error
    if version != _VERSION or not isinstance(gauss, float | None):
        raise ValueError("has a state of Python's generator of an unexpected form")
    return {"version": version, "words": StoredArray(InlineTensor(TensorInfo("U32", (_WORDS,)), data)), "gauss": gauss}


def _convert_numpy(state: Any) -> dict[str, Any]:
    is_tuple = isinstance(state, tuple) and len(state) == _FIELDS and isinstance(state[1], OpaqueObject)
    if not is_tuple or state[0] != "MT19937" or type(state[2]) is not int or type(state[3]) is not int:
        raise ValueError("has a state of NumPy's generator of an unexpected form")
    dtype, shape, data = as_plain_array(state[1])
    if (dtype, shape) != ("uint32", (_KEYS,)) or type(state[4]) is not float:
        raise ValueError("has a state of NumPy's generator of an unexpected form")
    key = StoredArray(InlineTensor(TensorInfo("U32", (_KEYS,)), data))
    return {
        "bit_generator": state[0],
        "state": {"key": key, "pos": state[2]},
        "has_gauss": state[3],
        "gauss": state[4],
    }


def _check_torch(state: Any) -> StoredTensor:
    if not isinstance(state, StoredTensor) or state.info.dtype != "U8" or len(state.info.shape) != 1:
        raise ValueError("has a state of torch's generator that is not a list of bytes")
    return state
