"""The verb ``dequantise``: quantized weights become floating-point numbers, part by part, without their scales."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from rankless.edits.cast import parse_dtype
from rankless.edits.catalog import MODEL, Catalog, Change, Parameter, map_parameters
from rankless.edits.config_parts import set_dtype
from rankless.edits.quantized_formulas import MicroScaled, Scaled
from rankless.edits.row_rules import describe_size
from rankless.errors import InvalidArgumentError, UnsupportedTensorError
from rankless.formats.edited_reader import EditedTensor
from rankless.ondisk.data_files import TensorInfo

#: The dtypes of weights with scales: FP8.
_FP8 = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})

#: The endings that the name of the scales has after the name of the weight.
_SCALES = ("_scale_inv", "_scale")

#: The endings that the names of the tensors of MXFP4 have after the name of the weight.
_BLOCKS, _EXPONENTS = "_blocks", "_scales"

#: Scales of activations have fewer dimensions than a weight.
_MATRIX = 2

#: The dimensions of blocks: experts, rows, groups, bytes. Each byte has two values.
_DIMENSIONS, _PER_BYTE = 4, 2

#: The ends of names of scales of activations, which weights of full precision do not have.
_ACTIVATIONS = (".input_scale", ".activation_scale", ".k_scale", ".v_scale")

#: The key of the method and the block size in ``config.json``.
_QUANTIZATION = "quantization_config"


class Dequantise(msgspec.Struct, frozen=True, tag_field="verb", tag="dequantise", forbid_unknown_fields=True):
    """Turn FP8 weights with scales, and MXFP4 weights, into floating-point numbers.

    It knows blocks with a scale each, as DeepSeek has them, one scale for each row or tensor, and gpt-oss' MXFP4.

    Args:
        dtype: The name of the new dtype in torch.
    """

    dtype: str = "bfloat16"

    def apply(self, catalog: Catalog) -> Catalog:
        """Return the catalog without quantized weights. Raises ``UnsupportedTensorError`` for one that has no scale."""
        dtype = parse_dtype(self.dtype)
        models = {group: _Quantised.find(catalog, group, dtype) for group in catalog.groups_of(MODEL)}
        if not any(model.weights for model in models.values()):
            raise InvalidArgumentError(f"dequantise: {catalog.label} has no FP8 weights and none in MXFP4")
        changes: list[Change] = []

        def rename(name: str) -> Sequence[str]:
            renamed = [model.rename(name) for model in models.values() if name in model.names]
            return renamed[0] if renamed else (name,)

        def change(parameter: Parameter) -> Sequence[Parameter] | None:
            model = models[parameter.group]
            names = model.rename(parameter.name)
            if not names:
                changes.append(Change(parameter.group, f"{parameter.name}: dropped, with the scales"))
            new = next((name for name in names if model.weights.get(name, ("",))[0] == parameter.name), None)
            if new is None:
                return None if names else []
            changes.append(Change(parameter.group, f"{new}: {parameter.tensor.info.dtype} to {dtype}"))
            return [replace(parameter, name=new, tensor=model.weights[new][1])]

        return (
            map_parameters(catalog, change, rename)
            .with_changes(changes)
            .with_config(
                lambda config: set_dtype({key: value for key, value in config.items() if key != _QUANTIZATION}, dtype)
            )
        )


#: The new tensors by their names, each with the name of the stored one that it replaces.
_Weights = dict[str, tuple[str, EditedTensor]]


class _Quantised(msgspec.Struct, frozen=True):
    """A model: its quantized weights as numbers, and the names of scales and others that are dropped."""

    names: Collection[str]
    weights: _Weights
    dropped: Collection[str]

    @classmethod
    def find(cls, catalog: Catalog, group: str, dtype: str) -> _Quantised:
        """Find the quantized weights of a model."""
        found = catalog.tensors[group]
        weights = _find_scaled(found, _block_of(catalog.config), dtype) | _find_micro_scaled(found, dtype)
        activations = {
            name for name, tensor in found.items() if name.endswith(_ACTIVATIONS) and len(tensor.info.shape) < _MATRIX
        }
        return cls(found.keys(), weights, _find_scales(found, weights) | (activations if weights else set()))

    def rename(self, name: str) -> Sequence[str]:
        """Return the new name of a tensor; none if it is dropped."""
        if name in self.dropped:
            return ()
        return (next((new for new, (old, _) in self.weights.items() if old == name), name),)


def _find_scaled(found: Mapping[str, EditedTensor], block: tuple[int, int] | None, dtype: str) -> _Weights:
    weights: _Weights = {}
    for name, tensor in found.items():
        if tensor.info.dtype not in _FP8:
            continue
        scales = next((found[name + end] for end in _SCALES if name + end in found), None)
        if scales is None:
            raise UnsupportedTensorError(
                f"dequantise: {name!r} is {tensor.info.dtype} and has no scale of a known name"
            )
        weights[name] = name, _scale(name, tensor, scales, block, dtype)
    return weights


def _scale(
    name: str, tensor: EditedTensor, scales: EditedTensor, block: tuple[int, int] | None, dtype: str
) -> EditedTensor:
    """Return the values of a weight: with one scale, one for each row, or one for each block."""
    shape, grid = tensor.info.shape, scales.info.shape
    count, rows, columns = math.prod(shape), *((1, 1, *shape)[-2:])
    values = partial(Scaled, TensorInfo(dtype, shape), tensor, scales)
    if math.prod(grid) == 1:
        return values((1, count), (1, count))
    if grid in {shape[:-1], (*shape[:-1], 1)}:
        return values((rows, columns), (1, columns))
    if len(grid) == len(shape) > 1 and grid[:-2] == shape[:-2] and 0 not in grid:
        size = block or (-(-rows // grid[-2]), -(-columns // grid[-1]))
        if (-(-rows // size[0]), -(-columns // size[1])) == grid[-2:]:
            return values((rows, columns), size)
    raise UnsupportedTensorError(
        f"dequantise: {name!r} is {describe_size(tensor.info)}, and its scales {describe_size(scales.info)}: they do "
        "not divide it into blocks"
    )


def _find_micro_scaled(found: Mapping[str, EditedTensor], dtype: str) -> _Weights:
    weights: _Weights = {}
    for name, blocks in found.items():
        scales = found.get(name.removesuffix(_BLOCKS) + _EXPONENTS) if name.endswith(_BLOCKS) else None
        if scales is None or (blocks.info.dtype, scales.info.dtype) != ("U8", "U8"):
            continue
        shape = blocks.info.shape
        if len(shape) != _DIMENSIONS or shape[:-1] != scales.info.shape:
            raise UnsupportedTensorError(
                f"dequantise: {name!r} is {describe_size(blocks.info)}, and its scales {describe_size(scales.info)}: "
                "MXFP4 has experts, rows, groups and bytes"
            )
        experts, rows, groups, width = shape
        info = TensorInfo(dtype, (experts, groups * width * _PER_BYTE, rows))
        weights[name.removesuffix(_BLOCKS)] = name, MicroScaled(info, blocks, scales)
    return weights


def _find_scales(found: Mapping[str, EditedTensor], weights: _Weights) -> set[str]:
    """Return the names of the scales of weights that are floating-point numbers now."""
    names = {old + end for old, _ in weights.values() for end in _SCALES}
    return (names | {new + _EXPONENTS for new, (old, _) in weights.items() if old != new}) & found.keys()


def _block_of(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the size of blocks that a configuration names, if it is one."""
    quantization = config.get(_QUANTIZATION)
    size = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    is_size = isinstance(size, list) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size)  # noqa: PLR2004
    return (size[0], size[1]) if is_size and size is not None else None
