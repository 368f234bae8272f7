"""The content of the files of one component: tensors by the names they get there, and the origin of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rankless.engine.plan.global_spec import GlobalSpec, GlobalTensor
from rankless.engine.plan.split_tensors import stored_tensors
from rankless.ondisk.data_files import ADAPTER, TensorInfo, is_adapter_group
from rankless.ondisk.validation import split_state_key, state_key
from rankless.state.model.fused_layout import Stored, TensorOrigin

MODEL, OPTIMIZER, SCHEDULER = "model", "optimizer", "scheduler"


def name_in_component(kind: str, tensor: GlobalTensor) -> str | None:
    """Return the name of a tensor in the component ``kind``; ``None`` if it belongs to another one.

    The adapters of a model are one component, in which names begin with the folder of an adapter and a slash.
    """
    if kind == ADAPTER and is_adapter_group(tensor.group):
        return f"{tensor.group.removeprefix(ADAPTER).removeprefix('/')}/{tensor.name}"
    return tensor.name if tensor.group == kind else None


@dataclass(frozen=True)
class ComponentContent:
    """One component, as rank 0 lays it out in files.

    ``kind`` names the component. ``tensors`` are the tensors to store, and ``origins`` says where the bytes of each
    come from. ``tied`` maps further names to stored ones. ``values`` are encoded as in ``state.json``. ``companions``
    are small files that are stored next to a model or an adapter, by their path in the folder.
    """

    kind: str
    tensors: Mapping[str, TensorInfo]
    origins: Mapping[str, TensorOrigin]
    tied: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    companions: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The size of all tensors in bytes."""
        return sum(info.nbytes for info in self.tensors.values())

    def stored_as(self, stored: Callable[[Mapping[str, TensorInfo]], Stored]) -> ComponentContent:
        """Return a copy with the tensors as another library stores them, ties included."""
        by_name = stored(self.tensors)
        origins = {
            name: TensorOrigin(self.origins[origin.name].name, origin.start) for name, (_, origin) in by_name.items()
        }
        names = {origin.name: name for name, (_, origin) in by_name.items()}
        tied = {alias: names[name] for alias, name in self.tied.items() if name in names}
        return replace(self, tensors={name: info for name, (info, _) in by_name.items()}, origins=origins, tied=tied)

    def without_ties(self) -> ComponentContent:
        """Return a copy that stores tied tensors once under each name, for readers that do not support ties."""
        tensors = {**self.tensors, **{alias: self.tensors[name] for alias, name in self.tied.items()}}
        origins = {**self.origins, **{alias: self.origins[name] for alias, name in self.tied.items()}}
        return replace(self, tensors=tensors, origins=origins, tied={})


def component_content(
    kind: str, global_spec: GlobalSpec, values: Mapping[str, Any], companions: Mapping[str, bytes], prefix: str
) -> ComponentContent:
    """Return the content of a component that all ranks hold together. ``prefix`` is put before parameter names."""
    # Sorted by name: pipeline stages only know the order of their own tensors.
    stored = (
        stored_tensors(name, tensor.info, tensor.splits)
        for tensor in global_spec.iter_tensors()
        if (name := name_in_component(kind, tensor)) is not None
    )
    infos = dict(sorted(pair for tensors in stored for pair in tensors.items()))
    rename_tensor = _state_key_renamer(prefix) if kind == OPTIMIZER else lambda name: prefix + name
    return ComponentContent(
        kind,
        {rename_tensor(name): info for name, info in infos.items()},
        {rename_tensor(name): TensorOrigin(name, 0) for name in infos},
        {
            rename_tensor(alias): rename_tensor(name)
            for alias, name in sorted(global_spec.tied_names().get(kind, {}).items())
        },
        _prefix_values(kind, values, prefix) if prefix else values,
        companions,
    )


def _state_key_renamer(prefix: str) -> Callable[[str], str]:
    def rename_key(key: str) -> str:
        fqn, state = split_state_key(key)
        return state_key(prefix + fqn, state)

    return rename_key


def _prefix_values(kind: str, values: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    if kind == MODEL:
        return {prefix + name: value for name, value in values.items()}
    return {**values, "groups": [rename_tensors(group, lambda name: prefix + name) for group in values["groups"]]}


def rename_tensors(group: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """Return a parameter group with its parameters renamed."""
    return {
        **group,
        "params": [rename(name) for name in group["params"]],
        "state": {rename(name): states for name, states in group["state"].items()},
    }
