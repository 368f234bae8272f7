"""Modules that wrap another one, and the names of tensors without the components that wrappers add.

A wrapper is known by its class. A module of the user may have a child of the same name as the one of a wrapper.

All views of models clean their names with it, on each rank. A name that is not cleaned any more is another name in
files.
"""

from __future__ import annotations

from torch import nn

#: The classes of wrappers, by module and name because importing some of them takes long, and the name that the wrapped
#: module has in them: of DDP, FSDP1, activation checkpointing and offloading, and ``torch.compile``.
_WRAPPED_NAMES = {
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "module",
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"): "_fsdp_wrapped_module",
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
    ): "_checkpoint_wrapped_module",
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",
}


def wrapped_name(module: nn.Module) -> str | None:
    """Return the name of the child that a module wraps; ``None`` if it is no wrapper."""
    for cls in type(module).__mro__:
        name = _WRAPPED_NAMES.get((cls.__module__, cls.__qualname__))
        if name is not None:
            return name
    return None


def find_wrapped(module: nn.Module) -> nn.Module | None:
    """Return the module that a module wraps; ``None`` if it is no wrapper."""
    name = wrapped_name(module)
    return None if name is None else module._modules[name]  # noqa: SLF001


class NameCleaner:
    """A function that removes the components which wrappers inside a model add to names of its tensors and modules.

    For example, ``layers.0._checkpoint_wrapped_module.weight`` becomes ``layers.0.weight`` if ``layers.0`` is such a
    wrapper.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._wrapped_names = {wrapped_name(module) for module in model.modules()} - {None}

    def __call__(self, name: str) -> str:
        """Return the clean name."""
        if not self._wrapped_names:
            return name
        module: nn.Module | None = self._model
        kept: list[str] = []
        for part in name.split("."):
            if module is None:  # a name that a hook made: its modules are unknown
                kept += [part] if part not in self._wrapped_names else []
                continue
            # Hooks of some wrappers leave out their component.
            while part not in module._modules and (inner := find_wrapped(module)) is not None:  # noqa: SLF001
                module = inner
            if part != wrapped_name(module):
                kept.append(part)
            module = module._modules.get(part)  # noqa: SLF001
        return ".".join(kept)
