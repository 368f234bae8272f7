"""The verbs ``freeze`` and ``unfreeze``: parameters leave the optimizer with their states, or join it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import msgspec
from msgspec.structs import replace

from rankless.edits.catalog import MASTERS, OPTIMIZER, STEP, Catalog, Change, Parameter, is_one_value
from rankless.edits.formulas import Zeros, cast
from rankless.edits.value_changes import ValueChange, add_parameters, rename_parameters
from rankless.errors import InvalidArgumentError
from rankless.formats.edited_reader import EditedTensor
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.validation import split_state_key, state_key

#: The state of a vector that is trained by torch's ``Adafactor``; a matrix has factors instead.
_OF_VECTOR = "variance"

_NEW_STATES = "Edit the model alone (model_only=True, --model-only), and let the optimizer make its states"


class Freeze(msgspec.Struct, frozen=True, tag_field="verb", tag="freeze", forbid_unknown_fields=True):
    """Take parameters out of the optimizer: their states are dropped, and the groups no longer list them.

    Args:
        include: Shell patterns of the parameters.
    """

    include: list[str]

    def apply(self, catalog: Catalog) -> Catalog:
        """Return the catalog without the states of some parameters. Raises ``InvalidArgumentError``."""
        _check_optimizer(catalog, "freeze")
        frozen = {catalog.resolve(name) for name in _select(catalog.names(), self.include, catalog, "freeze")}
        tensors, changes, without_states = dict(catalog.tensors), [], {*frozen}
        for group in catalog.groups_of(OPTIMIZER):
            names = {key: catalog.owner_of(group, split_state_key(key)[0])[1] for key in tensors[group]}
            left = {key: tensor for key, tensor in tensors[group].items() if names[key] not in frozen}
            dropped = {split_state_key(key)[0] for key in tensors[group].keys() - left.keys()}
            changes += [Change(group, f"{name}: frozen, its states are dropped") for name in sorted(dropped)]
            without_states -= {catalog.owner_of(group, name)[1] for name in dropped}
            tensors[group] = left
        changes += [Change(OPTIMIZER, f"{name}: frozen, it has no states") for name in sorted(without_states)]
        change = _in_optimizer_only(catalog, frozen)
        return replace(catalog, tensors=tensors, value_changes=(*catalog.value_changes, change)).with_changes(changes)


class Unfreeze(msgspec.Struct, frozen=True, tag_field="verb", tag="unfreeze", forbid_unknown_fields=True):
    """Let parameters join the optimizer: with the states of a new parameter. Its moments and steps are zero.

    Args:
        include: Shell patterns of the parameters.
        like: The name of a trained parameter: new ones join its group, and get states of the same kinds.
    """

    include: list[str]
    like: str

    def apply(self, catalog: Catalog) -> Catalog:
        """Return the catalog with states of more parameters. Raises ``InvalidArgumentError``."""
        _check_optimizer(catalog, "unfreeze")
        like = catalog.resolve(self.like)
        found = [parameter for parameter in catalog.parameters() if parameter.name == like and parameter.states]
        if len(found) != 1:
            what = "no states" if not found else "states of several models"
            raise InvalidArgumentError(
                f"unfreeze: {self.like!r} has {what} in {catalog.label}: name a trained parameter of one model"
            )
        of_model = [*catalog.tensors[found[0].group], *catalog.tied.get(found[0].group, {})]
        names = {catalog.resolve(name) for name in _select(of_model, self.include, catalog, "unfreeze")}
        return add_trained(catalog, dict.fromkeys(sorted(names), found[0]), "unfreeze")


def add_trained(catalog: Catalog, siblings: Mapping[str, Parameter], verb: str) -> Catalog:
    """Return a catalog in which parameters have states like their siblings, and are in the groups of these.

    ``siblings`` has a parameter of the same model for each name. One without states may be in a group nevertheless: of
    SGD. Raises ``InvalidArgumentError``, which names the ``verb``, if one of the names has states already, in any
    optimizer.
    """
    tensors = {group: dict(catalog.tensors[group]) for group in catalog.tensors}
    changes: list[Change] = []
    reconstructed: list[str] = []
    joined: dict[tuple[str, str], dict[str, None]] = {}
    optimizers = catalog.groups_of(OPTIMIZER)
    trained = {catalog.owner_of(group, split_state_key(key)[0]) for group in optimizers for key in tensors[group]}
    for name, like in siblings.items():
        if (like.group, name) in trained:
            raise InvalidArgumentError(f"{verb}: {name!r} has states in {catalog.label} already")
        parameter = catalog.tensors[like.group][name]
        _check_factors(catalog, like, parameter, f"{verb}: {name!r}")
        for (group, state), tensor in like.states.items():
            listed = catalog.name_in(group, like.group, name)
            tensors[group][state_key(listed, state)] = _new_state(
                parameter, state, tensor, like.tensor, f"{verb}: {name!r}"
            )
            reconstructed.append(f"{state} of {name}")
        for group in dict.fromkeys(group for group, _ in like.states) or _optimizers_of(catalog, like):
            listed, its = (catalog.name_in(group, like.group, each) for each in (name, like.name))
            joined.setdefault((group, its), {})[listed] = None
        if like.states:
            changes.append(Change(like.group, f"{name}: trained from now on, in the group of {like.name}"))
    value_changes = (add_parameters(list(names), like, group) for (group, like), names in joined.items())
    changed = {group: dict(sorted(by_name.items())) for group, by_name in tensors.items()}
    added = replace(catalog, tensors=changed, value_changes=(*catalog.value_changes, *value_changes))
    return added.with_changes(changes, reconstructed)


def _check_factors(catalog: Catalog, like: Parameter, parameter: EditedTensor, subject: str) -> None:
    """Raise ``InvalidArgumentError`` for a matrix like a vector if the optimizer has factors of matrices: Adafactor."""
    if len(parameter.info.shape) < 2 or len(like.tensor.info.shape) > 1:  # noqa: PLR2004 - dimensions of a matrix
        return
    states = {split_state_key(key)[1] for group, _ in like.states for key in catalog.tensors[group]}
    if any(state == _OF_VECTOR or "row" in state for state in states):
        raise InvalidArgumentError(
            f"{subject} is a matrix, and {like.name!r} is none: their states in the optimizer differ. {_NEW_STATES}"
        )


def _optimizers_of(catalog: Catalog, parameter: Parameter) -> list[str]:
    """Return the optimizers whose groups may list a parameter without states."""
    owner = parameter.group, parameter.name
    names = {group: catalog.name_in(group, *owner) for group in catalog.groups_of(OPTIMIZER)}
    return [group for group, name in names.items() if catalog.owner_of(group, name) == owner]


def _new_state(
    parameter: EditedTensor, state: str, like: EditedTensor, sibling: EditedTensor, subject: str
) -> EditedTensor:
    """Return the state of a parameter that was never trained, given the same state of another one, its ``sibling``."""
    if sibling.info.shape == () != parameter.info.shape and state != STEP:
        raise InvalidArgumentError(
            f"{subject}: the parameter that it is like has one value, so that its state {state!r} does not tell what a "
            "larger one has: name another parameter with like"
        )
    if is_one_value(state, like, sibling):
        return Zeros(like.info)
    if like.info.shape == sibling.info.shape and state in MASTERS:
        return cast(parameter, like.info.dtype)
    if like.info.shape == sibling.info.shape:
        return Zeros(TensorInfo(like.info.dtype, parameter.info.shape))
    raise InvalidArgumentError(
        f"{subject}: no rule says what its state {state!r} is, because that does not have the shape of the parameter. "
        + _NEW_STATES
    )


def _check_optimizer(catalog: Catalog, verb: str) -> None:
    if not catalog.groups_of(OPTIMIZER):
        raise InvalidArgumentError(
            f"{verb}: {catalog.label} has no states of an optimizer with the names of parameters"
        )


def _select(names: Sequence[str], patterns: Sequence[str], catalog: Catalog, verb: str) -> set[str]:
    """Return the names that patterns select. Raises ``InvalidArgumentError`` if one selects none."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InvalidArgumentError(f"{verb}: {catalog.label} has no parameter {pattern!r}")
    if not patterns:
        raise InvalidArgumentError(f"{verb}: name the parameters with include")
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


def _in_optimizer_only(catalog: Catalog, frozen: Collection[str]) -> ValueChange:
    """Return a change that removes parameters from optimizers and schedulers; models keep them."""
    drop = rename_parameters(catalog.qualify(lambda name: () if name in frozen else (name,)))

    def change(shared: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**drop(shared), **{slot: value for slot, value in shared.items() if slot.partition("/")[0] == "model"}}

    return change
