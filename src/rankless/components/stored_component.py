"""The content of the files of one component: tensors by the names they get there, and the origin of each.

Rank 0 makes it in the vote "preparing the save". Names and order of the tensors must not depend on the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from rankless.conversion.config_dtype import set_config_dtype
from rankless.engine.plan.global_spec import GlobalSpec, GlobalTensor
from rankless.engine.plan.split_tensors import split_ranges, stored_tensors
from rankless.ondisk.data_files import ADAPTER, CONFIG, TensorInfo, is_adapter_group
from rankless.ondisk.dtypes import TORCH_NAMES
from rankless.ondisk.torchao_form import check_described, flat_names, header_notes, select_described
from rankless.ondisk.validation import split_state_key, state_key
from rankless.state.model.fused_layout import StoredLayout

MODEL, OPTIMIZER, SCHEDULER = "model", "optimizer", "scheduler"


def name_in_component(kind: str, tensor: GlobalTensor) -> str | None:
    """Return the name of a tensor in the component ``kind``; ``None`` if it belongs to another one.

    The adapters of a model are one component: their names begin with the folder of an adapter and a slash. For example,
    tensors in the group ``adapter/fr`` have names that begin with ``fr/``.
    """
    if kind == ADAPTER and is_adapter_group(tensor.group):
        return f"{tensor.group.removeprefix(ADAPTER).removeprefix('/')}/{tensor.name}"
    return tensor.name if tensor.group == kind else None


class TensorOrigin(NamedTuple):
    """Bytes ``[start, stop)`` of the tensor called ``name``, which a stored tensor has from its byte ``at`` on."""

    name: str
    start: int
    stop: int
    at: int = 0


@dataclass(frozen=True)
class StoredComponent:
    """One component, as rank 0 lays it out in files.

    ``kind`` names the component. ``tensors`` are the tensors to store, and ``origins`` says where the bytes of each
    come from. ``tied`` maps further names to stored ones. ``values`` are encoded as in ``state.json``. ``companions``
    are small files that are stored next to a model or an adapter, by their path in the folder. ``notes`` are entries of
    the metadata of each safetensors file. For example, ``tied`` maps ``lm_head.weight`` to ``embed.weight``.
    """

    kind: str
    tensors: Mapping[str, TensorInfo]
    origins: Mapping[str, Sequence[TensorOrigin]]
    tied: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    companions: Mapping[str, bytes] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The size of all tensors in bytes."""
        return sum(info.nbytes for info in self.tensors.values())

    def stored_as(self, stored: Callable[[Mapping[str, TensorInfo]], StoredLayout]) -> StoredComponent:
        """Return a copy with the tensors as another library stores them, ties included.

        Tensors of this copy must be stored whole and unchanged.
        """
        layout = stored(self.tensors)
        origins: dict[str, list[TensorOrigin]] = {name: [] for name in layout.tensors}
        names = {}
        for name, splits in layout.splits.items():
            info, (whole,) = self.tensors[name], self.origins[name]
            for (start, stop), stored_name, at in split_ranges(info, splits):
                origins[stored_name].append(TensorOrigin(whole.name, start, stop, at))
            if not info.nbytes:
                origins[splits[0].name].append(whole)
            if len({split.name for split in splits}) == 1:
                names[name] = splits[0].name
        tied = {alias: names[name] for alias, name in self.tied.items() if name in names}
        return replace(self, tensors=layout.tensors, origins=origins, tied=tied)

    def in_torchao_form(self) -> StoredComponent:
        """Return a copy with the tensors that torchao has quantized as torchao stores them in safetensors files.

        Raises ``UnsupportedTensorError`` if transformers would not open the model, because torchao cannot describe one.
        """
        described = select_described(self.values)
        check_described(self.values, described, self.companions.get(CONFIG, b"{}"))
        new_names = flat_names(described)
        plain = [name for name in (*self.tensors, *self.tied) if name not in new_names]
        return replace(
            self,
            tensors={new_names.get(name, name): info for name, info in self.tensors.items()},
            origins={new_names.get(name, name): origins for name, origins in self.origins.items()},
            tied={new_names.get(alias, alias): new_names.get(name, name) for alias, name in self.tied.items()},
            notes=header_notes(described, plain),
        )

    def with_dtype(self, dtype: str) -> StoredComponent:
        """Return a copy with a configuration for tensors that are cast to ``dtype``, by its safetensors name."""
        config = self.companions.get(CONFIG)
        if config is None:
            return self
        return replace(self, companions={**self.companions, CONFIG: set_config_dtype(config, TORCH_NAMES[dtype])})

    def without_ties(self) -> StoredComponent:
        """Return a copy that stores tied tensors once under each name, for readers that do not support ties."""
        tensors = {**self.tensors, **{alias: self.tensors[name] for alias, name in self.tied.items()}}
        origins = {**self.origins, **{alias: self.origins[name] for alias, name in self.tied.items()}}
        return replace(self, tensors=tensors, origins=origins, tied={})


def stored_component(
    kind: str, global_spec: GlobalSpec, values: Mapping[str, Any], companions: Mapping[str, bytes], prefix: str
) -> StoredComponent:
    """Return the content of a component that all ranks hold together. ``prefix`` is put before parameter names.

    For example, with the prefix ``net.`` the file has ``net.0.weight`` for ``0.weight``.
    """
    # Sorted by name: pipeline stages only know the order of their own tensors.
    stored = (
        stored_tensors(name, tensor.info, tensor.splits)
        for tensor in global_spec.iter_tensors()
        if (name := name_in_component(kind, tensor)) is not None
    )
    infos = dict(sorted(pair for tensors in stored for pair in tensors.items()))
    rename_tensor = _state_key_renamer(prefix) if kind == OPTIMIZER else lambda name: prefix + name
    return StoredComponent(
        kind,
        {rename_tensor(name): info for name, info in infos.items()},
        {rename_tensor(name): [TensorOrigin(name, 0, info.nbytes)] for name, info in infos.items()},
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
