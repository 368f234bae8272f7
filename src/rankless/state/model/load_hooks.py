"""Hooks and overrides of ``load_state_dict`` that modules have, run after their tensors were filled.

A load fills tensors in place. Then ``load_state_dict`` is called with the model's own state dict, as torch's DCP does:
it has the model's own tensors, so nothing is copied, and hooks see their values.

:mod:`rankless.state.restore` runs the hooks on each rank in the vote "putting values in place", after all tensors are
filled. They must run after that: they see the loaded values.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any

import msgspec
import torch
from torch import nn

from rankless.ondisk.block_crcs import crc64
from rankless.state.model.wrapper_modules import NameCleaner
from rankless.state.tensor_views import local_tensor
from rankless.state.user_objects import loading_code

#: Prefixes of Python modules with load hooks that need not run: they only change state of older versions, or are
#: FSDP's, which follows its tensors. And exceptions in them: observers take the shapes of the tensors loaded.
_WITHOUT_EFFECT, _WITH_EFFECT = "torch.", ("torch.ao.", "torch.testing.")

#: Prefixes of Python modules with load hooks that only rename entries of older versions, and may be left out.
_RENAMING = ("transformers.", "torchvision.", "timm.")


class HookCode(msgspec.Struct, frozen=True):
    """Code of a module that runs in ``load_state_dict``. ``defined_in`` is the name of its Python module."""

    path: str
    module: nn.Module
    defined_in: str


class HookedLoader(msgspec.Struct, frozen=True, dict=True):
    """A viewed module, as ``load_state_dict`` sees it.

    ``names`` are its own names of its tensors and values, by clean name. ``splits`` are the names of parameters that
    its ``state_dict`` hooks split; hooks that join them again need not run.
    """

    module: nn.Module
    names: Mapping[str, str] = msgspec.field(default_factory=dict)
    splits: frozenset[str] = frozenset()

    @functools.cached_property
    def code(self) -> list[HookCode]:
        """The code that must run when the module is loaded."""
        return [hook_code for hook_code in self._iterate_code() if not _is_without_effect(hook_code.defined_in)]

    def _iterate_code(self) -> Iterator[HookCode]:
        cls = type(self.module)
        if cls.load_state_dict is not nn.Module.load_state_dict:
            yield HookCode("", self.module, _defining_module(cls, "load_state_dict"))
        for path, module in self.module.named_modules():
            if type(module)._load_from_state_dict is not nn.Module._load_from_state_dict:  # noqa: SLF001
                yield HookCode(path, module, _defining_module(type(module), "_load_from_state_dict"))
            hooks = [*module._load_state_dict_post_hooks.values()]  # noqa: SLF001
            hooks += () if self._is_split(path, module) else module._load_state_dict_pre_hooks.values()  # noqa: SLF001
            yield from (HookCode(path, module, _module_of(hook)) for hook in hooks)

    def _is_split(self, path: str, module: nn.Module) -> bool:
        """Return whether a module has hooks that split its parameters, and so load hooks that join them again."""
        return bool(module._state_dict_hooks) and any(name.startswith(f"{path}.") for name in self.splits)  # noqa: SLF001

    def may_resize(self, name: str) -> bool:
        """Return whether code of the module may give a buffer, by clean name, the shape that it has in a checkpoint."""
        raw_name = self.names.get(name)
        owners = (code.path for code in self.code if not code.defined_in.startswith(_RENAMING))
        return raw_name is not None and any(not path or raw_name.startswith(f"{path}.") for path in owners)

    def explain_fsdp1_conflict(self) -> str | None:
        """Return why code of the module cannot run under FSDP1, where parameters are flat; ``None`` if it has none."""
        code = next((candidate for candidate in self.code if not candidate.defined_in.startswith(_RENAMING)), None)
        if code is None:
            return None
        name = NameCleaner(self.module)(code.path) or "the model"
        return (
            f"{name} ({type(code.module).__qualname__}) has code of its own that runs in load_state_dict, which cannot "
            "be run under FSDP1, whose parameters are flat: shard with FSDP2's fully_shard(), or load the model before "
            "you wrap it"
        )

    def run_hooks(self, values: Mapping[str, Any]) -> bool:
        """Run the module's code, if there is any. ``values``, by clean name, replace the values of the model.

        Return whether code of the module has changed values of its tensors. Raises ``StateError`` if the code fails.
        """
        replaced = {self.names[name]: value for name, value in values.items() if name in self.names}
        if not self.code and not replaced:
            return False
        with loading_code(self.module, "model"):
            with torch.no_grad():
                state = self.module.state_dict(keep_vars=True)
            state.update(replaced)
            may_change = any(not code.defined_in.startswith(_RENAMING) for code in self.code)
            before = _digest_tensors(state) if may_change else {}
            self.module.load_state_dict(state, **_load_options(self.module))
            after = _digest_tensors(self.module.state_dict(keep_vars=True)) if may_change else {}
        return any(after.get(name, digest) != digest for name, digest in before.items())


def _digest_tensors(state: Mapping[str, Any]) -> dict[str, int]:
    """Return the CRC of the bytes that this rank has of each plain tensor; of others, the number of writes to it."""
    digests = {}
    for name, value in state.items():
        local = local_tensor(value) if isinstance(value, torch.Tensor) else None
        if local is None or local.is_meta:
            continue
        is_plain = type(local) in {torch.Tensor, nn.Parameter, nn.Buffer} and not local.is_quantized
        digests[name] = _crc_of(local.detach()) if is_plain else local._version  # noqa: SLF001
    return digests


def _crc_of(local: torch.Tensor) -> int:
    flat = local.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return crc64(flat.view(torch.uint8).numpy()) if flat.numel() else 0


def _defining_module(cls: type, method: str) -> str:
    """Return the Python module of the class that defines a class's method: its own, or the nearest base class."""
    return next(base.__module__ for base in cls.__mro__ if method in vars(base))


def _module_of(hook: Any) -> str:
    """Return the Python module that defines a hook."""
    hook = getattr(hook, "hook", hook)  # torch wraps hooks that take the module
    while isinstance(hook, functools.partial | MethodType):
        hook = hook.func if isinstance(hook, functools.partial) else hook.__func__
    return str(getattr(hook, "__module__", None) or type(hook).__module__)


def _is_without_effect(defined_in: str) -> bool:
    return defined_in.startswith(_WITHOUT_EFFECT) and not defined_in.startswith(_WITH_EFFECT)


def _load_options(module: nn.Module) -> dict[str, bool]:
    """Return ``strict=False`` if the module accepts it: tensors that a hook leaves out keep their values."""
    parameters = inspect.signature(module.load_state_dict).parameters.values()
    accepts_strict = any(
        parameter.name == "strict" or parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters
    )
    return {"strict": False} if accepts_strict else {}
