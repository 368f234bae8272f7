"""The names of tensors in the files of one pipeline stage. Its layers are numbered from zero on.

The readers of ``torch`` and ``fsdp_dtensor`` rename with it, on each rank. The results must be the same names as in
``torch_dist``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

#: A tensor of a layer of the decoder.
_LAYER = re.compile(r"decoder\.layers\.(\d{1,6})\.(.+)")

#: The names of norms before they belong to the linear layer that follows, as they do in ``torch_dist``.
_NORMS = {
    "input_layernorm.": ("self_attention.linear_qkv.layer_norm_", "self_attention.linear_qkv.weight"),
    "pre_mlp_layernorm.": ("mlp.linear_fc1.layer_norm_", "mlp.linear_fc1.weight"),
}


class StageNames:
    """The names of the tensors of a stage. Its first layer is number ``first_layer`` of the model."""

    def __init__(self, names: Collection[str], first_layer: int) -> None:
        self._names, self._first_layer = frozenset(names), first_layer

    @staticmethod
    def count_layers(names: Iterable[str]) -> int:
        """Return the number of layers that have tensors."""
        return len({match[1] for name in names if (match := _LAYER.fullmatch(name))})

    def rename(self, name: str) -> str:
        """Return the name that a tensor has in ``torch_dist``, with the layer's number in the model.

        For example, with ``first_layer`` 4, layer 0 of the stage becomes layer 4.
        """
        match = _LAYER.fullmatch(name)
        if match is None:
            return name
        inner = match[2]
        for norm, (joined, linear) in _NORMS.items():
            if inner.startswith(norm) and f"decoder.layers.{match[1]}.{linear}" in self._names:
                inner = joined + inner.removeprefix(norm)
        return f"decoder.layers.{self._first_layer + int(match[1])}.{inner}"
