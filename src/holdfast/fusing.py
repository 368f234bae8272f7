"""What a model has as one tensor, and a checkpoint of transformers as several, is read as one: fused experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from holdfast.formats.reader import Reader
from holdfast.formats.rearranged import Made, Rearranged, as_it_lies
from holdfast.layout.files import TensorInfo
from holdfast.state import model as models
from holdfast.state.hub import by_origin, stored


def fused(reader: Reader, given: Mapping[str, Sequence[Any]]) -> Reader:
    """The checkpoint as the models see it that it is loaded into, by slot."""
    table = {group: as_it_lies(infos) for group, infos in reader.groups.items()}
    made = {slot: _made(parts[0], reader.groups[slot]) for slot, parts in given.items() if slot in reader.groups}
    if not any(made.values()):
        return reader
    for slot, found in made.items():
        taken = {part for one in found.values() for part in one.of}
        table[slot] = {name: one for name, one in table[slot].items() if name not in taken} | found
    return Rearranged(reader, table, reader.tied, lambda shared: shared)


def _made(model: object, names: Mapping[str, TensorInfo]) -> dict[str, Made]:
    """The tensors of a model that the checkpoint has under other names, or in parts, all of which are there."""
    if not isinstance(model, nn.Module):
        return {}
    tensors = models.view([model]).tensors
    told = stored(model, {name: TensorInfo(one.dtype, one.shape) for name, one in tensors.items()})
    found = {}
    for name, pieces in by_origin(told):
        parts = [piece for piece, _ in pieces]
        there = all(part in names and names[part].shape == told[part][0].shape for part in parts)
        if name not in names and there and len({names[part].dtype for part in parts}) == 1:
            found[name] = Made(TensorInfo(names[parts[0]].dtype, tensors[name].shape), parts)
    return found
