"""What the user passed, by slot: one object, a list of parts of one, or a dict of separate ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

from holdfast.errors import InvalidArgumentError
from holdfast.ondisk.validation import check_tag

#: Wrappers, by package and class, as Accelerate and torchtitan need not be there, and where they have what they wrap.
_WRAPPERS = {
    ("accelerate", "AcceleratedOptimizer"): "optimizer",
    ("accelerate", "AcceleratedScheduler"): "scheduler",
    ("torchtitan", "ModelWrapper"): "model",
}


def name_components(kind: str, given: Any, is_one: Callable[[Any], bool]) -> dict[str, list[Any]]:
    """The parts of each separate object, under ``kind`` or, for those of a dict, ``kind/name``.

    ``is_one`` tells a single object (a state dict is one, and a mapping) from a dict of several.
    """
    if given is None:
        return {}
    if isinstance(given, Mapping) and not is_one(given):
        return {f"{kind}/{_name(kind, name)}": _parts(one) for name, one in given.items()}
    return {kind: _parts(given)}


def _name(kind: str, name: object) -> str:
    try:
        return check_tag(name)
    except InvalidArgumentError:
        raise InvalidArgumentError(
            f"the dict of {kind}s has the key {name!r}; use names that can be a folder's, such as 'generator'"
        ) from None


def _parts(given: Any) -> list[Any]:
    inner = _inner(given)
    return [part for one in inner for part in _parts(one)] if isinstance(inner, list | tuple) else [inner]


def _inner(given: Any) -> Any:
    """What is inside of others' wrappers, which would go by their own class, or hide that they are several."""
    for kind in type(given).__mro__:
        attribute = _WRAPPERS.get((kind.__module__.partition(".")[0], kind.__qualname__))
        if attribute is not None:
            return getattr(given, attribute)
    if isinstance(given, Optimizer) and isinstance(given, Iterable):
        inside = list(given)  # a container of optimizers, such as torchtitan's, has no states of its own
        return inside if inside and all(isinstance(one, Optimizer) for one in inside) else given
    return given
