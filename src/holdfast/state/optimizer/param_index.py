"""Parameters of an optimizer that are known by number only, in a checkpoint (as ``state_dict()`` has them) or here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from holdfast.errors import OptimizerMismatchError
from holdfast.ondisk.files import TensorInfo
from holdfast.ondisk.param_order import ORDERED
from holdfast.ondisk.validation import split_state_key
from holdfast.state.model.view import ParamRef
from holdfast.state.optimizer.param_groups import Encoded
from holdfast.state.optimizer.view import GroupMember, ParamGroup


def match_by_number(found: Sequence[ParamGroup], saved: Encoded) -> list[ParamGroup]:
    """The same groups, with parameters named by their number, counted over all groups of an optimizer.

    Where ``saved`` are as many as are trained here, and no more, frozen ones are not counted (as ColossalAI's
    LowLevelZero saves them), and have no number. Parameters that share a flat parameter are counted in its order. With
    several optimizers the number of each comes before: ``1.0``. Raises ``OptimizerMismatchError`` where a flat
    parameter has not as many as were saved.
    """
    number = sum(len(group["params"]) for group in saved)
    found = _counted(found, number)
    _check_flat(found, number)
    reached: dict[int, int] = {id(group.source): 0 for group in found}
    order = list(reached)
    numbered = []
    for group in found:
        source = id(group.source)
        prefix = f"{order.index(source)}." if len(order) > 1 else ""
        members = []
        for one in group.members:
            members.append(_numbered(one, prefix, reached[source]))
            reached[source] += len(one.handles)
        numbered.append(replace(group, members=members))
    return numbered


def has_names(found: Sequence[ParamGroup]) -> bool:
    """Whether parameters are known by more than their places, for what the optimizer itself says of them."""
    return any("param_names" in group.settings for group in found) or any(
        isinstance(member.key, str) for group in found for member in group.members
    )


def match_by_position(found: Sequence[ParamGroup], saved: Encoded) -> list[ParamGroup]:
    """The same groups, with parameters that have no names here called as those in the same places in a checkpoint.

    Raises ``OptimizerMismatchError`` where the places are not known there, or there is another number of them.
    """
    theirs = [name for group in saved for name in group["params"]]
    if not all(group.get(ORDERED) for group in saved):
        raise OptimizerMismatchError(
            "the checkpoint has the optimizer's parameters by name, in an order that nobody knows, and here they have "
            "no names: pass the model, or make the optimizer with model.named_parameters()"
        )
    if len(theirs) != sum(len(group.members) for group in found):
        raise OptimizerMismatchError(
            f"the checkpoint holds an optimizer of {len(theirs)} parameters, this one trains "
            f"{sum(len(group.members) for group in found)}; pass the model, so that they are found by name"
        )
    name = iter(theirs)
    return [replace(group, members=[_called(one, next(name)) for one in group.members]) for group in found]


def _called(member: GroupMember, name: str) -> GroupMember:
    return GroupMember(member.key, tuple(ParamRef(name, one.like, one.flat) for one in member.handles))


def _counted(found: Sequence[ParamGroup], number: int) -> Sequence[ParamGroup]:
    """The groups, with frozen parameters known by nothing where all that are trained are just as many as ``number``."""
    members = [member for group in found for member in group.members]
    trained = [member for member in members if not isinstance(member.key, torch.Tensor) or member.key.requires_grad]
    if len(members) == number or len(trained) != number:
        return found
    known = {id(member) for member in trained}
    return [
        replace(group, members=[one if id(one) in known else GroupMember(one.key, ()) for one in group.members])
        for group in found
    ]


def _check_flat(found: Sequence[ParamGroup], number: int) -> None:
    members = [member for group in found for member in group.members]
    shared = next((member for member in members if len(member.handles) > 1), None)
    if shared is not None and sum(len(member.handles) for member in members) != number:
        raise OptimizerMismatchError(
            "the checkpoint knows the optimizer's parameters by number only, and FSDP1 keeps "
            f"{shared.handles[0].name!r} and others as one here: wrap with use_orig_params=True"
        )


def _numbered(member: GroupMember, prefix: str, first: int) -> GroupMember:
    handles = enumerate(member.handles, start=first)
    return GroupMember(member.key, tuple(ParamRef(f"{prefix}{i}", one.like, one.flat) for i, one in handles))


def check_order(found: Sequence[ParamGroup], infos: Mapping[str, TensorInfo]) -> None:
    """Raise ``OptimizerMismatchError`` where a state is not of the shape of the parameter that has its number."""
    known = (member for group in found for member in group.members if _has_shape(group, member))
    handles = (handle for member in known for handle in member.handles)
    shapes = {handle.name: handle.like.shape for handle in handles}
    for name, info in infos.items():
        number, state = split_state_key(name)
        shape = shapes.get(number, info.shape)
        if not _spreads(info.shape, shape):
            raise OptimizerMismatchError(
                f"the optimizer's parameters are known by their places only; {state!r} of {number!r} has shape "
                f"{list(info.shape)} in the checkpoint, the parameter in that place has {list(shape)} here: make the "
                "optimizer with its parameters in the order in which it was saved"
            )


def _has_shape(group: ParamGroup, member: GroupMember) -> bool:
    """Whether it is known here: not of what a state dict has no states of."""
    return isinstance(member.key, torch.Tensor) or bool(group.source.states(member.key))


def _spreads(shape: tuple[int, ...], over: tuple[int, ...]) -> bool:
    """Whether a state of a shape can be that of a parameter: one value for each element, row, column or tensor."""
    last = over[len(over) - len(shape) :]
    return len(shape) <= len(over) and all(size in {1, whole} for size, whole in zip(shape, last, strict=True))
