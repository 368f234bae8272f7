"""A scheduler's state with its class, so that it goes into no other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.errors import InvalidArgumentError


def values(scheduler: Any) -> dict[str, Any]:
    """The class's name, and what ``state_dict`` gives. Raises ``InvalidArgumentError`` for what is no scheduler."""
    _check(scheduler)
    return {"class": type(scheduler).__qualname__, "state": scheduler.state_dict()}


def differences(scheduler: Any, saved: Mapping[str, Any]) -> Iterator[str]:
    """Why saved :func:`values` do not go into a scheduler: another class, or a chain of another length."""
    _check(scheduler)
    own = type(scheduler).__qualname__
    if saved["class"] != own:
        yield f"scheduler: the checkpoint holds the state of {saved['class']}, this one is {own}"
        return
    mine, theirs = _links(scheduler.state_dict()), _links(saved["state"])
    if mine != theirs:
        yield f"scheduler: a chain of {theirs} in the checkpoint, of {mine} here"


def load(scheduler: Any, saved: Mapping[str, Any]) -> None:
    """Put saved :func:`values` into a scheduler."""
    scheduler.load_state_dict(saved["state"])


def _links(state: Any) -> int:
    """How many schedulers a chained one has; 1 for any other."""
    links = state.get("_schedulers", [state]) if isinstance(state, Mapping) else [state]
    return len(links)


def _check(scheduler: Any) -> None:
    if not hasattr(scheduler, "state_dict") or not hasattr(scheduler, "load_state_dict"):
        raise InvalidArgumentError(
            "a scheduler has state_dict() and load_state_dict(), as torch's have; "
            f"{type(scheduler).__qualname__} lacks them"
        )
