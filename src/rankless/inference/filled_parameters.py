"""The check that a model's parameters were filled as a whole.

Engines join stored tensors, such as queries, keys and values, in one parameter. If a file lacks one of them, the
engine's own loader leaves memory in it that was never written, and the model answers nonsense.

The loaders of vLLM and SGLang call it on each rank, before their blocks end. The vote of a block's end makes its error
common.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rankless.errors import MismatchError
from rankless.inference.open_weights import ModelWeights
from rankless.observe.units import format_count, format_size


def check_filled(model: torch.nn.Module, opened: Sequence[ModelWeights]) -> None:
    """Raise ``MismatchError`` if a loader has written a part of a parameter only. Call it at the end of the blocks.

    Any write counts, such as zeros into the rows of a padded vocabulary. Parameters without any write are left to the
    engine: it may have values of its own for them.
    """
    partly = []
    for name, parameter in model.named_parameters():
        written = 0 if parameter.is_meta else sum(weights.count_written(parameter) for weights in opened)
        if 0 < written < parameter.nbytes:
            partly.append((name, written, parameter.nbytes))
    if partly:
        name, written, nbytes = partly[0]
        more = f", and parts of {format_count(len(partly) - 1, 'other parameter')}" if len(partly) > 1 else ""
        raise MismatchError(
            f"the weights in {opened[0].path} lack a part of {name!r}: they fill {format_size(written)} of its "
            f"{format_size(nbytes)}{more}"
        )
