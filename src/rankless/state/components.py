"""Components that the user passed, by slot: one object, a list of parts of one, or a dict of separate ones.

Saves and loads name components with it on each rank. The slots are names in ``state.json`` and of folders: do not
change them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

from rankless.errors import InvalidArgumentError
from rankless.ondisk.validation import check_tag

#: Wrapper classes, by package and name because the packages may not be installed, and the attribute that holds the
#: wrapped object.
_WRAPPERS = {
    ("accelerate", "AcceleratedOptimizer"): "optimizer",
    ("accelerate", "AcceleratedScheduler"): "scheduler",
    ("torchft", "OptimizerWrapper"): "optim",
    ("torchtitan", "ModelWrapper"): "model",
}


def name_components(kind: str, given: Any, is_single: Callable[[Any], bool]) -> dict[str, list[Any]]:
    """Return the parts of each separate object, under ``kind`` or, for objects of a dict, ``kind/name``.

    For example, the models ``{"generator": g, "critic": c}`` are ``model/generator`` and ``model/critic``.

    ``is_single`` returns whether a mapping is a single object, such as a state dict, rather than a dict of several
    objects. Raises ``InvalidArgumentError`` for a list without parts; only optimizers and schedulers may have none, in
    a stage of a pipeline that is not trained.
    """
    if given is None:
        return {}
    if isinstance(given, Mapping) and not is_single(given):
        slots = {f"{kind}/{_component_name(kind, name)}": _flatten_parts(part) for name, part in given.items()}
    else:
        slots = {kind: _flatten_parts(given)}
    empty = next((slot for slot, parts in slots.items() if not parts), None)
    if empty is not None and kind not in {"optimizer", "scheduler"}:
        raise InvalidArgumentError(f"{empty} is a list without objects: leave it out, or pass None")
    return slots


def _component_name(kind: str, name: object) -> str:
    try:
        return check_tag(name)
    except InvalidArgumentError:
        raise InvalidArgumentError(
            f"the dict of {kind}s has the key {name!r}; use names that are valid directory names, such as 'generator'"
        ) from None


def _flatten_parts(given: Any) -> list[Any]:
    inner = _unwrap_object(given)
    return [part for entry in inner for part in _flatten_parts(entry)] if isinstance(inner, list | tuple) else [inner]


def _unwrap_object(given: Any) -> Any:
    """Return the object inside wrappers of other libraries.

    Otherwise the wrapper's class would be recorded, or several objects would look like one.
    """
    for wrapper in type(given).__mro__:
        attribute = _WRAPPERS.get((wrapper.__module__.partition(".")[0], wrapper.__qualname__))
        if attribute is not None:
            return getattr(given, attribute)
    if isinstance(given, Optimizer) and isinstance(given, Iterable):
        optimizers = list(given)  # a container of optimizers, such as torchtitan's, has no state itself
        return optimizers if optimizers and all(isinstance(optimizer, Optimizer) for optimizer in optimizers) else given
    return given
