"""Encoding of tensors, arrays, dtypes and devices in trees of plain values.

:mod:`rankless.state.array_decoder` is the other direction.

A save encodes values with it on each rank, in its first vote (:mod:`rankless.state.capture`). The names of tensors and
the tags are in files; the names must not depend on the rank, or ranks would not share a plan.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from rankless.engine.io.tensor_sources import order_dimensions
from rankless.engine.plan.tensor_specs import digest_bytes
from rankless.errors import UnsupportedTensorError
from rankless.ondisk.dtypes import dtype_of_array
from rankless.ondisk.value_files import OWN_STATE
from rankless.ondisk.values import ORDER_SUFFIX, PARAMETER_SUFFIXES, name_tensor
from rankless.state.array_decoder import encode_scalar
from rankless.state.tensor_views import NAMES, check_present, local_tensor, view_of

#: Tensors of at most this many bytes are stored inline in values that are merged from several ranks.
INLINE_BYTES = 64 * 2**10


#: Prefixes of the keys of values that are named by their content.
_BY_CONTENT = ("optimizer", "scheduler")

#: Names a tensor that is stored under a key, given the names that are taken, the key, the tensor, and a suffix.
ArrayNaming = Callable[[Container[str], str, torch.Tensor, str], str]


def name_by_key(taken: Container[str], key: str, tensor: torch.Tensor, suffix: str) -> str:
    """Name a tensor by its key: the :data:`ArrayNaming` of values that one rank stores."""
    del tensor
    return name_tensor(taken, key, suffix)


def name_merged(
    own: Mapping[str, Sequence[Mapping[str, Any]]], taken: Container[str], key: str, tensor: torch.Tensor, suffix: str
) -> str:
    """Name a tensor in values that are merged from several ranks.

    Stages of a pipeline have other tensors at the same place, such as ``optimizer.own.0``: a name that all ranks may
    use must not be a place. Keys of models have the name of a module. ``own`` are the entries of optimizers, by slot:
    they change from save to save, and are named by the optimizer's parameters, so that the plan of the save before
    stays valid. Tensors in settings and in schedulers hardly change, and are named by their content: ranks that have
    equal settings store them once, and :func:`~rankless.state.capture.merge_values` sees that others differ.

    Names are in files, and a load finds tensors by them.
    """
    for slot, entries in own.items():
        for number, entry in enumerate(entries):
            place = f"{slot}.{OWN_STATE}.{number}."
            if key.startswith(place):
                owner = digest_bytes("\0".join(entry["params"]).encode(errors="surrogatepass"), 8).hex()
                return name_tensor(taken, f"{slot}.{OWN_STATE}.{owner}.{key.removeprefix(place)}", suffix)
    kind = next((kind for kind in _BY_CONTENT if key.startswith(kind)), None)
    return name_tensor(taken, key, suffix) if kind is None else f"{kind}.{digest_tensor(tensor)}{suffix}"


def digest_tensor(tensor: torch.Tensor) -> str:
    """Return a digest of the dtype, shape and elements of this rank's part of a tensor."""
    local = local_tensor(tensor.detach()).cpu().resolve_conj().resolve_neg().contiguous()
    form = f"{NAMES[local.dtype]} {list(local.shape)} ".encode()
    data = local.reshape(-1).view(torch.uint8).numpy().tobytes() if local.numel() else b""
    return digest_bytes(form + data).hex()


class ArrayEncoder:
    """An encoder that replaces tensors and arrays in a tree by references. :attr:`tensors` are to be stored, by name.

    Small tensors under keys that begin with one of ``inline`` are encoded in the tree itself.
    """

    def __init__(self, inline: tuple[str, ...] = (), naming: ArrayNaming = name_by_key) -> None:
        self._inline, self._name = inline, naming
        self.tensors: dict[str, torch.Tensor] = {}

    def encode(self, value: object, key: str) -> Any:  # noqa: PLR0911 - one return for each type
        """See :class:`rankless.ondisk.values.ArrayCodec`."""
        if isinstance(value, torch.Tensor):
            return self._encode_tensor(value, key)
        if type(value) is np.ndarray:
            dtype_of_array(value)  # refuses what cannot be stored
            return {"$array": self._store_tensor(torch.from_numpy(np.array(value, order="C")), key)}
        if isinstance(value, np.generic):
            return encode_scalar(value)
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        if type(value) is torch.Size:
            return {"$size": list(value)}
        return NotImplemented

    def decode(self, tag: str, payload: Any) -> Any:
        """Return ``NotImplemented``: this codec only encodes."""
        del tag, payload
        return NotImplemented

    def _encode_tensor(self, tensor: torch.Tensor, key: str) -> Any:
        if isinstance(tensor, DTensor):
            raise UnsupportedTensorError("a DTensor; pass objects that have sharded tensors as model= or optimizer=")
        if type(tensor) not in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}:
            raise UnsupportedTensorError(
                f"a tensor of the class {type(tensor).__qualname__}, which would be loaded as a plain tensor"
            )
        check_present(view_of(tensor, "a tensor"), "a tensor")
        if key.startswith(self._inline):
            order = _find_order(tensor)
            return (
                {"$inline": [*_encode_inline(tensor), *([order] if order else [])]}
                if tensor.nbytes <= INLINE_BYTES
                else {
                    "$tensor": self._store_tensor(tensor, key, "-".join([ORDER_SUFFIX, *map(str, order)]) * bool(order))
                }
            )
        is_parameter = type(tensor) is torch.nn.Parameter
        return {
            "$tensor": self._store_tensor(tensor, key, PARAMETER_SUFFIXES[tensor.requires_grad] if is_parameter else "")
        }

    def _store_tensor(self, tensor: torch.Tensor, key: str, suffix: str = "") -> str:
        name = self._name(self.tensors, key, tensor, suffix)
        self.tensors[name] = tensor.detach()
        return name


def _find_order(tensor: torch.Tensor) -> list[int]:
    """Return the order of a tensor's dimensions in memory: for example ``[1, 0]``; empty for a contiguous tensor."""
    order, usual = order_dimensions(tensor.shape, tensor.stride()), torch.empty(tensor.shape, device="meta")
    return [] if order == order_dimensions(usual.shape, usual.stride()) else order


def _encode_inline(tensor: torch.Tensor) -> list[Any]:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return [NAMES[tensor.dtype], list(tensor.shape), base64.b64encode(flat.numpy().tobytes()).decode()]
