"""The states of one group of ranks in one object: ``dp_zero_gather_scatter``, and ``distrib_optim.pt`` of ``torch``.

The readers of ``torch_dist`` and ``torch`` call it on each rank that opens a checkpoint with an optimizer. The keys are
Megatron's; an unknown form must be refused.
"""

from __future__ import annotations

from typing import Any

from rankless.errors import FormatError
from rankless.formats.torchfile.torch_placeholders import TorchTensor
from rankless.megatron.reader.bucket_search import SKIP
from rankless.megatron.reader.flat_buffers import FlatBuffer, FlatTensor

#: The key that says that each buffer is one tensor. Before 2024 each bucket of each rank was one.
_COALESCED = "buckets_coalesced"

_MASTER, _STATES = "param", ("exp_avg", "exp_avg_sq")


def buffers_of_param_state(tree: Any, label: str) -> list[FlatBuffer]:
    """Return the buffers in an object: ``{number: {dtypes: {"param": tensor, "exp_avg": tensor, …}}}``.

    Raises ``FormatError`` if the object has another form.
    """
    if not isinstance(tree, dict) or tree.get(_COALESCED) is not True:
        raise FormatError(
            f"{label} has its states by bucket, as Megatron wrote them before 2024, which is not read; {SKIP}"
        )
    buffers = []
    for number in sorted(key for key in tree if type(key) is int):
        for dtypes, states in tree[number].items() if isinstance(tree[number], dict) else ():
            buffers.append(_make_buffer(states, f"{label}, buffer {number} of {dtypes!s:.80}"))
    if len(buffers) < 1:
        raise FormatError(f"{label} has no buffers; {SKIP}")
    return buffers


def _make_buffer(states: Any, label: str) -> FlatBuffer:
    tensors = {
        name: value
        for name, value in (states.items() if isinstance(states, dict) else ())
        if isinstance(value, TorchTensor)
    }
    is_flat = all(tensor.info.shape and tensor.strides == (1,) for tensor in tensors.values())
    if _MASTER not in tensors or not is_flat or not tensors.keys() <= {_MASTER, *_STATES}:
        raise FormatError(
            f"{label} has the states {', '.join(sorted(map(str, tensors)))[:100]}; rankless reads flat tensors "
            f"{_MASTER}, {', '.join(_STATES)}; {SKIP}"
        )
    flat = {name: FlatTensor.from_torch(tensor) for name, tensor in tensors.items()}
    return FlatBuffer(label, flat.pop(_MASTER), flat, has_edges=False)
