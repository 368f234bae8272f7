"""What goes into the files of one part: tensors under the names that they get there, and where each comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.engine.plan.global_spec import GlobalSpec
from holdfast.engine.plan.split_tensors import stored_tensors
from holdfast.ondisk.files import TensorInfo
from holdfast.ondisk.validation import split_state_key, state_key
from holdfast.state.model.hf_layout import Stored, TensorOrigin

MODEL, OPTIMIZER, SCHEDULER = "model", "optimizer", "scheduler"


@dataclass(frozen=True)
class ComponentContent:
    """One part, as rank 0 lays it out in files.

    ``kind`` is the part; ``tensors`` are those to be stored, and ``origins`` says where each
    comes from; ``tied`` are further names of some. ``values`` are encoded as in ``state.json``, ``companions`` files
    that lie beside a model.
    """

    kind: str
    tensors: Mapping[str, TensorInfo]
    origins: Mapping[str, TensorOrigin]
    tied: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    companions: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    def stored_as(self, stored: Callable[[Mapping[str, TensorInfo]], Stored]) -> ComponentContent:
        """The same with tensors as somebody else stores them, ties included."""
        found = stored(self.tensors)
        origins = {
            name: TensorOrigin(self.origins[origin.name].name, origin.start) for name, (_, origin) in found.items()
        }
        names = {origin.name: name for name, (_, origin) in found.items()}
        tied = {alias: names[name] for alias, name in self.tied.items()}
        return replace(self, tensors={name: info for name, (info, _) in found.items()}, origins=origins, tied=tied)

    def untied(self) -> ComponentContent:
        """The same with tied tensors stored once under each name, for readers that know nothing of ties."""
        tensors = {**self.tensors, **{alias: self.tensors[name] for alias, name in self.tied.items()}}
        origins = {**self.origins, **{alias: self.origins[name] for alias, name in self.tied.items()}}
        return replace(self, tensors=tensors, origins=origins, tied={})


def component_content(
    kind: str, membership: GlobalSpec, values: Mapping[str, Any], companions: Mapping[str, bytes], prefix: str
) -> ComponentContent:
    """The content of a part that ranks hold together; ``prefix`` is put before the names of parameters and buffers."""
    # By name: stages of a pipeline know the order of their own tensors only.
    every = (stored_tensors(held.name, held.info, held.splits) for held in membership.tensors() if held.group == kind)
    infos = dict(sorted(pair for one in every for pair in one.items()))
    rename = _of_states(prefix) if kind == OPTIMIZER else lambda name: prefix + name
    return ComponentContent(
        kind,
        {rename(name): info for name, info in infos.items()},
        {rename(name): TensorOrigin(name, 0) for name in infos},
        {rename(alias): rename(name) for alias, name in sorted(membership.tied().get(kind, {}).items())},
        _with_prefix(kind, values, prefix) if prefix else values,
        companions,
    )


def _of_states(prefix: str) -> Callable[[str], str]:
    def rename(key: str) -> str:
        fqn, state = split_state_key(key)
        return state_key(prefix + fqn, state)

    return rename


def _with_prefix(kind: str, values: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    if kind == MODEL:
        return {prefix + name: value for name, value in values.items()}
    return {**values, "groups": [rename_tensors(group, lambda name: prefix + name) for group in values["groups"]]}


def rename_tensors(group: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """A parameter group with other names of parameters."""
    return {
        **group,
        "params": [rename(name) for name in group["params"]],
        "state": {rename(name): states for name, states in group["state"].items()},
    }
