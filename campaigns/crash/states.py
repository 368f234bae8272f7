"""Selection of the states after a crash to examine: all if few operations are unsynced, else a random sample."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from campaigns.crash.disk import Choice, Disk
from campaigns.crash.image import WHOLE, SurvivingPart, Tree
from campaigns.crash.operations import History, Write

#: Up to this many unsynced operations, each subset of them is examined.
_FEW = 5

#: The number of random subsets for each moment.
_DRAWN = 24

_SECTORS = (512, 4096)

#: The moment of a crash, and the unsynced operations that survive.
_Crash = tuple[int, Choice]


@dataclass(frozen=True, slots=True)
class State:
    """The state of the disk after a crash at a moment."""

    moment: int
    choice: Choice
    tree: Tree


def sample_states(history: History, limit: int, seed: int) -> Iterator[State]:
    """Yield at most ``limit`` distinct states after crashes during the last step of a history or right after it."""
    disk, seen = Disk(history), set()
    for moment, choice in _generate_crashes(disk, _list_moments(history), random.Random(seed)):
        tree = disk.build_tree(moment, choice)
        # The promise depends on the moment only through which ranks have returned by then.
        key = (moment >= history.acknowledged[-1], moment >= history.tidied[-1], digest_tree(tree))
        if key not in seen:
            seen.add(key)
            yield State(moment, choice, tree)
        if len(seen) == limit:
            return


def describe_operations(history: History, state: State) -> Iterator[str]:
    """Describe the operations before the crash and what is left of unsynced ones. A line precedes the last step."""
    unsynced = set(Disk(history).list_unsynced(state.moment))
    for place, operation in enumerate(history.operations):
        if operation.begin > state.moment:
            return
        if place and operation.end >= history.begun[-1] > history.operations[place - 1].end:
            yield "-" * 20
        fate = f"unsynced, {state.choice.get(place, 'lost')}" if place in unsynced else ""
        yield f"{place:4} {operation} {fate}".rstrip()


def digest_tree(tree: Tree) -> bytes:
    """Return a digest that is equal for trees with the same paths and bytes."""
    digest = blake2b()
    for path, data in sorted(tree.items()):
        digest.update(f"{path}\0{-1 if data is None else len(data)}\0".encode() + (data or b""))
    return digest.digest()


def _list_moments(history: History) -> list[int]:
    """Return the times at which operations of the last step ended or it returned on a rank, the latest first."""
    ends = {operation.end for operation in history.operations if operation.end >= history.begun[-1]}
    return sorted(ends | {history.acknowledged[-1], history.tidied[-1]}, reverse=True)


def _generate_crashes(disk: Disk, moments: Sequence[int], source: random.Random) -> Iterator[_Crash]:
    """Yield none and all of the unsynced operations; then every subset if they are few; then samples in turn."""
    drawn = [*moments[:1], *source.sample(moments[1:], len(moments) - 1)]
    unsynced = {moment: disk.list_unsynced(moment) for moment in drawn}
    for moment, places in unsynced.items():
        yield moment, {}
        yield moment, dict.fromkeys(places, WHOLE)
    for moment, places in unsynced.items():
        if len(places) <= _FEW:
            yield from ((moment, dict.fromkeys(some, WHOLE)) for some in _generate_subsets(places))
    others = [
        zip(itertools.repeat(moment), _generate_choices(disk, places, source), strict=False)
        for moment, places in unsynced.items()
    ]
    for row in itertools.zip_longest(*others):
        yield from (crash for crash in row if crash is not None)


def _generate_subsets(places: Sequence[int]) -> Iterator[Sequence[int]]:
    for n in range(len(places) + 1):
        yield from itertools.combinations(places, n)


def _generate_choices(disk: Disk, places: Sequence[int], source: random.Random) -> Iterator[Choice]:
    """Yield names and sizes without bytes; then, in random order, one lost, one alone, one in part, and any subset."""
    writes = [place for place in places if isinstance(disk.operations[place], Write)]
    yield {place: WHOLE for place in places if place not in writes}
    choices = [
        *_choose_single(disk, places),
        *_choose_damaged(places, writes, source),
        *_draw_subsets(places, writes, source),
    ]
    source.shuffle(choices)
    yield from choices


def _choose_single(disk: Disk, places: Sequence[int]) -> Iterator[Choice]:
    """Yield each operation lost alone, and each alone with the operations that it depends on."""
    for place in places:
        yield {other: WHOLE for other in places if other != place}
        yield dict.fromkeys({place, *disk.find_prerequisites(place)}, WHOLE)


def _choose_damaged(places: Sequence[int], writes: Sequence[int], source: random.Random) -> Iterator[Choice]:
    """Yield all operations with one write in part, or replaced."""
    for place in writes:
        yield from ({**dict.fromkeys(places, WHOLE), place: form} for form in _list_parts(source))


def _draw_subsets(places: Sequence[int], writes: Sequence[int], source: random.Random) -> Iterator[Choice]:
    """Yield random subsets of the operations, with their bytes in any form."""
    for _ in range(_DRAWN if places else 0):
        share = source.random()
        chosen = [place for place in places if source.random() < share]
        yield {place: source.choice(_list_parts(source)) if place in writes else WHOLE for place in chosen}


def _list_parts(source: random.Random) -> list[SurvivingPart]:
    torn = [SurvivingPart(kind, sector, source.randrange(2**32)) for kind in ("torn", "cut") for sector in _SECTORS]
    return [WHOLE, SurvivingPart("zeros"), SurvivingPart("noise", seed=source.randrange(2**32)), *torn]
