"""Megatron's tensors of each layer, from a model with the names of transformers.

The reader's plan says which rows of Megatron's tensors a tensor of transformers consists of. It is applied backwards.

:mod:`rankless.megatron.writer.megatron_source` calls it on each rank that opens the source. No tensor of the source may
be left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rankless.errors import FormatError
from rankless.formats.chunked_tensor_slices import JoinedTensor
from rankless.megatron.reader.hf_families import Family
from rankless.megatron.reader.hf_pieces import TransformersPiece
from rankless.megatron.reader.model_args import ModelArgs
from rankless.megatron.reader.transformers_layout import EMBEDDING, EXPERT, OUTPUT, plan_pieces
from rankless.megatron.writer.parts import LayerTensor, Part, join_parts
from rankless.ondisk.data_files import TensorInfo

#: The names of transformers 5 in memory, where the experts of a layer are one tensor, and the names that they stand
#: for.
_ROUTERS = {"mlp.gate.weight": "block_sparse_moe.gate.weight"}
_GATE_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
_HEADS = {"lm_head.weight": "embed_out.weight", "embed_out.weight": "lm_head.weight"}


@dataclass(frozen=True)
class _HfTensor:
    """A tensor of transformers: elements from ``start`` on of the source's parameter ``name``."""

    name: str
    start: int
    shape: tuple[int, ...]


def plan_from_hf(
    shapes: Mapping[str, tuple[int, ...]], family: Family, args: ModelArgs, padded: int
) -> dict[str, LayerTensor]:
    """Return Megatron's tensors by name. ``padded`` is the number of rows of the embedding there.

    Raises ``FormatError`` naming a tensor that has no place in Megatron's model of the family.
    """
    _check_counts(shapes, family, args)
    return _TensorPlanner(_name_tensors(shapes, family, args), family, args, padded).plan_all()


def _check_counts(shapes: Mapping[str, tuple[int, ...]], family: Family, args: ModelArgs) -> None:
    """Raise ``FormatError`` if the configuration names more layers and experts than there are tensors."""
    layers, experts = args.require_size("num_layers"), args.require_size("num_experts") if family.experts else 1
    if layers * experts > sum(shape[0] if _has_experts(shape) else 1 for shape in shapes.values()):
        raise FormatError(
            f"{args.source}: a model of {layers} layers{f' of {experts} experts' if family.experts else ''} has more "
            f"tensors than the {len(shapes)} of the source: {args.advice}"
        )


def _has_experts(shape: tuple[int, ...]) -> bool:
    """Return whether a tensor may have all experts of a layer: their number, rows and columns."""
    return len(shape) == 3 and 0 not in shape  # noqa: PLR2004


def transposed_names(shapes: Mapping[str, tuple[int, ...]], family: Family) -> list[str]:
    """Return the matrices that are stored with inputs as rows, and that Megatron has the other way round."""
    if not family.is_transposed:
        return []
    matrices = {row[0] for inner, row in family.inner.items() if inner.endswith(".weight")}
    return [name for name, shape in shapes.items() if len(shape) > 1 and _split_layer(name)[1] in matrices]


def _name_tensors(shapes: Mapping[str, tuple[int, ...]], family: Family, args: ModelArgs) -> dict[str, _HfTensor]:
    """Return the tensors by the names of the family, whatever version of transformers named them."""
    known = _known_names(family, args)
    named: dict[str, _HfTensor] = {}
    for name, shape in shapes.items():
        for own, tensor in _expand(name, shape, family, known):
            if own in named:
                raise FormatError(f"{args.source}: {named[own].name!r} and {name!r} are the same tensor of the model")
            named[own] = tensor
    return named


def _expand(name: str, shape: tuple[int, ...], family: Family, known: set[str]) -> Iterator[tuple[str, _HfTensor]]:
    """Yield the tensors in a tensor: several if it has all experts of a layer."""
    prefix, inner = _split_layer(name)
    if family.experts and inner in {_GATE_UP, _DOWN} and _has_experts(shape):
        yield from _expand_experts(name, shape, prefix, family)
        return
    base = family.ends[EMBEDDING].split(".", 1)[0] + "."
    candidates = [name, base + name, _HEADS.get(name, name), prefix + _ROUTERS.get(inner, inner)]
    own = next((candidate for candidate in candidates if candidate in known), name)
    yield own, _HfTensor(name, 0, shape)


def _expand_experts(name: str, shape: tuple[int, ...], prefix: str, family: Family) -> Iterator[tuple[str, _HfTensor]]:
    gate, projection, output = (prefix + pattern for pattern in family.experts or ())
    count, rows, columns = shape
    for expert in range(count):
        start = expert * rows * columns
        if name.endswith(_DOWN):
            yield output.format(expert), _HfTensor(name, start, (rows, columns))
        else:
            half = rows // 2, columns
            yield gate.format(expert), _HfTensor(name, start, half)
            yield projection.format(expert), _HfTensor(name, start + math.prod(half), half)


def _split_layer(name: str) -> tuple[str, str]:
    """Split the name of a tensor in a layer: ``model.layers.3.``, ``mlp.gate.weight``."""
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    if number is None:
        return "", name
    return ".".join(parts[: number + 1]) + ".", ".".join(parts[number + 1 :])


def _known_names(family: Family, args: ModelArgs) -> set[str]:
    """Return the names of all tensors that a model of the family may have."""
    known = set(family.ends.values())
    inner = {name for row in family.inner.values() for name in row}
    for expert in range(args.require_size("num_experts")) if family.experts else ():
        inner |= {name.format(expert) for name in family.experts or ()}
    for layer in range(args.require_size("num_layers")):
        known |= {family.prefix.format(layer) + name for name in inner}
    return known


@dataclass(frozen=True)
class _TensorPlanner:
    tensors: Mapping[str, _HfTensor]
    family: Family
    args: ModelArgs
    padded: int

    def plan_all(self) -> dict[str, LayerTensor]:
        shapes = self._find_shapes()
        weights = {name: JoinedTensor(TensorInfo("F32", shape), ()) for name, shape in shapes.items()}
        pieces = plan_pieces(weights, self.args, self.args.require_size("vocab_size"))
        planned = {name: LayerTensor(shapes[name], self._invert(shapes[name], row)) for name, row in pieces.items()}
        placed = {piece.target for row in pieces.values() for piece in row}
        unplaced = next((name for name in self.tensors if name not in placed), None)
        if unplaced is not None:
            raise FormatError(
                f"{self.args.source}: Megatron's model of the family {self.family.name} has no place for "
                f"{self.tensors[unplaced].name!r}: {self.args.advice}"
            )
        return planned

    def _find_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor of Megatron that the source has."""
        shapes = {}
        is_tied = not self.args.is_set("untie_embeddings_and_output_weights")
        for name, target in self.family.ends.items():
            if target in self.tensors and not (is_tied and name == OUTPUT):
                shape = self.tensors[target].shape
                shapes[name] = (self.padded, *shape[1:]) if name in {EMBEDDING, OUTPUT} else shape
        for layer in range(self.args.require_size("num_layers")):
            prefix = self.family.prefix.format(layer)
            taken: set[str] = set()
            for inner, targets in self._list_inner():
                names = [prefix + target for target in targets]
                if taken.isdisjoint(names) and all(name in self.tensors for name in names):
                    taken |= set(names)
                    shapes[f"decoder.layers.{layer}.{inner}"] = self._join_shapes(names)
        return shapes

    def _list_inner(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield Megatron's names in a layer, with transformers' names."""
        yield from self.family.inner.items()
        for expert in range(self.args.require_size("num_experts")) if self.family.experts else ():
            gate, projection, output = (name.format(expert) for name in self.family.experts or ())
            yield f"{EXPERT}{expert}.linear_fc1.weight", (gate, projection)
            yield f"{EXPERT}{expert}.linear_fc2.weight", (output,)

    def _join_shapes(self, names: list[str]) -> tuple[int, ...]:
        shapes = [self.tensors[name].shape for name in names]
        if any(shape[1:] != shapes[0][1:] or not shape for shape in shapes):
            raise FormatError(
                f"{self.args.source}: {', '.join(names)} have the shapes {', '.join(map(str, map(list, shapes)))}, and "
                "Megatron has them as rows of one tensor"
            )
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def _invert(self, shape: tuple[int, ...], pieces: tuple[TransformersPiece, ...]) -> tuple[Part, ...]:
        """Return the parts of a tensor of Megatron that transformers has as these pieces."""
        row = math.prod(shape[1:])
        parts = []
        for piece in pieces:
            tensor = self.tensors[piece.target]
            ranges = [(rows.start, rows.stop) for rows in piece.rows] or [(0, shape[0])]
            if tensor.shape != (sum(stop - start for start, stop in ranges), *shape[1:]):
                raise FormatError(
                    f"{self.args.source}: {tensor.name!r} has the shape {list(tensor.shape)}, which a model with this "
                    f"configuration does not have; Megatron's {piece.source} has {list(shape)}"
                )
            done = tensor.start
            for start, stop in ranges:
                count = (stop - start) * row
                parts.append(Part(tensor.name, done, count, start * row))
                done += count
        return join_parts(parts)
