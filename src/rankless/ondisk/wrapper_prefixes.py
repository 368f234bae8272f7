"""Prefixes that wrappers add to the names of tensors: those that are not stored, and those of PEFT."""

from __future__ import annotations

from collections.abc import Iterable

#: Name components that wrappers add to the model's own: FSDP1, activation checkpointing and torch.compile.
WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})


def strip_wrapper_prefixes(name: str) -> str:
    """Return a name without the components that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def has_adapters(names: Iterable[str]) -> bool:
    """Return whether names of modules or tensors are those of a model with PEFT adapters.

    PEFT's prompts are next to its ``base_model``; models of images have a ``prompt_encoder`` that is a part of them.
    """
    dotted = [f"{strip_wrapper_prefixes(name)}." for name in names]
    has_prompts = any(name.startswith("prompt_encoder.") for name in dotted)
    return any(
        ".base_layer." in f".{name}" or name.startswith("base_model.model." if not has_prompts else "base_model.")
        for name in dotted
    )
