"""Names of the tensors of single layers and experts. Megatron stacks equal layers: the first dimension counts them.

The readers of iterations call it on each rank that opens a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rankless.formats.chunked_tensor import ChunkedTensor
from rankless.formats.chunked_tensor_slices import Chunks, JoinedTensor, unstack_slices
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.read_budget import ReadBudget

#: A tensor of all layers, and one of all experts of a layer.
_LAYERS = re.compile(r"((?:[^.]+\.)*layers)\.(?!\d)(.+)")
_EXPERTS = re.compile(r"(.+\.experts)\.experts\.(?!\d)(.+)")

#: The number of a layer in a name.
_NUMBER = re.compile(r"(?:[^.]+\.)*?layers\.(\d{1,6})\.")


#: The prefixes of the modules around a model, in NeMo and in Megatron-FSDP.
_WRAPPERS = re.compile(r"(?:model\.|module\.){1,5}(?=(?:embedding|decoder|output_layer|encoder|mtp)\.)")


def strip_wrappers(name: str) -> str:
    """Return a name without the prefixes of wrappers around the model.

    For example, ``model.module.decoder.layers.0.weight`` becomes ``decoder.layers.0.weight``.
    """
    match = _WRAPPERS.match(name)
    return name if match is None else name[match.end() :]


def layer_of(name: str) -> int | None:
    """Return the number of the layer in a name, or ``None``. For example, 3 for ``decoder.layers.3.weight``."""
    match = _NUMBER.match(name)
    return None if match is None else int(match[1])


def unstack_tensor(name: str, stacked: ChunkedTensor, budget: ReadBudget) -> Iterator[tuple[str, JoinedTensor]]:
    """Yield the tensor of each layer and expert, with its name: ``decoder.layers.3.mlp.linear_fc1.weight``."""
    yield from _unstack(name, stacked.info.dtype, stacked.info.shape, stacked.chunks, budget)


def _unstack(
    name: str, dtype: str, shape: tuple[int, ...], chunks: Chunks, budget: ReadBudget
) -> Iterator[tuple[str, JoinedTensor]]:
    if shape and (match := _LAYERS.fullmatch(name)):
        before, after = f"{match[1]}.", f".{match[2]}"
    elif shape and (match := _EXPERTS.fullmatch(name)):
        before, after = f"{match[1]}.local_experts.", f".{match[2]}"
    else:
        yield name, JoinedTensor(TensorInfo(dtype, shape), chunks)
        return
    by_index = unstack_slices(chunks, budget)
    for index in sorted(by_index):
        yield from _unstack(f"{before}{index}{after}", dtype, shape[1:], by_index[index], budget)
