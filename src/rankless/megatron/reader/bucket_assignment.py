"""The assignment of positions in flat buffers to parts of parameters, where several parts have equal weights.

The weights of norms are often equal: all ones, which small steps do not change in 16 bits. Then the order decides:
Megatron lays out parameters in the reverse order of the model, and a rank's buffers have every part of its layers once.

:mod:`rankless.megatron.reader.flat_states` calls it on each rank that opens a checkpoint. In doubt it must raise: a
wrong assignment gives a parameter the states of another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rankless.errors import FormatError
from rankless.megatron.reader.bucket_search import SKIP, BufferMatch
from rankless.megatron.reader.layer_names import layer_of
from rankless.megatron.reader.rank_parts import RankPart

#: The parts of a model in order, by the beginnings of their names.
_SECTIONS = ("embedding.", "decoder.layers.", "decoder.final_", "output_layer.")
_EMBEDDING, _LAYERS = 0, 1

#: The norms of a layer in order. Only among these the order is the same in all of Megatron's layer specs.
_NORMS: Mapping[str, int] = {
    "input_layernorm": 0,
    "self_attention.linear_qkv.layer_norm": 0,
    "self_attention.q_layernorm": 1,
    "self_attention.k_layernorm": 2,
    "pre_mlp_layernorm": 3,
    "mlp.linear_fc1.layer_norm": 3,
}


def assign_parts(matches: Sequence[BufferMatch], label: str) -> dict[RankPart, BufferMatch]:
    """Return the position of each part in the buffers of one group of data-parallel ranks.

    Raises ``FormatError`` naming parameters that cannot be distinguished, or that are there twice or not in order.
    """
    assigned = [match.parts[0] if len(match.parts) == 1 else None for match in matches]
    certain = [part for part in assigned if part is not None]
    ties: dict[tuple[RankPart, ...], list[int]] = {}
    for number, match in enumerate(matches):
        if assigned[number] is None:
            ties.setdefault(match.parts, []).append(number)
    for parts, numbers in ties.items():
        ordered = _order_ties(_filter_ties(parts, certain), len(numbers), label)
        for number, part in zip(numbers, ordered, strict=True):
            assigned[number] = part
    placed = [part for part in assigned if part is not None]
    _check_order(placed, label)
    return dict(zip(placed, matches, strict=True))


def _filter_ties(parts: Iterable[RankPart], certain: Sequence[RankPart]) -> list[RankPart]:
    """Return the parts that these ranks can have: of layers and of shards that they have other parts of for certain."""
    layers = {layer_of(part.name) for part in certain} - {None}
    shards = {(part.shards, part.index) for part in certain if part.shards > 1}
    counts = {count for count, _ in shards}
    return [
        part
        for part in parts
        if (not layers or layer_of(part.name) in layers | {None})
        and (part.shards not in counts or (part.shards, part.index) in shards)
    ]


def _order_ties(parts: Sequence[RankPart], positions: int, label: str) -> list[RankPart]:
    """Return parts with equal weights in the order of a buffer, the reverse order of the model."""
    candidates = list(parts)
    if len(candidates) == positions + 1:  # only the last stage has the last norm
        candidates = [part for part in candidates if _section_of(part.name) in {_EMBEDDING, _LAYERS}]
    is_one_kind = len({_split_name(part.name)[1] for part in candidates}) == 1
    keys = {part: _order_of(part.name, is_one_kind=is_one_kind) for part in candidates}
    known = {part: key for part, key in keys.items() if key is not None}
    if len(known) != positions or len(known) < len(candidates) or len(set(known.values())) < positions:
        names = ", ".join(sorted({repr(part.name) for part in parts})[:4])
        raise FormatError(
            f"{label}: {len(parts)} parts of parameters ({names}) have equal weights, and it is unknown which of "
            f"{positions} positions is whose; {SKIP}"
        )
    return sorted(known, key=known.__getitem__, reverse=True)


def _order_of(name: str, *, is_one_kind: bool) -> tuple[int, int, int] | None:
    """Return the place of a parameter among others with equal weights; ``None`` if it is unknown.

    With ``is_one_kind`` the others are the same parameter of other layers.
    """
    section = _section_of(name)
    if section != _LAYERS:
        return None if section is None else (section, 0, 0)
    layer, inner = _split_name(name)
    place = 0 if is_one_kind else next((place for norm, place in _NORMS.items() if inner.startswith(norm)), None)
    return None if place is None or layer is None else (section, layer, place)


def _split_name(name: str) -> tuple[int | None, str]:
    """Return the number of the layer in a name, and the name inside that layer.

    For example, ``decoder.layers.3.mlp.linear_fc1.weight`` gives 3 and ``mlp.linear_fc1.weight``.
    """
    layer = layer_of(name)
    return (None, name) if layer is None else (layer, name.partition(f".{layer}.")[2])


def _section_of(name: str) -> int | None:
    return next((number for number, prefix in enumerate(_SECTIONS) if name.startswith(prefix)), None)


def _check_order(placed: Sequence[RankPart], label: str) -> None:
    """Raise ``FormatError`` if a part is there twice, or layers are not in the reverse order.

    The last stage of a pipeline has a copy of the first embedding, at the place of the output layer.
    """
    if len(set(placed)) < len(placed):
        twice = next(part.name for number, part in enumerate(placed) if part in placed[:number])
        raise FormatError(f"{label}: the weights of {twice!r} are in it twice; {SKIP}")
    ordered = [part for part in placed if _section_of(part.name) in {_LAYERS, 2}]
    layers = [(_section_of(part.name) or 0, layer_of(part.name) or 0) for part in ordered]
    for part, place, earlier in zip(ordered[1:], layers[1:], layers, strict=False):
        if place > earlier:
            raise FormatError(
                f"{label}: {part.name!r} comes after a parameter that is before it in the model, which is not the "
                f"order of Megatron's buffers; {SKIP}"
            )
