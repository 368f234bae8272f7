"""How the events of a history are drawn: at random, those that have been rare so far more often, or from a list."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence

#: Returns the event after ``before``, which is empty at first, among those that can happen.
Draw = Callable[[str, Sequence[str]], str]

#: How often two events must follow each other in all histories.
PAIR = 50

#: Among how many rare events one is drawn.
_RAREST = 5


def draw_at_random(seed: int, rare: Mapping[str, Sequence[str]]) -> Draw:
    """Return a function that draws at random; every other time one of the first ``rare`` events that can happen."""
    numbers = random.Random(f"the events of {seed}")

    def draw(before: str, applicable: Sequence[str]) -> str:
        rarest = [event for event in rare.get(before, ()) if event in applicable][:_RAREST]
        return numbers.choice(rarest if rarest and numbers.random() < 0.5 else applicable)

    return draw


def draw_from(script: Iterable[str]) -> Draw:
    """Return a function that draws the events of a list, one after the other."""
    events = iter(script)

    def draw(_before: str, applicable: Sequence[str]) -> str:
        event = next(events)
        if event not in applicable:
            raise ValueError(f"{event!r} cannot happen here: only {list(applicable)}")
        return event

    return draw


def find_rare(pairs: Mapping[tuple[str, str], int], events: Sequence[str]) -> dict[str, list[str]]:
    """Return for each event the events that have followed it fewer than :data:`PAIR` times, the rarest first."""
    counts = {first: [(pairs.get((first, second), 0), second) for second in events] for first in events}
    return {first: [second for count, second in sorted(row) if count < PAIR] for first, row in counts.items()}
