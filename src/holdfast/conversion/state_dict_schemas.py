"""Trees of state dicts, as PyTorch's users have them in one file, and as Lightning has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast.conversion.fake_tensors import Groups
from holdfast.errors import InvalidArgumentError
from holdfast.ondisk.param_order import BY_NUMBER, ORDERED
from holdfast.ondisk.validation import split_state_key

#: What Lightning asks of every checkpoint, for those that it has not written itself.
_LIGHTNING = {"epoch": 0, "global_step": 0, "pytorch-lightning_version": "2.0.0", "loops": None}


def state_dict_schema(groups: Groups, values: Mapping[str, Any]) -> Any:
    """The model's state dict where there is nothing else, else one of each thing under its name.

    ``optimizer`` is what ``Optimizer.load_state_dict`` takes, or a list of such; ``scheduler`` likewise.
    """
    rest = {name: value for name, value in values.items() if not name.startswith("model") or value}
    if groups.keys() == {"model"} and not rest.keys() - {"model"}:
        return _model("model", groups, values)
    tree: dict[str, Any] = {}
    for slot in sorted({*groups, *rest} - {"ranks"}):
        kind = slot.partition("/")[0]
        _put(tree, slot, _MAKERS.get(kind, _as_it_is)(slot, groups, values))
    return tree


def lightning_schema(groups: Groups, values: Mapping[str, Any]) -> Any:
    """A checkpoint of Lightning's ``Trainer``: ``state_dict``, ``optimizer_states``, and what it says of itself."""
    _check_model(groups)
    tree = lightning_metadata(groups, values)
    _add(tree, "state_dict", _model("model", groups, values))
    if "optimizer" in values:
        found = _optimizer("optimizer", groups, values)
        _add(tree, "optimizer_states", found if isinstance(found, list) else [found])
    return tree


def dcp_schema(groups: Groups, values: Mapping[str, Any]) -> dict[str, Any]:
    """What users of torch's distributed checkpoints save: ``model``, ``optim`` by name, and their own values.

    Values that are not under keys, or under these, are ``user_content``.
    """
    tree: dict[str, Any] = {}
    for slot in sorted({*groups, *values} - {"state", "ranks", "user_content"}):
        kind = slot.partition("/")[0]
        made = {**_MAKERS, "optimizer": _by_name}.get(kind, _as_it_is)(slot, groups, values)
        _put(tree, "optim" + slot.removeprefix(kind) if kind == "optimizer" else slot, made)
    content = _content(values)
    apart = content.keys().isdisjoint({*tree, "stateful", "user_content"})
    return {**content, **tree} if apart else {"user_content": values["user_content"], **tree}


def lightning_tensor_names(groups: Groups, values: Mapping[str, Any]) -> dict[str, Any]:
    """What Lightning has in a folder's distributed checkpoint.

    Its FSDP looks for the model under one key, its model-parallel strategy under another.
    """
    _check_model(groups)
    model = _model("model", groups, values)
    tree: dict[str, Any] = {"model": model, "state_dict": model}
    if "optimizer" not in values:
        return tree
    check_named(values["optimizer"])
    states = _by_name("optimizer", groups, values)["state"]
    for number, part in enumerate(_parts(values["optimizer"]["groups"])):
        names = [name for group in part for name in group["params"]]
        own = {name: states[name] for name in names if name in states}
        tree[f"optimizer_{number}"] = {"state": own, "param_groups": [_named(group) for group in part]}
    return tree


def lightning_metadata(groups: Groups, values: Mapping[str, Any]) -> dict[str, Any]:
    """What it has beside that, in ``meta.pt``."""
    del groups
    tree = {**_LIGHTNING, **_content(values)}
    if "scheduler" in values:
        found = scheduler_state_dict(values["scheduler"])
        _add(tree, "lr_schedulers", found if isinstance(found, list) else [found])
    elif "optimizer" in values:
        tree.setdefault("lr_schedulers", [])
    return tree


def _add(tree: dict[str, Any], key: str, value: Any) -> None:
    """Put in what Lightning has under a key, which must not be one of the user's content."""
    if key in tree:
        raise InvalidArgumentError(
            f"user_content has {key!r}, which is what Lightning calls a part of its own; save it under another key"
        )
    tree[key] = value


def booster_schema(groups: Groups, values: Mapping[str, Any]) -> dict[str, Any]:
    """What ColossalAI's Booster saves, by what its training scripts call the files; and the user's own values.

    Raises ``InvalidArgumentError`` where there is more than a Booster has.
    """
    others = sorted(slot for slot in {*groups, *values} if "/" in slot)
    if others or "model" not in groups:
        raise InvalidArgumentError(
            f"ColossalAI's Booster has one model and one optimizer, and there is {', '.join(others) or 'no model'}; "
            "choose one by keys, or convert with model_only"
        )
    tree: dict[str, Any] = {"model": _model("model", groups, values)}
    if "optimizer" in values:
        tree["optimizer"] = _one(_optimizer("optimizer", groups, values), "optimizer")
    if "scheduler" in values:
        tree["lr_scheduler"] = _one(_scheduler("scheduler", groups, values), "scheduler")
    return {**tree, "user_content.pt": values["user_content"]} if "user_content" in values else tree


def _one(found: Any, kind: str) -> Any:
    if isinstance(found, list):
        raise InvalidArgumentError(f"ColossalAI's Booster has one {kind}, and there are {len(found)}")
    return found


def _content(values: Mapping[str, Any]) -> dict[str, Any]:
    own = values.get("user_content")
    return dict(own) if isinstance(own, dict) else {} if own is None else {"user_content": own}


def _by_name(slot: str, groups: Groups, values: Mapping[str, Any]) -> Any:
    """An optimizer as ``get_optimizer_state_dict`` gives it; as ``state_dict()`` does, where nobody knows names."""
    if values[slot].get(BY_NUMBER):
        return _optimizer(slot, groups, values)
    states = _states(slot, groups)
    for group in values[slot]["groups"]:
        for name, plain in group["state"].items():
            states.setdefault(name, {}).update(plain)
    return {"state": states, "param_groups": [_named(group) for group in values[slot]["groups"]]}


def _named(group: Mapping[str, Any]) -> dict[str, Any]:
    """``param_names`` is asked for by optimizers that were given names, and by no others."""
    return {**group["settings"], "params": list(group["params"]), "param_names": list(group["params"])}


def _states(slot: str, groups: Groups) -> dict[str, dict[str, Any]]:
    """The tensors of an optimizer, by parameter and state."""
    states: dict[str, dict[str, Any]] = {}
    for key, tensor in groups.get(slot, {}).items():
        fqn, state = split_state_key(key)
        states.setdefault(fqn, {})[state] = tensor
    return states


def _check_model(groups: Groups) -> None:
    if "model" not in groups:
        raise InvalidArgumentError("a Lightning checkpoint has one model, and there is none; name it by keys")


def _put(tree: dict[str, Any], slot: str, value: Any) -> None:
    """``model/gen`` is ``gen`` in ``model``."""
    kind, _, name = slot.partition("/")
    if name:
        tree.setdefault(kind, {})[name] = value
    else:
        tree[kind] = value


def _model(slot: str, groups: Groups, values: Mapping[str, Any]) -> dict[str, Any]:
    return {**groups.get(slot, {}), **values.get(slot, {})}


def _optimizer(slot: str, groups: Groups, values: Mapping[str, Any]) -> Any:
    tensors, named = _states(slot, groups), not values[slot].get(BY_NUMBER)
    found = [optimizer_state_dict(part, tensors, named=named) for part in _parts(values[slot]["groups"])]
    return found[0] if len(found) == 1 else found


def _parts(groups: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Groups by their optimizer, each of which begins with group 0."""
    parts: list[list[Mapping[str, Any]]] = []
    for group in groups:
        if not parts or group["number"] == 0:
            parts.append([])
        parts[-1].append(group)
    return parts


def optimizer_state_dict(
    groups: Sequence[Mapping[str, Any]], tensors: Mapping[str, Mapping[str, torch.Tensor]], *, named: bool
) -> dict[str, Any]:
    """What ``Optimizer.load_state_dict`` takes, from the groups of one optimizer and the states by parameter.

    Raises ``InvalidArgumentError`` where nobody knows the order of the parameters.
    """
    unordered = next((group for group in groups if not group[ORDERED]), None)
    if unordered is not None:
        raise InvalidArgumentError(
            f"nobody knows the order of {unordered['params'][0]!r} and others in their optimizer, as stages of a "
            "pipeline, or several optimizers, saved them; load them into a model that is whole, and save that"
        )
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group["params"])}
    plain = {name: states for group in groups for name, states in group["state"].items()}
    states = {numbers[name]: {**tensors.get(name, {}), **plain.get(name, {})} for name in numbers}
    return {
        "state": {number: state for number, state in states.items() if state},
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
    """Raise ``InvalidArgumentError`` for the values of an optimizer whose parameters have no names."""
    if optimizer.get(BY_NUMBER):
        raise InvalidArgumentError(
            "the source knows the optimizer's parameters by number only, and nobody but the optimizer knows which they "
            "are: load it into the model and optimizer, and save these"
        )


def scheduler_state_dict(found: Any) -> Any:
    """What ``state_dict()`` of one scheduler, or of each of several, was."""
    return [one["state"] for one in found] if isinstance(found, list) else found["state"]


def _scheduler(slot: str, _: Groups, values: Mapping[str, Any]) -> Any:
    return scheduler_state_dict(values[slot])


def _as_it_is(slot: str, _: Groups, values: Mapping[str, Any]) -> Any:
    return values[slot]


_MAKERS = {"model": _model, "optimizer": _optimizer, "scheduler": _scheduler}
