"""What the user passed, by slot: one object, a list of parts of one, or a dict of separate ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from holdfast.errors import InvalidArgumentError
from holdfast.layout.names import check_tag

#: Wrappers by name, as Accelerate need not be there, and where they have what they wrap.
_WRAPPERS = {
    "accelerate.optimizer.AcceleratedOptimizer": "optimizer",
    "accelerate.scheduler.AcceleratedScheduler": "scheduler",
}


def by_slot(kind: str, given: Any, is_one: Callable[[Any], bool]) -> dict[str, list[Any]]:
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
    return [_inner(one) for one in given] if isinstance(given, list | tuple) else [_inner(given)]


def _inner(given: Any) -> Any:
    """What is inside of Accelerate's wrappers, which would go by their own class."""
    attribute = _WRAPPERS.get(f"{type(given).__module__}.{type(given).__qualname__}")
    return given if attribute is None else getattr(given, attribute)
