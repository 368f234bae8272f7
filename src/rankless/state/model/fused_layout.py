"""The layout of a model's stored tensors: the layout of transformers for its models, else the layout in memory.

Saves of a model in the layout of transformers ask it on each rank (``components/``), training saves on rank 0, for
their file with the layout (:mod:`rankless.save.hub_layout`). The result decides the bytes of files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from torch import nn

from rankless.engine.plan.split_tensors import Splits, whole_splits
from rankless.ondisk.data_files import TensorInfo
from rankless.state.model.hf_config import unwrap_model
from rankless.state.model.hf_optional_tensors import names_not_saved


class StoredLayout(msgspec.Struct, frozen=True):
    """The tensors that are stored for a model, by name, and where the elements of each tensor in memory are stored."""

    tensors: Mapping[str, TensorInfo]
    splits: Mapping[str, Splits]


def stored_layout(model: object, infos: Mapping[str, TensorInfo]) -> StoredLayout:
    """Return the tensors that transformers stores for a model, given the name, dtype and shape of the model's tensors.

    For other models the tensors are stored unchanged; some models have tensors that are not stored. Raises
    ``UnsupportedTensorError`` if the conversion does more than move elements, in few enough ranges.
    """
    module: Any = unwrap_model(model) if isinstance(model, nn.Module) else None
    infos = {name: info for name, info in infos.items() if name not in names_not_saved(module)}
    unchanged = StoredLayout(infos, {name: whole_splits([name], info.shape) for name, info in infos.items()})
    if not hasattr(getattr(module, "config", None), "model_type"):
        return unchanged
    try:
        import transformers.core_model_loading  # noqa: F401, PLC0415 - optional dependency
    except ImportError:  # before version 5 tensors were stored unchanged
        return unchanged
    from rankless.state.model.hf_conversion import convert_infos  # noqa: PLC0415 - imports transformers

    tensors, splits = convert_infos(module, infos)
    return StoredLayout(tensors, splits)
