"""What modules do themselves when they are loaded: hooks and overrides of ``load_state_dict``, run on what was filled.

A load fills tensors in place. Then ``load_state_dict`` is called with the model's own state dict, as a load of torch's
DCP does: the tensors in it are those that the model has, so nothing is copied, and hooks see their values.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn

from holdfast.errors import StateError
from holdfast.ondisk.validation import strip_wrapper_prefixes

#: Where code for loading is from that has an effect on what older versions have saved only, or is FSDP's own, which
#: follows its tensors; and where within it has others: observers take the shapes of what is loaded.
_WITHOUT_EFFECT, _WITH_EFFECT = "torch.", ("torch.ao.", "torch.testing.")

#: Where code for loading only renames what older versions have saved, and so may be left out.
_RENAMING = ("transformers.", "torchvision.", "timm.")


@dataclass(frozen=True)
class HookCode:
    """Code of a module that runs in ``load_state_dict``, and the name of the Python module that it is from."""

    path: str
    module: nn.Module
    home: str


@dataclass(frozen=True)
class HookedLoader:
    """A module that was looked at, as ``load_state_dict`` knows it.

    ``names`` are those that it has for its tensors and values, by clean name; ``splits`` those of parameters that its
    hooks split, which load hooks need not put together again.
    """

    module: nn.Module
    names: Mapping[str, str] = field(default_factory=dict)
    splits: frozenset[str] = frozenset()

    @functools.cached_property
    def code(self) -> list[HookCode]:
        """What has to run when it is loaded."""
        return [one for one in self._every_code() if not _is_without_effect(one.home)]

    def _every_code(self) -> Iterator[HookCode]:
        kind = type(self.module)
        if kind.load_state_dict is not nn.Module.load_state_dict:
            yield HookCode("", self.module, _home(kind, "load_state_dict"))
        for path, module in self.module.named_modules():
            if type(module)._load_from_state_dict is not nn.Module._load_from_state_dict:  # noqa: SLF001
                yield HookCode(path, module, _home(type(module), "_load_from_state_dict"))
            hooks = [*module._load_state_dict_post_hooks.values()]  # noqa: SLF001
            hooks += () if self._is_split(path, module) else module._load_state_dict_pre_hooks.values()  # noqa: SLF001
            yield from (HookCode(path, module, _module_of(hook)) for hook in hooks)

    def _is_split(self, path: str, module: nn.Module) -> bool:
        """Whether a module has hooks that split its parameters, and so hooks before a load that do the opposite."""
        return bool(module._state_dict_hooks) and any(name.startswith(f"{path}.") for name in self.splits)  # noqa: SLF001

    def may_resize(self, name: str) -> bool:
        """Whether code of its own may give a buffer, by clean name, the shape that it has in a checkpoint."""
        raw = self.names.get(name)
        owners = (one.path for one in self.code if not one.home.startswith(_RENAMING))
        return raw is not None and any(not path or raw.startswith(f"{path}.") for path in owners)

    def flattened(self) -> str | None:
        """Why its code cannot be run under FSDP1, whose parameters are flat; ``None`` where it has none."""
        code = next((one for one in self.code if not one.home.startswith(_RENAMING)), None)
        if code is None:
            return None
        name = strip_wrapper_prefixes(code.path) or "the model"
        return (
            f"{name} ({type(code.module).__qualname__}) has code of its own that runs in load_state_dict, which cannot "
            "be run under FSDP1, whose parameters are flat: shard with FSDP2's fully_shard(), or load the model before "
            "it is wrapped"
        )

    def run(self, values: Mapping[str, Any]) -> None:
        """Run its code, where it has any. ``values`` take the place of what the model has, by clean name.

        Raises ``StateError`` where that fails.
        """
        given = {self.names[name]: value for name, value in values.items() if name in self.names}
        if not self.code and not given:
            return
        kind = type(self.module).__qualname__
        try:
            with torch.no_grad():
                state = self.module.state_dict(keep_vars=True)
            state.update(given)
            self.module.load_state_dict(state, **_options(self.module))
        except Exception as error:
            raise StateError(
                f"code of {kind} that runs in load_state_dict failed after its tensors were filled, and the model may "
                f"be partly loaded: {error}"
            ) from error


def _home(kind: type, method: str) -> str:
    """The Python module of the class that a class has a method from."""
    return next(one.__module__ for one in kind.__mro__ if method in vars(one))


def _module_of(hook: Any) -> str:
    """The Python module that a hook is defined in."""
    hook = getattr(hook, "hook", hook)  # torch wraps hooks that are given the module
    while isinstance(hook, functools.partial | MethodType):
        hook = hook.func if isinstance(hook, functools.partial) else hook.__func__
    return str(getattr(hook, "__module__", None) or type(hook).__module__)


def _is_without_effect(home: str) -> bool:
    return home.startswith(_WITHOUT_EFFECT) and not home.startswith(_WITH_EFFECT)


def _options(module: nn.Module) -> dict[str, bool]:
    """Not strict, where it can be asked so: what a hook leaves out of the state dict stays as it is."""
    takes = inspect.signature(module.load_state_dict).parameters.values()
    can_be_lax = any(one.name == "strict" or one.kind is inspect.Parameter.VAR_KEYWORD for one in takes)
    return {"strict": False} if can_be_lax else {}
