"""The decorator of a promise, and the list of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from tests.promises.places import ON_RANKS, PLACES, PLAIN, SLOW, WAYS

#: The module whose promises are tested by day in all places.
_ALL_BY_DAY = "tests.promises.test_whole_or_old"

#: The modules whose promises need many processes. Each is tested in one way in each place, another one for each
#: promise.
_COSTLY = {f"tests.promises.test_{name}" for name in ("jobs", "crashes", "costs", "storage")}

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Promise:
    """A promise in words, where it does not apply and why, and where it is known to be broken and how."""

    text: str
    module: str
    exempt: Mapping[str, str]
    broken: Mapping[str, str]


def because(reason: str, *places: str) -> dict[str, str]:
    """Return one reason for several places."""
    return dict.fromkeys(places, reason)


#: The promises by the names of their tests.
PROMISES: dict[str, Promise] = {}


def promise(
    text: str,
    *,
    exempt: Mapping[str, str] | None = None,
    broken: Mapping[str, str] | None = None,
    in_one_process: bool = False,
) -> Callable[[F], F]:
    """Run a test over all places, and over the ways in which each can save. The fixture ``place`` opens the place.

    By day every other place has one way, and the rest with the next promise; of :data:`_ALL_BY_DAY` all places have
    one, also the slow ones. With ``--full`` each place has all ways, but for costly promises. ``exempt``: places where
    the promise has no meaning, with the reason. ``broken``: places where it is not kept yet: the test must fail there,
    so an entry goes when the promise is kept. ``in_one_process``: the test changes something in this process that ranks
    would not see.
    """
    unknown = {*(exempt or {}), *(broken or {})} - PLACES.keys()
    assert not unknown, f"no such place: {sorted(unknown)}"

    def parametrize(test: F) -> F:
        kept = Promise(text, test.__module__, exempt or {}, broken or {})
        earlier = sum(other.module == kept.module for other in PROMISES.values())  # whatever else was imported
        PROMISES[test.__name__] = kept
        cases = []
        for number, name in enumerate(PLACES):
            ways = _choose_ways(kept.module, name, number, earlier, in_one_process=in_one_process)
            for way, is_by_day in ways.items() if name not in kept.exempt else ():
                marks = [] if is_by_day else [pytest.mark.full]
                if name in kept.broken:
                    marks.append(pytest.mark.xfail(strict=True, reason=kept.broken[name]))
                cases.append(pytest.param(name, way, marks=marks, id=f"{name}, {way}" if way != PLAIN else name))
        return pytest.mark.parametrize(("place_name", "way"), cases)(test)

    return parametrize


def _choose_ways(module: str, place: str, number: int, earlier: int, *, in_one_process: bool) -> dict[str, bool]:
    """Return the ways in which a place is tested, and whether each is by day.

    ``number`` is the place's, ``earlier`` the number of promises of the module before this one: both take turns.
    """
    ways = [way for way in WAYS if place in WAYS[way] and not (way == ON_RANKS and in_one_process)] or [PLAIN]
    chosen = ways[(number + earlier) % len(ways)]
    is_by_day = module == _ALL_BY_DAY or (place not in SLOW and (number + earlier // 2) % 2 == 0)
    return {way: is_by_day and way == chosen for way in ([chosen] if module in _COSTLY else ways)}
