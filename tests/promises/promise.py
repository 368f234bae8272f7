"""The decorator of a promise, and the list of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from tests.promises.places import PLACES

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Promise:
    """A promise in words, where it does not apply and why, and where it is known to be broken and how."""

    text: str
    exempt: Mapping[str, str]
    broken: Mapping[str, str]


def because(reason: str, *places: str) -> dict[str, str]:
    """Return one reason for several places."""
    return dict.fromkeys(places, reason)


#: The promises by the names of their tests.
PROMISES: dict[str, Promise] = {}


def promise(
    text: str, *, exempt: Mapping[str, str] | None = None, broken: Mapping[str, str] | None = None
) -> Callable[[F], F]:
    """Run a test over all places. Its argument ``place_name`` is the name of the place.

    ``exempt``: places where the promise has no meaning, with the reason. ``broken``: places where it is not kept yet:
    the test must fail there, so an entry goes when the promise is kept.
    """
    kept = Promise(text, exempt or {}, broken or {})
    unknown = {*kept.exempt, *kept.broken} - PLACES.keys()
    assert not unknown, f"no such place: {sorted(unknown)}"

    def parametrize(test: F) -> F:
        PROMISES[test.__name__] = kept
        cases = [
            pytest.param(name, marks=[pytest.mark.xfail(strict=True, reason=kept.broken[name])])
            if name in kept.broken
            else name
            for name in PLACES
            if name not in kept.exempt
        ]
        return pytest.mark.parametrize("place_name", cases)(test)

    return parametrize
