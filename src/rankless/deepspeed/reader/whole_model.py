"""The whole tensors of a model: its buffers, frozen parameters, and the weights or master weights of the others.

:mod:`rankless.deepspeed.reader.tag_contents` calls it on each rank that opens a checkpoint. Tied parameters must stay
one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rankless.deepspeed.reader.concatenated_tensor import check_ranks, concatenate_ranks
from rankless.deepspeed.reader.model_file import DeepSpeedModelFile
from rankless.deepspeed.reader.zero_partitions import place_in_sub_group
from rankless.errors import CorruptCheckpointError, FormatError
from rankless.formats.stored_tensor import StoredTensor, UnreadableTensor
from rankless.ondisk.read_budget import ReadBudget


@dataclass
class WholeModel:
    """The tensors of a model by name, and other values of its state dict.

    ``copies`` has the weights that the model computes with of each parameter that has master weights.
    """

    tensors: dict[str, Any] = field(default_factory=dict)
    copies: dict[str, StoredTensor] = field(default_factory=dict)


def join_model(
    module: Mapping[str, Any], file: DeepSpeedModelFile, masters: Mapping[str, StoredTensor], *, use_masters: bool
) -> WholeModel:
    """Return the model of ZeRO-1 or 2, or without ZeRO. ``module`` is its state dict, by the names in ``masters``.

    Tied parameters get one tensor. Raises ``CorruptCheckpointError`` if a parameter is missing in the state dict, or
    has another shape in it.
    """
    model = WholeModel()
    masters_by_identity: dict[object, StoredTensor] = {}
    for name, master in masters.items():
        weight = module.get(name)
        if not isinstance(weight, StoredTensor) or weight.info.shape != master.info.shape:
            actual = list(weight.info.shape) if isinstance(weight, StoredTensor) else "no tensor"
            raise CorruptCheckpointError(
                f"{file.path}: the parameter {name!r:.100} has the shape {list(master.info.shape)} in param_shapes, "
                f"and {actual} in the model: the files are from two saves"
            )
        model.copies[name] = weight
        masters_by_identity[weight.identity] = master
    for name, value in module.items():
        is_tensor = isinstance(value, StoredTensor)
        model.tensors[name] = masters_by_identity.get(value.identity, value) if is_tensor and use_masters else value
    return model


def join_divided_model(
    files: Sequence[DeepSpeedModelFile], masters: Mapping[str, StoredTensor], budget: ReadBudget
) -> WholeModel:
    """Return the model of ZeRO-3: master weights, and the frozen parameters that all ranks have parts of.

    ``files`` are the files of all data-parallel ranks, in their order.
    """
    first = files[0]
    frozen = dict(_join_frozen(files, budget)) if first.frozen_shapes else {}
    model = WholeModel()
    for name, value in first.module.items():
        model.tensors[name] = masters.get(name, frozen.get(name, value))
        if model.tensors[name] is value and _is_placeholder(value):
            model.tensors[name] = UnreadableTensor(
                "is divided among ranks, and no file has its parts: it was saved with exclude_frozen_parameters"
            )
    model.tensors |= {name: tensor for name, tensor in {**frozen, **masters}.items() if name not in model.tensors}
    for name, stored_name in first.shared.items():
        if stored_name not in model.tensors:
            raise CorruptCheckpointError(
                f"{first.path}: {name!r:.100} is tied to {stored_name!r:.100}, which is not in the model"
            )
        model.tensors[name] = model.tensors[stored_name]
    return model


def _is_placeholder(value: Any) -> bool:
    """Return whether a tensor stands for a parameter that is divided among ranks."""
    return isinstance(value, StoredTensor) and value.info.shape == (0,)


def _join_frozen(files: Sequence[DeepSpeedModelFile], budget: ReadBudget) -> dict[str, StoredTensor]:
    """Return the frozen parameters of ZeRO-3."""
    first = files[0]
    for file in files[1:]:
        if file.frozen_shapes != first.frozen_shapes or file.frozen.keys() != first.frozen.keys():
            raise CorruptCheckpointError(
                f"{file.path} has other frozen parameters than {first.path}: the files are from two saves"
            )
    return {
        name: _join_fragments(name, shape, files, budget)
        for name, shape in first.frozen_shapes.items()
        if name in first.frozen
    }


def _join_fragments(
    name: str, shape: tuple[int, ...], files: Sequence[DeepSpeedModelFile], budget: ReadBudget
) -> StoredTensor:
    (placed,) = place_in_sub_group({name: shape}, len(files), budget)
    fragments = [file.frozen[name] for file in files]
    placeholder = files[0].module.get(name)
    dtype = placeholder.info.dtype if isinstance(placeholder, StoredTensor) else None
    for file, fragment in zip(files, fragments, strict=True):
        if not isinstance(fragment, StoredTensor) or fragment.info.dtype != (dtype or fragment.info.dtype):
            raise FormatError(
                f"{file.path}: the frozen parameter {name!r:.100} is quantized (zero_quantized_nontrainable_weights), "
                "which rankless does not read: save without it"
            )
    paths, needed = [file.path for file in files], [placed.part] * len(files)
    check_ranks(fragments, paths, needed, f"the part of the frozen parameter {name!r:.100}")
    return concatenate_ranks(placed, fragments)
