"""PEFT adapters of a model, as PEFT stores them: the names of their tensors, and their configuration.

The names come from ``peft.get_peft_model_state_dict``, which selects and renames the entries of a state dict. It gets
one with tensors without data, so that nothing is gathered. Each of its results is one of these tensors, except for
tensors that PEFT computes when it saves, such as the output of a prompt encoder.

:mod:`rankless.state.capture` and :mod:`rankless.state.restore` call it on each rank. PEFT reads these names of tensors
and this configuration: do not change them.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from rankless.errors import StateError, UnsafeNameError
from rankless.ondisk.data_files import ADAPTER_CONFIG, adapter_group
from rankless.ondisk.validation import check_relative_path
from rankless.state.model.hf_config import base_config_files, unwrap_model
from rankless.state.model.model_view import ModelView
from rankless.state.model.wrapper_modules import NameCleaner
from rankless.state.tensor_views import TensorView, view_of

#: The folder, next to the configuration, of the base model's configuration files.
BASE = "base"

#: Settings that may differ: how an adapter is initialized and where it comes from, and what the names and shapes of its
#: tensors show.
_FREE_SETTINGS = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "runtime_config"),
    *("task_type", "target_modules", "exclude_modules", "modules_to_save", "layers_pattern", "layers_to_transform"),
    *("init_lora_weights", "init_weights", "loftq_config", "eva_config", "corda_config", "r", "rank_pattern"),
}

#: The prefix of names in PEFT's files. It is absent if transformers itself puts adapters into a model.
_PREFIX = "base_model.model."


class AdapterTensors(msgspec.Struct, frozen=True):
    """The tensors of one adapter by PEFT's names.

    ``sources`` are the names in the model of tensors that are stored as they are. ``computed`` are those that PEFT
    computes when it saves: nothing can be loaded into the model from them.
    """

    sources: Mapping[str, str]
    computed: Mapping[str, torch.Tensor]

    def select(self, view: ModelView) -> dict[str, TensorView]:
        """Return the tensors to be stored, given the ``view`` of the model."""
        sources = {name: view.tensors[source] for name, source in self.sources.items()}
        computed = {name: view_of(tensor, f"adapter tensor {name!r}") for name, tensor in self.computed.items()}
        return sources | computed


def adapted_modules(parts: Sequence[object]) -> list[nn.Module]:
    """Return the modules with PEFT adapters among the parts of a model, without the wrappers around them."""
    modules = [unwrap_model(part) for part in parts if isinstance(part, nn.Module)]
    return [module for module in modules if adapter_names(module)]


def adapter_names(module: nn.Module) -> list[str]:
    """Return the names of the PEFT adapters of a module."""
    configs = getattr(module, "peft_config", None)
    if not isinstance(configs, dict) or not all(hasattr(config, "peft_type") for config in configs.values()):
        return []
    return list(configs)


def check_unmerged(parts: Sequence[object]) -> None:
    """Raise ``StateError`` if adapters are merged into the weights of a model.

    A checkpoint does not say that they are, so a model that loads it would count them twice.
    """
    for module in adapted_modules(parts):
        if any(getattr(layer, "merged_adapters", None) for layer in module.modules()):
            raise StateError(
                "the adapter is merged into the weights of the model: call model.unmerge_adapter() before a save or a "
                "load, or save model.merge_and_unload()"
            )


def explain_config_differences(parts: Sequence[object], configs: Mapping[str, bytes]) -> Iterator[str]:
    """Yield how adapters of a model are configured in another way than those that are stored.

    ``configs`` are the stored configurations by group. Tensors show which layers have an adapter, and its rank; only
    the configuration says how strong it is.
    """
    for module in adapted_modules(parts):
        names = adapter_names(module)
        for adapter in names:
            group = next(iter(configs)) if len(names) == len(configs) == 1 else adapter_group(adapter)
            if group in configs:
                yield from _compare_configs(adapter, configs[group], module)


def _compare_configs(adapter: str, stored: bytes, module: nn.Module) -> Iterator[str]:
    try:
        there, here = json.loads(stored), json.loads(_config_file(module, adapter))
        keys = sorted(there.keys() & here.keys() - _FREE_SETTINGS)
    except Exception:  # noqa: BLE001 - the file or the model may have anything, and the load does not need it
        yield f"the configuration of the adapter {adapter!r} cannot be compared with the one here"
        return
    for key in keys:
        stored_value, value = there[key], here[key]
        if _as_unordered(stored_value) != _as_unordered(value) and "dropout" not in key:
            yield f"{key} of the adapter {adapter!r} is {stored_value!r:.80} in the checkpoint, and {value!r:.80} here"


def _as_unordered(value: object) -> object:
    """Return a setting in a form without an order of lists, because these may have been sets."""
    return sorted(map(str, value)) if isinstance(value, list) else value


def adapter_tensors(module: nn.Module, adapter: str, view: ModelView) -> AdapterTensors:
    """Return the tensors of one adapter, given the ``view`` of the whole model.

    Raises ``StateError`` if PEFT computes some of them, and ranks hold only shards of the tensors that it needs.
    """
    _check_name(adapter)
    model = _AdaptedModel(module, adapter)
    owners = {name: view.tied.get(name, name) for name in (*view.tensors, *view.tied)}
    stand_ins = {name: torch.empty(view.tensors[owners[name]].shape, device="meta") for name in owners}
    names = {id(stand_in): owners[name] for name, stand_in in stand_ins.items()}
    names |= {id(tensor): owners[name] for name, tensor in model.prompt_parameters() if name in owners}
    try:
        stored = model.adapter_state_dict(stand_ins)
        is_traced = not any(value.is_meta and id(value) not in names for value in stored.values())
    except StateError:
        raise
    except Exception:  # noqa: BLE001 - PEFT's code for this kind of adapter needs values
        stored, is_traced = {}, False
    if not is_traced:
        names |= {id(view.tensors[source].local): source for source in owners.values()}
        stored = model.adapter_state_dict(_whole_tensors(view, owners, adapter))
    prefix = "" if _is_peft_model(module) else _PREFIX
    sources = {prefix + name: names[id(value)] for name, value in stored.items() if id(value) in names}
    computed = {prefix + name: value.detach() for name, value in stored.items() if id(value) not in names}
    if any(source in view.splits for source in sources.values()):
        raise StateError(f"a state_dict hook splits tensors of the adapter {adapter!r}: pass state_dict_hooks=False")
    return AdapterTensors(sources, computed)


def _check_name(adapter: str) -> None:
    """Raise ``StateError`` if the name of an adapter cannot be the name of a folder."""
    try:
        check_relative_path(f"{adapter_group(adapter)}/{ADAPTER_CONFIG}", "the checkpoint")
        is_folder = "/" not in adapter and not adapter.startswith(".")
    except (UnsafeNameError, UnicodeEncodeError):
        is_folder = False
    if not is_folder:
        raise StateError(f"the name of the adapter {adapter[:80]!r} cannot be that of a folder: choose another name")


def loadable_views(parts: Sequence[object], view: ModelView, groups: Sequence[str]) -> dict[str, ModelView]:
    """Return a view of each adapter of a model by the stored group, of ``groups``, that is loaded into it.

    An adapter that is the only one of the model gets the only group that is stored, whatever its name. Raises
    ``StateError`` if an adapter cannot be loaded, as PEFT has computed the stored tensors.
    """
    views: dict[str, ModelView] = {}
    modules = adapted_modules(parts)
    names = dict.fromkeys(name for module in modules for name in adapter_names(module))
    is_only = len(names) == len(groups) == 1
    for module in modules:
        for adapter in adapter_names(module):
            tensors = adapter_tensors(module, adapter, view)
            if tensors.computed:
                raise StateError(
                    f"{next(iter(tensors.computed))!r} of the adapter {adapter!r} is computed when it is saved: it "
                    "cannot be loaded into a model that is trained. Open the adapter by PeftModel.from_pretrained, or "
                    "load a checkpoint of the whole model"
                )
            merged = views.setdefault(groups[0] if is_only else adapter_group(adapter), ModelView())
            merged.tensors |= tensors.select(view)
            merged.buffers |= {name for name, source in tensors.sources.items() if source in view.buffers}
    return views


def adapter_files(module: nn.Module, adapter: str) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of an adapter's small files: its configuration, and the base model's."""
    yield ADAPTER_CONFIG, _config_file(module, adapter)
    yield from ((f"{BASE}/{name}", data) for name, data in base_config_files(_base_model(module)))


def _config_file(module: nn.Module, adapter: str) -> bytes:
    """Return the configuration of an adapter as ``PeftModel.save_pretrained`` writes it, with sets sorted."""
    model: Any = module
    config = copy.deepcopy(model.peft_config[adapter])
    base = _base_model(module)
    config.base_model_name_or_path = config.base_model_name_or_path or base.__dict__.get("name_or_path") or None
    config.inference_mode = True
    table = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    if config.task_type is None:
        base_class = next(cls for cls in type(base).__mro__ if not cls.__module__.startswith("torch.distributed"))
        table["auto_mapping"] = {"base_model_class": base_class.__name__, "parent_library": base_class.__module__}
    return json.dumps(table, indent=2, sort_keys=True).encode()


def _base_model(module: Any) -> Any:
    return module.get_base_model() if _is_peft_model(module) else module


def _is_peft_model(module: nn.Module) -> bool:
    """Return whether a module is PEFT's wrapper, and not a model with adapters that transformers itself has put in."""
    return hasattr(module, "get_base_model")


def _whole_tensors(view: ModelView, owners: Mapping[str, str], adapter: str) -> dict[str, torch.Tensor]:
    if any(tensor.layout is not None for tensor in view.tensors.values()):
        raise StateError(
            f"PEFT computes what it stores of the adapter {adapter!r} from tensors of which this rank holds only shards"
        )
    return {name: view.tensors[source].local for name, source in owners.items()}


class _AdaptedModel:
    """A module as ``get_peft_model_state_dict`` sees it: without the names of wrappers, and without tensor parallelism.

    A state dict without data has no shards to be gathered. PEFT would look for the base model on the hub.
    """

    _tp_size = _tp_plan = None

    def __init__(self, module: Any, adapter: str) -> None:
        self._module = module
        config: Any = copy.copy(self._module.peft_config[adapter])
        self._adapter, self._source = adapter, config.base_model_name_or_path
        config.base_model_name_or_path = None
        self.peft_config = {**self._module.peft_config, adapter: config}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules, with the names that checkpoints have."""
        clean_name = NameCleaner(self._module)
        return ((clean_name(name), module) for name, module in self._module.named_modules())

    def prompt_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters of a prompt encoder by their names in the model; none for other adapters."""
        encoders, prefix = getattr(self._module, "prompt_encoder", {}), f"prompt_encoder.{self._adapter}"
        if self._adapter not in encoders:
            return []
        clean_name = NameCleaner(encoders[self._adapter])
        parameters = encoders[self._adapter].named_parameters()
        return [(f"{prefix}.{clean_name(name)}", tensor) for name, tensor in parameters]

    def get_prompt_embedding_to_save(self, adapter_name: str) -> torch.Tensor:
        """Return the prompt: the one parameter of an encoder that has no other, else the encoder's result."""
        parameters = self.prompt_parameters()
        if len(parameters) == 1:
            return parameters[0][1]
        if any(type(tensor.data) is not torch.Tensor for _, tensor in parameters):
            raise StateError(
                f"the prompt of the adapter {adapter_name!r} is computed by an encoder of which this rank holds only "
                "shards"
            )
        with torch.no_grad():
            prompt: torch.Tensor = self._module.get_prompt_embedding_to_save(adapter_name)
        return prompt

    def adapter_state_dict(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the entries of a state dict that PEFT stores for the adapter, under PEFT's names."""
        from peft import get_peft_model_state_dict  # noqa: PLC0415 - imported already, as the model has adapters

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it stores embeddings
            entries: dict[str, torch.Tensor] = get_peft_model_state_dict(
                self, dict(state), self._adapter, save_embedding_layers=self._is_resized() or "auto"
            )
        return entries

    def _is_resized(self) -> bool:
        """Return whether the vocabulary of the base model was resized, so that PEFT stores its embeddings, too.

        PEFT looks for the size of the base model on the hub, this function only in local files.
        """
        config: Any = getattr(self._module, "config", None)
        size = getattr(config, "vocab_size", None)
        if not size or not self._source or not hasattr(self._module, "get_input_embeddings"):
            return False
        try:
            return bool(type(config).from_pretrained(self._source, local_files_only=True).vocab_size != size)
        except (OSError, ValueError):
            return False
