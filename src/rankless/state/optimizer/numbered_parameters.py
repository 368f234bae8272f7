"""Parameters of an optimizer that have only a number, in a checkpoint (as in ``state_dict()``) or here.

:mod:`rankless.state.restore` calls it on each rank while it matches an optimizer, if the parameters have no names on
one side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from msgspec.structs import replace

from rankless.errors import OptimizerMismatchError
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.validation import split_state_key
from rankless.ondisk.value_files import ORDERED
from rankless.state.model.model_view import ParamRef
from rankless.state.optimizer.foreign_states import probe_member
from rankless.state.optimizer.optimizer_view import GroupMember, ParamGroup, parameter_names
from rankless.state.optimizer.param_groups import EncodedGroups
from rankless.state.tensor_subclasses import is_description

#: The shapes of the states of a parameter by their names.
_StateShapes = dict[str, tuple[int, ...]]


def match_by_number(groups: Sequence[ParamGroup], saved: EncodedGroups) -> list[ParamGroup]:
    """Return the same groups, with parameters named by their number, counted over all groups of an optimizer.

    Parameters that share a flat parameter are counted in its order. With several optimizers the number of each is
    prepended: for example ``1.0`` for the first parameter of the second optimizer. Raises ``OptimizerMismatchError`` if
    a flat parameter is used and the number of parameters differs.
    """
    number = sum(len(group["params"]) for group in saved)
    _check_flat_params(groups, number)
    counts: dict[int, int] = {id(group.adapter): 0 for group in groups}
    order = list(counts)
    numbered_groups = []
    for group in groups:
        identity = id(group.adapter)
        prefix = f"{order.index(identity)}." if len(order) > 1 else ""
        members = []
        for member in group.members:
            members.append(_number_member(member, prefix, counts[identity]))
            counts[identity] += len(member.refs)
        numbered_groups.append(replace(group, members=members))
    return numbered_groups


def has_only_numbers(groups: Sequence[ParamGroup], saved: EncodedGroups) -> bool:
    """Return whether an ``Optimizer.state_dict()`` was saved as a dict, and parameters here have other names."""
    names = {name for group in saved for name in group["params"]}
    return names == {str(number) for number in range(len(names))} and names.isdisjoint(parameter_names(groups))


def has_names(groups: Sequence[ParamGroup]) -> bool:
    """Return whether parameters have names and not only positions, according to the optimizer itself."""
    return any("param_names" in group.settings for group in groups) or any(
        isinstance(member.key, str) for group in groups for member in group.members
    )


def match_by_position(groups: Sequence[ParamGroup], saved: EncodedGroups) -> list[ParamGroup]:
    """Return the same groups, with parameters named like those at the same positions in a checkpoint.

    Raises ``OptimizerMismatchError`` if the checkpoint does not have positions, or another number of parameters.
    """
    saved_names = [name for group in saved for name in group["params"]]
    if not all(group.get(ORDERED) for group in saved):
        raise OptimizerMismatchError(
            "the checkpoint has the optimizer's parameters by name, in an unknown order, and here they have no names: "
            "pass the model, or create the optimizer with model.named_parameters()"
        )
    if len(saved_names) != sum(len(group.members) for group in groups):
        raise OptimizerMismatchError(
            f"the checkpoint holds an optimizer of {len(saved_names)} parameters, this one trains "
            f"{sum(len(group.members) for group in groups)}; pass the model, so that they are matched by name"
        )
    names = iter(saved_names)
    return [
        replace(group, members=[_rename_member(member, next(names)) for member in group.members]) for group in groups
    ]


def _rename_member(member: GroupMember, name: str) -> GroupMember:
    return GroupMember(member.key, tuple(ParamRef(name, ref.tensor, ref.flat) for ref in member.refs))


def skip_frozen(groups: list[ParamGroup], saved: EncodedGroups) -> list[ParamGroup]:
    """Return the groups, with no reference for frozen parameters if ``saved`` has as many as are trained here.

    ColossalAI's LowLevelZero saves an optimizer so, and nothing in its files tells which parameters were trained: these
    may have been others.
    """
    number = sum(len(group["params"]) for group in saved)
    members = [member for group in groups for member in group.members]
    trained = [member for member in members if not isinstance(member.key, torch.Tensor) or member.key.requires_grad]
    if len(members) == number or len(trained) != number:
        return groups
    trained_ids = {id(member) for member in trained}
    return [
        replace(group, members=[m if id(m) in trained_ids else GroupMember(m.key, ()) for m in group.members])
        for group in groups
    ]


def _check_flat_params(groups: Sequence[ParamGroup], number: int) -> None:
    members = [member for group in groups for member in group.members]
    shared = next((member for member in members if len(member.refs) > 1), None)
    if shared is not None and sum(len(member.refs) for member in members) != number:
        raise OptimizerMismatchError(
            "the checkpoint has the optimizer's parameters by number only, and FSDP1 keeps "
            f"{shared.refs[0].name!r} and others as one here: wrap with use_orig_params=True"
        )


def _number_member(member: GroupMember, prefix: str, first: int) -> GroupMember:
    numbered_refs = enumerate(member.refs, start=first)
    return GroupMember(member.key, tuple(ParamRef(f"{prefix}{i}", ref.tensor, ref.flat) for i, ref in numbered_refs))


def check_order(groups: Sequence[ParamGroup], saved: EncodedGroups, infos: Mapping[str, TensorInfo]) -> None:
    """Raise ``OptimizerMismatchError`` if no state has the shape of the parameter with its number.

    Besides one of that shape there may be any others, such as scales of blocks.
    """
    shapes_of = _state_shapes(saved, infos)
    for group in groups:
        for member in group.members:
            if _has_shape(member):
                _check_member(group, member, shapes_of)


def _check_member(group: ParamGroup, member: GroupMember, shapes_of: Mapping[str, _StateShapes]) -> None:
    for ref in member.refs:
        shapes, shape = shapes_of.get(ref.name, {}), ref.tensor.shape
        misfit = next((state for state, other in shapes.items() if not _can_spread(other, shape)), None)
        if misfit is None or shape in shapes.values() or _is_created(group, member, misfit, shapes[misfit]):
            continue
        raise OptimizerMismatchError(
            f"the optimizer's parameters are matched by position only; {misfit!r} of {ref.name!r} has shape "
            f"{list(shapes[misfit])} in the checkpoint, the parameter at that position has {list(shape)} here: "
            "create the optimizer with its parameters in the order in which it was saved"
        )


def _is_created(group: ParamGroup, member: GroupMember, state: str, shape: tuple[int, ...]) -> bool:
    """Return whether the optimizer creates a state of that shape: Adafactor of transformers has one for each row."""
    probed = probe_member(group, member).get(state)
    return probed is not None and probed.shape == shape


def _state_shapes(saved: EncodedGroups, infos: Mapping[str, TensorInfo]) -> dict[str, _StateShapes]:
    """Return the shapes of the states of each parameter, states of wrapper subclasses included."""
    shapes: dict[str, _StateShapes] = {}
    for name, info in infos.items():
        number, state = split_state_key(name)
        shapes.setdefault(number, {})[state] = info.shape
    for number, states in (item for group in saved for item in group["state"].items()):
        described = {state: tuple(value["shape"]) for state, value in states.items() if is_description(value)}
        shapes.setdefault(number, {}).update(described)
    return shapes


def _has_shape(member: GroupMember) -> bool:
    """Return whether the shape of a parameter is known: a state dict has only its number or name."""
    return isinstance(member.key, torch.Tensor)


def _can_spread(shape: tuple[int, ...], over: tuple[int, ...]) -> bool:
    """Return whether a state's shape fits a parameter's: one value for each element, row, column or tensor.

    For example, states of shape ``(8, 1)``, ``(4,)`` and ``()`` fit a parameter of shape ``(8, 4)``.
    """
    last = over[len(over) - len(shape) :]
    return len(shape) <= len(over) and all(size in {1, whole} for size, whole in zip(shape, last, strict=True))
