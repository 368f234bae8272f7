"""Prefixes that wrappers add to the names of tensors: prefixes that are not stored, and PEFT's prefixes.

Readers of other systems' files clean names with it. For models in memory there is
:mod:`rankless.state.model.wrapper_modules`; both must give the same names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable

#: Name components that wrappers add to the model's own: FSDP1, activation checkpointing and torch.compile.
WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})


def strip_wrapper_prefixes(name: str) -> str:
    """Return a name without the components that wrappers add: for example ``fc.weight`` for ``_orig_mod.fc.weight``."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


#: The names that a module of the user may have, too. Nothing else uses the name of FSDP1.
_AMBIGUOUS = WRAPPERS - {"_fsdp_wrapped_module"}


#: Components of a name below which no module is looked for: names of a hostile file may have very many.
_DEEPEST = 100


def wrapper_cleaner(names: Collection[str]) -> Callable[[str], str]:
    """Return the function that removes the components which wrappers added to the ``names`` of one state dict.

    A file does not name the class of a module. A wrapper has one child and nothing else, so a component is a wrapper's
    unless its module has tensors in other children, or of its own. In memory a wrapper is known by its class.
    """
    if not any(part in name for name in names for part in _AMBIGUOUS):
        return strip_wrapper_prefixes
    members: defaultdict[tuple[str, ...], set[str]] = defaultdict(set)
    for name in names:
        parts = tuple(name.split("."))
        for depth, part in enumerate(parts[:_DEEPEST]):
            members[parts[:depth]].add(part)

    def clean(name: str) -> str:
        parts = tuple(name.split("."))
        return ".".join(
            part
            for depth, part in enumerate(parts)
            if part not in WRAPPERS or (part in _AMBIGUOUS and len(members.get(parts[:depth], ())) > 1)
        )

    return clean


def has_adapters(names: Iterable[str]) -> bool:
    """Return whether names of modules or tensors belong to a model with PEFT adapters.

    PEFT's prompts are next to its ``base_model``; models of images have a ``prompt_encoder`` that is a part of them.
    """
    dotted = [f"{strip_wrapper_prefixes(name)}." for name in names]
    has_prompts = any(name.startswith("prompt_encoder.") for name in dotted)
    return any(
        ".base_layer." in f".{name}" or name.startswith("base_model.model." if not has_prompts else "base_model.")
        for name in dotted
    )
