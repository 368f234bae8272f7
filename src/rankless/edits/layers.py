"""The verb ``layers``: layers of a stack are kept, dropped, repeated and put into another order, with their states."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from rankless.edits.catalog import MODEL, Catalog, Change, Parameter, map_parameters
from rankless.edits.config_layers import change_layers
from rankless.errors import InvalidArgumentError

#: The most layers of a model after an edit.
_MOST_LAYERS = 10_000

#: A number among the parts of a name.
_NUMBER = re.compile(r"(?:^|\.)(\d{1,9})(?=\.)")


class Layers(msgspec.Struct, frozen=True, tag_field="verb", tag="layers", forbid_unknown_fields=True):
    """Build the stack of layers anew from its own layers: name those to keep, to drop, or the whole order.

    Args:
        order: The old number of each new layer. A layer may be named several times, for example ``[0, 1, 1, 2]``.
        keep: The old numbers of the layers to keep.
        drop: The old numbers of the layers to drop.
        stack: The name of the list of layers, such as ``model.layers``, if there are several.
    """

    order: list[int] | None = None
    keep: list[int] | None = None
    drop: list[int] | None = None
    stack: str | None = None

    def apply(self, catalog: Catalog) -> Catalog:
        """Return the catalog with other layers. Raises ``InvalidArgumentError``."""
        catalog.check_no_adapters("layers")
        stack, count = self._find_stack(catalog)
        order = self._order(count)
        new_of = {old: [new for new, layer in enumerate(order) if layer == old] for old in range(count)}
        pattern = _pattern_of(stack)
        self._check_models(catalog, stack, pattern, count)
        _check_first_layer(catalog, pattern, order)

        def rename(name: str) -> Sequence[str]:
            match = pattern.fullmatch(name)
            if match is None or int(match[2]) >= count:
                return (name,)
            return [f"{match[1]}{new}{match[3]}" for new in new_of[int(match[2])]]

        def move(parameter: Parameter) -> Sequence[Parameter] | None:
            return [replace(parameter, name=name) for name in rename(parameter.name)]

        text = f"{stack}: the layers {', '.join(map(str, order))} of {count}"
        moved = map_parameters(catalog, move, rename).with_changes([Change("model", text)])
        return moved.with_config(lambda config: change_layers(config, order, count, stack))

    def _order(self, count: int) -> list[int]:
        """Return the old number of each new layer. ``count``: how many there are."""
        given = [numbers for numbers in (self.order, self.keep, self.drop) if numbers is not None]
        if len(given) != 1:
            raise InvalidArgumentError("layers: pass one of order, keep and drop")
        if wrong := [number for number in given[0] if not 0 <= number < count]:
            raise InvalidArgumentError(
                f"layers: there is no layer {wrong[0]}: the model has the layers 0 to {count - 1}"
            )
        if self.order is not None:
            order = list(self.order)
        else:
            order = [layer for layer in range(count) if (layer in given[0]) == (self.keep is not None)]
        if not 0 < len(order) <= _MOST_LAYERS:
            raise InvalidArgumentError(f"layers: a model has 1 to {_MOST_LAYERS} layers; these are {len(order)}")
        return order

    def _check_models(self, catalog: Catalog, stack: str, pattern: re.Pattern[str], count: int) -> None:
        """Raise ``InvalidArgumentError`` if a model has several lists of layers of this name, or another number."""
        for group in catalog.groups_of(MODEL):
            matches = [match for name in catalog.tensors[group] if (match := pattern.fullmatch(name))]
            found = {match[1] for match in matches}
            if len(found) > 1:
                listed = ", ".join(sorted(prefix.removesuffix(".") for prefix in found)[:5])
                raise InvalidArgumentError(f"layers: {stack!r} is in {listed}: pass stack= with the whole name of one")
            if matches and len(layers := {int(match[2]) for match in matches}) < count:
                raise InvalidArgumentError(
                    f"layers: {group} has {len(layers)} layers in {stack!r}, and another model {count}: one order does "
                    "not fit both. Edit a checkpoint that has one of them"
                )

    def _find_stack(self, catalog: Catalog) -> tuple[str, int]:
        """Return the name of the list of layers, and their number."""
        numbers: dict[str, set[int]] = {}
        for name in catalog.names():
            if match := _NUMBER.search(name):
                numbers.setdefault(name[: match.start()], set()).add(int(match[1]))
        if self.stack is not None:
            numbers = _numbers_of(self.stack, catalog.names())
        whole = {stack: len(found) for stack, found in numbers.items() if found == set(range(len(found)))}
        stacks = _without_wrappers(whole)
        if len(stacks) != 1:
            wanted = f"{self.stack!r}" if self.stack is not None else "one list of layers"
            listed = ", ".join(sorted(stacks)[:5]) or "none"
            raise InvalidArgumentError(
                f"layers: {wanted} was looked for in {catalog.label}; found: {listed}. Pass stack= with its name"
            )
        return stacks.popitem()


def _check_first_layer(catalog: Catalog, pattern: re.Pattern[str], order: Sequence[int]) -> None:
    """Raise ``InvalidArgumentError`` if the first layer alone has something, such as T5's position bias, and moves.

    All layers of such a model use it, and look for it in the first one.
    """
    for group in catalog.groups_of(MODEL):
        layers: dict[int, set[str]] = {}
        for match in filter(None, map(pattern.fullmatch, (*catalog.tensors[group], *catalog.tied.get(group, {})))):
            layers.setdefault(int(match[2]), set()).add(match[3])
        first = layers.pop(0, set())
        own = first.difference(*layers.values())
        if own and layers and all(names < first for names in layers.values()) and (order[0] or 0 in order[1:]):
            raise InvalidArgumentError(
                f"layers: only layer 0 has {min(own)[1:]!r}, which the others use: keep it as the first, and once"
            )


def _numbers_of(stack: str, names: Sequence[str]) -> dict[str, set[int]]:
    found = {int(match[2]) for name in names if (match := _pattern_of(stack).fullmatch(name))}
    return {stack: found} if found else {}


def _without_wrappers(stacks: Mapping[str, int]) -> dict[str, int]:
    """Return the stacks without those that are another one in an average of the model, under a longer name."""
    return {
        name: count
        for name, count in stacks.items()
        if not any(other != name and name.endswith(f".{other}") and stacks[other] == count for other in stacks)
    }


def _pattern_of(stack: str) -> re.Pattern[str]:
    """Return the pattern of names in a stack: the text before the number of the layer, the number, and the rest.

    For example, ``model.layers`` splits ``model.layers.3.mlp.weight`` at ``3``.
    """
    before = rf"(?:.*?\.)??{re.escape(stack)}\." if stack else r"(?:module\.)?"
    return re.compile(rf"({before})(\d{{1,9}})(\..*)")
