"""The values of a source that a conversion to Megatron looks into: its training's arguments, and its optimizer.

:mod:`rankless.megatron.writer.megatron_source` calls it on each rank that opens the source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rankless.conversion.fake_tensors import FakeTensors
from rankless.conversion.target import ConversionSource
from rankless.conversion.tensor_filter import Key
from rankless.engine.io.source_reader import SourceReader
from rankless.errors import InvalidArgumentError
from rankless.megatron.reader.model_args import ModelArgs
from rankless.state.tensor_views import DTYPES


def decode_values(source: ConversionSource, fakes: FakeTensors) -> dict[str, Any]:
    """Return the values that all ranks share, with tensors without data."""
    values: dict[str, Any] = fakes.build_tree(source, lambda _, decoded: dict(decoded))
    return values


def find_args(values: Mapping[str, Any], label: str) -> ModelArgs:
    """Return the arguments of a training in Megatron; none if the source has none."""
    content = values.get("user_content")
    return ModelArgs.from_saved(content.get("args") if isinstance(content, Mapping) else None, label)


def read_numbers(source: ConversionSource, keys: Sequence[Key]) -> dict[Key, float]:
    """Return the numbers in tensors of one element. Raises ``InvalidArgumentError`` if one has several."""
    located = []
    for key in keys:
        group, name = source.selected.sources[key]
        info = source.reader.groups[group][name]
        if math.prod(info.shape) != 1:
            raise InvalidArgumentError(f"{source.reader.path}: {key[1]!r} must be one number, not {list(info.shape)}")
        located.append((key, DTYPES[info.dtype], source.reader.find_extents(group, name, 0, info.nbytes)[0]))
    files = list(dict.fromkeys(extent.file for _, _, extent in located))
    numbers = {}
    with SourceReader(files) as opened:
        for key, dtype, extent in located:
            data = np.empty(dtype.itemsize, np.uint8)
            opened.read(files.index(extent.file), extent.offset, data.data)
            numbers[key] = float(torch.from_numpy(data).view(dtype).item())
    return numbers


def list_groups(values: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the parameter groups of the source's optimizer."""
    groups: Sequence[Mapping[str, Any]] = values["optimizer"]["groups"]
    return groups
