"""What loading will put into an optimizer: checked and allocated at once, applied when all bytes are there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from holdfast.errors import OptimizerMismatchError
from holdfast.ondisk.files import TensorInfo
from holdfast.ondisk.validation import split_state_key, state_key
from holdfast.state.model import fsdp1
from holdfast.state.model.view import ParamRef
from holdfast.state.optimizer.adapters import TorchOptimizer
from holdfast.state.optimizer.native_states import as_native_states, check_state_shapes
from holdfast.state.optimizer.param_groups import Encoded, MatchLeeway, check_trained, match_groups
from holdfast.state.optimizer.probe import probe_states
from holdfast.state.optimizer.view import GroupMember, ParamGroup, place_states
from holdfast.state.tensors import DTYPES, TensorView, view_of


class OptimizerRestore:
    """The states and settings that the groups of an optimizer get. :attr:`targets` are the tensors to fill.

    Parameters that the checkpoint has no state of, :attr:`missing`, are left as they are.
    """

    def __init__(
        self, groups: Sequence[ParamGroup], saved: Encoded, infos: Mapping[str, TensorInfo], leeway: MatchLeeway
    ) -> None:
        """``saved`` and ``infos`` are the groups and state tensors of the checkpoint, other ranks' parameters included.

        Raises ``OptimizerMismatchError`` if the optimizer is of another class or, without leeway, has other parameters
        or other groups of them.
        """
        self._groups, self._saved, self._leeway = groups, saved, leeway
        matching = match_groups(groups, saved, leeway)
        self._matched, self.missing, self.regrouped = matching.settings, matching.missing, matching.regrouped
        self._states: list[tuple[ParamGroup, GroupMember, dict[str, torch.Tensor]]] = []
        self._together: list[tuple[str, list[torch.Tensor]]] = []
        self.targets: dict[str, TensorView] = {}
        by_name: dict[str, dict[str, TensorInfo]] = {}
        for name, info in infos.items():
            fqn, state = split_state_key(name)
            by_name.setdefault(fqn, {})[state] = info
        missing = set(self.missing)
        for group, own in zip(groups, self._matched, strict=True):
            check_state_shapes(group, own, by_name)
            for member in group.members:
                is_known = not member.handles or any(handle.name not in missing for handle in member.handles)
                if is_known and group.source.owns(member.key):
                    self._states.append((group, member, self._allocate(group, member, by_name)))

    def check_trained(self, trained: set[str]) -> list[str]:
        """The parameters of the checkpoint that no rank trains; an ``OptimizerMismatchError`` without leeway."""
        return check_trained(self._saved, trained, self._leeway)

    def _allocate(
        self, group: ParamGroup, member: GroupMember, infos: Mapping[str, Mapping[str, TensorInfo]]
    ) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = {}
        if all(handle.flat is not None and not handle.flat.parameter.numel() for handle in member.handles):
            return made  # FSDP1 gives such a parameter no gradient, and its optimizer has no state of it
        _check_together(member, infos)
        for handle in member.handles:
            for state, info in infos.get(handle.name, {}).items():
                name = state_key(handle.name, state)
                whole = made.get(state)
                if whole is not None and info.shape == ():
                    self.targets[name] = self._one_more(member, state, whole)
                    continue
                if whole is None:
                    whole = made[state] = _home(group, member, handle, state, info)
                self.targets[name] = _target(handle, state, whole, info)
        return made

    def _one_more(self, member: GroupMember, state: str, first: torch.Tensor) -> TensorView:
        """A value that parameters which share a flat parameter must share, too."""
        other = torch.empty_like(first)
        known = next((tensors for _, tensors in self._together if tensors[0] is first), None)
        if known is None:
            known = [first]
            self._together.append((f"{state!r} of {member.handles[0].name!r}", known))
        known.append(other)
        return view_of(other, state)

    def settings(self) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
        """The settings of each group, live, and the saved ones that it gets; none if it keeps its own."""
        for group, saved in zip(self._groups, self._matched, strict=True):
            yield group.settings, saved["settings"] if saved is not None else {}

    def apply(self) -> None:
        """Put states into the optimizer, after :func:`put_settings`."""
        for what, same in self._together:
            if not all(torch.equal(same[0], other) for other in same[1:]):
                raise OptimizerMismatchError(
                    f"{what} and of parameters that share its flat parameter differ in the checkpoint; FSDP1 keeps one "
                    "value for all of them: wrap with use_orig_params=True"
                )
        plain_states = {name: state for saved in self._saved for name, state in saved["state"].items()}
        for group, member, tensors in self._states:
            plain = {name: value for one in member.handles for name, value in plain_states.get(one.name, {}).items()}
            plain = as_native_states(group, member, plain)
            group.source.put(member.key, {**plain, **tensors} or None)
        for group in self._groups:
            group.source.settle()


def _check_together(member: GroupMember, infos: Mapping[str, Mapping[str, TensorInfo]]) -> None:
    """Raise ``OptimizerMismatchError`` where only some of the parameters in a flat parameter have a state."""
    first = member.handles[0] if member.handles else None
    for handle in member.handles[1:]:
        if first is not None and infos.get(handle.name, {}).keys() != infos.get(first.name, {}).keys():
            raise OptimizerMismatchError(
                f"the checkpoint has other optimizer states of {first.name!r} than of {handle.name!r}, which FSDP1 "
                "keeps as one here: wrap with use_orig_params=True"
            )


def put_settings(pairs: Sequence[tuple[dict[str, Any], Mapping[str, Any]]]) -> None:
    """Put saved settings into groups, of all optimizers that are loaded together.

    A tensor, such as a learning rate that a captured step reads, stays where it is. But if several groups share it, it
    cannot take the value of each: then they get tensors of their own, as ``Optimizer.load_state_dict`` gives them.
    """
    held = Counter(id(value) for group, _ in pairs for value in group.values() if isinstance(value, torch.Tensor))
    for group, saved in pairs:
        for name, value in saved.items():
            own = group.get(name)
            if not isinstance(own, torch.Tensor):
                group[name] = value
            elif held[id(own)] > 1:
                group[name] = own.clone().copy_(torch.as_tensor(value))
            else:
                own.copy_(torch.as_tensor(value))


def _target(handle: ParamRef, state: str, whole: torch.Tensor, info: TensorInfo) -> TensorView:
    """The part of a state tensor that a checkpoint's tensor goes into."""
    found = place_states(handle, state, whole)
    if (found.shape, found.dtype) != (info.shape, info.dtype):
        raise _unknown(handle, state, info)
    return found


def _home(group: ParamGroup, member: GroupMember, handle: ParamRef, state: str, info: TensorInfo) -> torch.Tensor:
    """The tensor that a state is kept in: the one that is there if it fits, else a new one."""
    dtype = DTYPES[info.dtype]
    existing = group.source.states(member.key).get(state)
    if isinstance(existing, torch.Tensor) and existing.dtype == dtype and _fits(handle, existing, info):
        return existing
    if info.shape == handle.like.shape and isinstance(member.key, torch.Tensor):
        if handle.flat is not None:
            return fsdp1.blank_flat_state(handle.flat, dtype)
        return torch.empty_like(member.key, dtype=dtype, requires_grad=False)
    if info.shape == ():
        on_device = bool(group.settings.get("fused") or group.settings.get("capturable"))
        device = member.key.device if on_device and isinstance(member.key, torch.Tensor) else "cpu"
        return torch.empty((), dtype=dtype, device=device)
    return _probed(group, member, handle, state, info)


def _fits(handle: ParamRef, existing: torch.Tensor, info: TensorInfo) -> bool:
    if handle.flat is not None and existing.ndim:
        return info.shape == handle.like.shape and existing.shape == handle.flat.parameter.shape
    return tuple(existing.shape) == info.shape


def _probed(group: ParamGroup, member: GroupMember, handle: ParamRef, state: str, info: TensorInfo) -> torch.Tensor:
    """As the optimizer itself would make it at its first step; whole, where nothing is divided."""
    if not isinstance(member.key, torch.Tensor):
        return torch.empty(info.shape, dtype=DTYPES[info.dtype])
    if not handle.like.is_divided():
        return torch.empty(info.shape, dtype=DTYPES[info.dtype], device=member.key.device)
    if not isinstance(group.source, TorchOptimizer):
        raise _unknown(handle, state, info)
    found = probe_states(group.source.optimizer, member.key).get(state)
    if found is None or found.shape != info.shape or (found.mesh is None and found.shape):
        raise _unknown(handle, state, info)
    return found.empty().to(DTYPES[info.dtype])


def _unknown(handle: ParamRef, state: str, info: TensorInfo) -> OptimizerMismatchError:
    return OptimizerMismatchError(
        f"optimizer state {state_key(handle.name, state)!r} has shape {list(info.shape)}, its parameter "
        f"{list(handle.like.shape)}: how it is laid out cannot be told before the optimizer's first step"
    )
