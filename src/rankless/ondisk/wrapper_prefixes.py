"""Prefixes that wrappers such as ``torch.compile`` add to the names of tensors, and that are not stored."""

from __future__ import annotations

#: Name components that wrappers add to the model's own: FSDP1, activation checkpointing and torch.compile.
WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})


def strip_wrapper_prefixes(name: str) -> str:
    """Return a name without the components that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
