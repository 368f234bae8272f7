"""The verbs ``freeze`` and ``unfreeze``: parameters leave the optimizer with their states, or join it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import msgspec
from msgspec.structs import replace

from rankless.edits.catalog import MASTERS, OPTIMIZER, STEP, Catalog, Change, is_one_value
from rankless.edits.formulas import Zeros, cast
from rankless.edits.value_changes import ValueChange, add_parameters, rename_parameters
from rankless.errors import InvalidArgumentError
from rankless.formats.edited_reader import EditedTensor
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.validation import split_state_key, state_key


class Freeze(msgspec.Struct, frozen=True, tag_field="verb", tag="freeze", forbid_unknown_fields=True):
    """Take parameters out of the optimizer: their states are dropped, and the groups no longer list them.

    Args:
        include: Shell patterns of the parameters.
    """

    include: list[str]

    def apply(self, catalog: Catalog) -> Catalog:
        """Return the catalog without the states of some parameters. Raises ``InvalidArgumentError``."""
        _check_optimizer(catalog, "freeze")
        frozen = _select(catalog.names(), self.include, catalog, "freeze")
        tensors, changes = dict(catalog.tensors), []
        for group in catalog.groups_of(OPTIMIZER):
            left = {key: tensor for key, tensor in tensors[group].items() if split_state_key(key)[0] not in frozen}
            dropped = {split_state_key(key)[0] for key in tensors[group].keys() - left.keys()}
            changes += [Change(group, f"{name}: frozen, its states are dropped") for name in sorted(dropped)]
            tensors[group] = left
        change = _in_optimizer_only(frozen)
        return replace(catalog, tensors=tensors, value_changes=(*catalog.value_changes, change)).with_changes(changes)


class Unfreeze(msgspec.Struct, frozen=True, tag_field="verb", tag="unfreeze", forbid_unknown_fields=True):
    """Let parameters join the optimizer: with the states of a new parameter, whose moments and steps are zero.

    Args:
        include: Shell patterns of the parameters.
        like: The name of a trained parameter: new ones join its group, and get states of the same kinds.
    """

    include: list[str]
    like: str

    def apply(self, catalog: Catalog) -> Catalog:
        """Return the catalog with states of more parameters. Raises ``InvalidArgumentError``."""
        _check_optimizer(catalog, "unfreeze")
        names = _select(catalog.names(), self.include, catalog, "unfreeze")
        found = [p for p in catalog.parameters() if p.name == self.like and p.states]
        if not found:
            raise InvalidArgumentError(
                f"unfreeze: {self.like!r} has no states in {catalog.label}: name a trained parameter"
            )
        group, states = next(iter(found[0].states))[0], found[0].states
        return add_trained(catalog, sorted(names), (group, self.like), states)


def add_trained(
    catalog: Catalog,
    names: Sequence[str],
    like: tuple[str, str],
    states: Mapping[tuple[str, str], EditedTensor],
) -> Catalog:
    """Return a catalog in which parameters have states like those of another one, in its group.

    ``like`` is the group of the optimizer and the parameter. Raises ``InvalidArgumentError`` if one has states already.
    """
    group, sibling = like
    model = catalog.tensors[catalog.model_of(group)]
    tensors, changes, reconstructed = dict(catalog.tensors[group]), [], []
    trained = {split_state_key(key)[0] for key in tensors}
    for name in names:
        if name in trained:
            raise InvalidArgumentError(f"unfreeze: {name!r} has states in {catalog.label} already")
        for (of_group, state), tensor in states.items():
            if of_group == group:
                tensors[state_key(name, state)] = _new_state(model[name], state, tensor, model[sibling], name)
                reconstructed.append(f"{state} of {name}")
        changes.append(Change(group, f"{name}: trained from now on, in the group of {sibling}"))
    changed = {**catalog.tensors, group: dict(sorted(tensors.items()))}
    change = add_parameters(names, sibling, group)
    added = replace(catalog, tensors=changed, value_changes=(*catalog.value_changes, change))
    return added.with_changes(changes, reconstructed)


def _new_state(
    parameter: EditedTensor, state: str, like: EditedTensor, sibling: EditedTensor, name: str
) -> EditedTensor:
    """Return the state of a parameter that was never trained, given that of another one, its ``sibling``."""
    if sibling.info.shape == () != parameter.info.shape and state != STEP:
        raise InvalidArgumentError(
            f"unfreeze: the parameter that {name!r} is like has one value, so that its state {state!r} does not tell "
            "what a larger one has: name another parameter with like"
        )
    if is_one_value(state, like, sibling):
        return Zeros(like.info)
    if like.info.shape == sibling.info.shape and state in MASTERS:
        return cast(parameter, like.info.dtype)
    if like.info.shape == sibling.info.shape:
        return Zeros(TensorInfo(like.info.dtype, parameter.info.shape))
    raise InvalidArgumentError(
        f"unfreeze: no rule says what the state {state!r} of {name!r} is, because it does not have the shape of its "
        "parameter: leave the parameter out, and let the optimizer make its states"
    )


def _check_optimizer(catalog: Catalog, verb: str) -> None:
    if not catalog.groups_of(OPTIMIZER):
        raise InvalidArgumentError(f"{verb}: {catalog.label} has no optimizer")


def _select(names: Sequence[str], patterns: Sequence[str], catalog: Catalog, verb: str) -> set[str]:
    """Return the names that patterns select. Raises ``InvalidArgumentError`` if one selects none."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InvalidArgumentError(f"{verb}: {catalog.label} has no parameter {pattern!r}")
    if not patterns:
        raise InvalidArgumentError(f"{verb}: name the parameters with include")
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


def _in_optimizer_only(frozen: Collection[str]) -> ValueChange:
    """Return a change by which optimizers and schedulers no longer list parameters; models keep them."""
    drop = rename_parameters(lambda name: () if name in frozen else (name,))

    def change(shared: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**drop(shared), **{slot: value for slot, value in shared.items() if slot.partition("/")[0] == "model"}}

    return change
