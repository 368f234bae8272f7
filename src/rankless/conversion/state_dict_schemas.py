"""Schemas of state dict trees: of PyTorch files, DCP, Lightning and ColossalAI.

Targets of files of torch call a schema on every rank with tensors without data; Lightning's strategies call some with
real ones. The keys are those that the other systems load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rankless.conversion.fake_tensors import Groups
from rankless.conversion.own_values import add_own_values
from rankless.errors import InvalidArgumentError
from rankless.observe.warning import warn_caller
from rankless.ondisk.validation import split_state_key
from rankless.ondisk.value_files import BY_NUMBER, ORDERED, OWN_STATE
from rankless.state.optimizer.left_out_values import warn_left_out
from rankless.state.optimizer.whole_states import whole_states

#: The entries that Lightning requires in every checkpoint, besides the step.
_LIGHTNING = {"epoch": 0, "pytorch-lightning_version": "2.0.0", "loops": None}


def state_dict_schema(groups: Groups, values: Mapping[str, Any]) -> Any:
    """Return the model's state dict if there is only a model, otherwise one state dict per component by its name.

    ``optimizer`` is a state dict for ``Optimizer.load_state_dict``, or a list of such; ``scheduler`` likewise. For
    example, a checkpoint with an optimizer gives ``{"model": …, "optimizer": …}``.
    """
    present = {name: value for name, value in values.items() if not name.startswith("model") or value}
    if groups.keys() == {"model"} and not present.keys() - {"model"}:
        return _model_state_dict("model", groups, values)
    tree: dict[str, Any] = {}
    for slot in sorted({*groups, *present} - {"ranks"}):
        kind = slot.partition("/")[0]
        _put_component(tree, slot, _MAKERS.get(kind, _plain_values)(slot, groups, values))
    return tree


def lightning_schema(groups: Groups, values: Mapping[str, Any], *, step: float | None = None) -> Any:
    """Return a checkpoint of Lightning's ``Trainer``: ``state_dict``, ``optimizer_states`` and its metadata.

    ``step`` is the training step, unless the user's content has another one.
    """
    _check_for_lightning(groups, values)
    tree = lightning_metadata(groups, values, step=step)
    _add_entry(tree, "state_dict", _model_state_dict("model", groups, values))
    if "optimizer" in values:
        states = _optimizer_state_dicts("optimizer", groups, values)
        _add_entry(tree, "optimizer_states", states if isinstance(states, list) else [states])
    return tree


def dcp_schema(groups: Groups, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the usual tree of a DCP checkpoint: ``model``, ``optim`` by name, and the user's values.

    The user's values are under ``user_content`` if they are not a dict, or if their keys collide with these. For
    example, ``{"model": …, "optim": …, "epoch": 3}``.
    """
    tree: dict[str, Any] = {}
    for slot in sorted({*groups, *values} - {"state", "ranks", "user_content"}):
        kind = slot.partition("/")[0]
        state_dict = {**_MAKERS, "optimizer": _optimizer_by_name}.get(kind, _plain_values)(slot, groups, values)
        _put_component(tree, "optim" + slot.removeprefix(kind) if kind == "optimizer" else slot, state_dict)
    content = _user_content(values)
    is_distinct = content.keys().isdisjoint({*tree, "stateful", "user_content"})
    return {**content, **tree} if is_distinct else {"user_content": values["user_content"], **tree}


def lightning_tensor_names(groups: Groups, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of the distributed checkpoint in a Lightning folder.

    Lightning's FSDP strategy reads the model from one key, its model-parallel strategy from another. For example, the
    model is under ``model`` and ``state_dict``, and the first optimizer under ``optimizer_0``.
    """
    _check_for_lightning(groups, values)
    model = _model_state_dict("model", groups, values)
    tree: dict[str, Any] = {"model": model, "state_dict": model}
    if "optimizer" not in values:
        return tree
    check_named(values["optimizer"])
    states = _optimizer_by_name("optimizer", groups, values)["state"]
    for number, param_groups in enumerate(_split_optimizers(values["optimizer"]["groups"])):
        names = [name for group in param_groups for name in group["params"]]
        optimizer_states = {name: states[name] for name in names if name in states}
        tree[f"optimizer_{number}"] = {
            "state": optimizer_states,
            "param_groups": [_named_group(group) for group in param_groups],
        }
    return tree


def lightning_metadata(groups: Groups, values: Mapping[str, Any], *, step: float | None = None) -> dict[str, Any]:
    """Return the content of ``meta.pt`` in a Lightning folder. ``step`` is as in :func:`lightning_schema`."""
    del groups
    tree = {**_LIGHTNING, "global_step": int(step or 0), **_user_content(values)}
    if "scheduler" in values:
        states = scheduler_state_dict(values["scheduler"])
        _add_entry(tree, "lr_schedulers", states if isinstance(states, list) else [states])
    elif "optimizer" in values:
        tree.setdefault("lr_schedulers", [])
    return tree


def _add_entry(tree: dict[str, Any], key: str, value: Any) -> None:
    """Add an entry of Lightning. Raises ``InvalidArgumentError`` if the user's content has the same key."""
    if key in tree:
        raise InvalidArgumentError(f"user_content has {key!r}, which is a key of Lightning: save it under another key")
    tree[key] = value


def booster_schema(groups: Groups, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of the files of ColossalAI's Booster, by their usual names, and the user's values.

    Raises ``InvalidArgumentError`` if there is more than one model or optimizer.
    """
    others = sorted(slot for slot in {*groups, *values} if "/" in slot)
    if others or "model" not in groups:
        raise InvalidArgumentError(
            f"ColossalAI's Booster has one model and one optimizer, but the source has "
            f"{', '.join(others) or 'no model'}: select one by keys, or convert with model_only"
        )
    _warn_of_objects(values, "ColossalAI's Booster")
    tree: dict[str, Any] = {"model": _model_state_dict("model", groups, values)}
    if "optimizer" in values:
        optimizer = _require_single(_optimizer_state_dicts("optimizer", groups, values), "optimizer")
        tree["optimizer"] = _states_and_groups(optimizer, "ColossalAI's Booster")
    if "scheduler" in values:
        tree["lr_scheduler"] = _require_single(_scheduler_states("scheduler", groups, values), "scheduler")
    return {**tree, "user_content.pt": values["user_content"]} if "user_content" in values else tree


def _states_and_groups(state_dict: Mapping[str, Any], output: str) -> dict[str, Any]:
    """Return the states of parameters and the groups of a state dict. Warn if there is more, which is left out."""
    states = {number: state for number, state in state_dict["state"].items() if isinstance(number, int)}
    if len(states) < len(state_dict["state"]) or len(state_dict) > len({"state", "param_groups"}):
        warn_left_out(output)
    return {"state": states, "param_groups": state_dict["param_groups"]}


def _require_single(state_dicts: Any, kind: str) -> Any:
    if isinstance(state_dicts, list):
        raise InvalidArgumentError(f"ColossalAI's Booster has one {kind}, but the source has {len(state_dicts)}")
    return state_dicts


def _user_content(values: Mapping[str, Any]) -> dict[str, Any]:
    content = values.get("user_content")
    return dict(content) if isinstance(content, dict) else {} if content is None else {"user_content": content}


def _optimizer_by_name(slot: str, groups: Groups, values: Mapping[str, Any]) -> Any:
    """Return an optimizer as ``get_optimizer_state_dict`` does, or as ``state_dict()`` does if names are unknown."""
    if values[slot].get(BY_NUMBER):
        return _optimizer_state_dicts(slot, groups, values)
    tensors, param_groups = _tensors_by_parameter(slot, groups), values[slot]["groups"]
    return {
        "state": _join_states(param_groups, tensors),
        "param_groups": [_named_group(group) for group in param_groups],
    }


def _join_states(
    groups: Sequence[Mapping[str, Any]], tensors: Mapping[str, Mapping[str, torch.Tensor]]
) -> dict[str, dict[str, Any]]:
    """Return all states of the parameters that have some, by name."""
    plain = {name: states for group in groups for name, states in group["state"].items()}
    return {name: whole_states(tensors.get(name, {}), plain.get(name, {})) for name in {**tensors, **plain}}


def _named_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group with ``param_names``, which only optimizers with named parameters require."""
    return {**group["settings"], "params": list(group["params"]), "param_names": list(group["params"])}


def _tensors_by_parameter(slot: str, groups: Groups) -> dict[str, dict[str, Any]]:
    """Return the tensors of an optimizer, by parameter and state name.

    For example, the tensor ``0.weight/exp_avg`` is under ``0.weight`` and then ``exp_avg``.
    """
    states: dict[str, dict[str, Any]] = {}
    for key, tensor in groups.get(slot, {}).items():
        fqn, state = split_state_key(key)
        states.setdefault(fqn, {})[state] = tensor
    return states


def _check_for_lightning(groups: Groups, values: Mapping[str, Any]) -> None:
    """Raise ``InvalidArgumentError`` if Lightning has no place for a component."""
    if "model" not in groups:
        several = ", ".join(sorted(slot for slot in {*groups, *values} if slot.startswith("model/")))
        found = f"the source has {several}: choose one" if several else "the source has none: name it"
        raise InvalidArgumentError(f"a Lightning checkpoint needs a model, but {found} by keys")
    kinds = {"model", "optimizer", "scheduler"}
    others = sorted(slot for slot in {*groups, *values} if "/" in slot and slot.partition("/")[0] in kinds)
    if others:
        raise InvalidArgumentError(
            f"a Lightning checkpoint has one model, and lists of optimizers and schedulers, but the source has "
            f"{', '.join(others)}: select one by keys, or convert with model_only"
        )
    _warn_of_objects(values, "a Lightning checkpoint")


def _warn_of_objects(values: Mapping[str, Any], output: str) -> None:
    """Warn of the states of objects that were saved as ``stateful``, if an output has no place for them."""
    if names := sorted(values.get("stateful") or ()):
        warn_caller(f"{output} has no place for the stateful objects {', '.join(map(repr, names))}: they are left out")


def _put_component(tree: dict[str, Any], slot: str, value: Any) -> None:
    """Put a component into the tree. ``model/gen`` becomes ``gen`` in ``model``."""
    kind, _, name = slot.partition("/")
    if name:
        tree.setdefault(kind, {})[name] = value
    else:
        tree[kind] = value


def _model_state_dict(slot: str, groups: Groups, values: Mapping[str, Any]) -> dict[str, Any]:
    return {**groups.get(slot, {}), **values.get(slot, {})}


def _optimizer_state_dicts(slot: str, groups: Groups, values: Mapping[str, Any]) -> Any:
    tensors, named = _tensors_by_parameter(slot, groups), not values[slot].get(BY_NUMBER)
    own = values[slot].get(OWN_STATE, ())
    state_dicts = [
        add_own_values(optimizer_state_dict(param_groups, tensors, named=named), own, _list_params(param_groups))
        for param_groups in _split_optimizers(values[slot]["groups"])
    ]
    return state_dicts[0] if len(state_dicts) == 1 else state_dicts


def _list_params(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    return [name for group in groups for name in group["params"]]


def _split_optimizers(groups: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Split parameter groups by optimizer. The groups of each begin with group 0."""
    optimizers: list[list[Mapping[str, Any]]] = []
    for group in groups:
        if not optimizers or group["number"] == 0:
            optimizers.append([])
        optimizers[-1].append(group)
    return optimizers


def optimizer_state_dict(
    groups: Sequence[Mapping[str, Any]], tensors: Mapping[str, Mapping[str, torch.Tensor]], *, named: bool
) -> dict[str, Any]:
    """Return a state dict for ``Optimizer.load_state_dict``, from its parameter groups and states by parameter.

    Raises ``InvalidArgumentError`` if the order of the parameters is unknown.
    """
    unordered = next((group for group in groups if not group[ORDERED]), None)
    if unordered is not None:
        raise InvalidArgumentError(
            f"the order of {unordered['params'][0]!r} and other parameters in their optimizer is unknown, because "
            "several pipeline stages or optimizers saved them: load them into a whole model on one rank, and save that"
        )
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group["params"])}
    states = _join_states(groups, tensors)
    return {
        "state": {number: states[name] for name, number in numbers.items() if states.get(name)},
        "param_groups": [
            {
                **group["settings"],
                "params": [numbers[name] for name in group["params"]],
                **({"param_names": group["params"]} if named else {}),
            }
            for group in groups
        ],
    }


def check_named(optimizer: Mapping[str, Any]) -> None:
    """Raise ``InvalidArgumentError`` for the values of an optimizer with parameters that have no names."""
    if optimizer.get(BY_NUMBER):
        raise InvalidArgumentError(
            "the source has only numbers for the optimizer's parameters, and their names are unknown: load it into the "
            "model and optimizer, and save these"
        )


def scheduler_state_dict(values: Any) -> Any:
    """Return the ``state_dict()`` of one scheduler, or a list with one for each of several."""
    return [scheduler["state"] for scheduler in values] if isinstance(values, list) else values["state"]


def _scheduler_states(slot: str, _: Groups, values: Mapping[str, Any]) -> Any:
    return scheduler_state_dict(values[slot])


def _plain_values(slot: str, _: Groups, values: Mapping[str, Any]) -> Any:
    return values[slot]


_MAKERS = {"model": _model_state_dict, "optimizer": _optimizer_state_dicts, "scheduler": _scheduler_states}
