"""What belongs to single ranks: taken from this one, and given back to as many ranks as saved it, or to others.

Another number of ranks cannot get it back as it was. Then positions of data loaders are split anew by those that
know how, and generators are started anew, in the same way each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import DamagedError
from holdfast.layout.values import decode
from holdfast.state import rng, stateful
from holdfast.state.arrays import ArraysIn, ArraysSeen

#: Its parts.
RNG, LOADER, CONTENT = "rng", "dataloader", "content"


def capture(dataloader: Any, content: Any, *, generators: bool) -> dict[str, Any]:
    """What this rank has of its own, as far as it is to be saved."""
    own: dict[str, Any] = {}
    if generators:
        own[RNG] = rng.capture()
    if dataloader is not None:
        own[LOADER] = stateful.check_one(dataloader, "the data loader").state_dict()
    if content is not None:
        own[CONTENT] = content
    return own


@dataclass(frozen=True)
class Saved:
    """What the ranks that saved had: ``ranks`` all of them, encoded, with tensors to be found by ``arrays``.

    ``crcs`` tells those of a stored tensor's blocks; ``source`` names the checkpoint, ``id`` stands for its contents.
    """

    ranks: Sequence[Any]
    arrays: ArraysIn
    crcs: Callable[[str], Sequence[int] | None]
    source: str
    id: str

    def every(self, part: str, arrays: ArraysIn) -> list[Any]:
        """A part of what each rank had, decoded; nothing where some rank did not have it."""
        found = []
        for own in self.ranks:
            if not isinstance(own, dict):
                raise DamagedError(f"{self.source}: what belongs to a rank is no table")
            if part in own:
                found.append(decode(own[part], arrays, self.source))
        return found if len(found) == len(self.ranks) else []


@dataclass
class Own:
    """What one rank gets back: states of generators, texts to start others from, states of data loaders, content.

    ``loader`` has one state, this rank's, or where ``split`` those of all ranks that saved.
    """

    generators: Mapping[str, Any] = field(default_factory=dict)
    seeds: Mapping[str, str] = field(default_factory=dict)
    loader: Sequence[Any] = ()
    split: bool = False
    content: Any = None
    lost: bool = False

    def has_generators(self) -> bool:
        """Whether there is anything to put into generators."""
        return bool(self.generators or self.seeds)

    def apply(self, dataloader: Any) -> None:
        """Put the data loader and the generators back, once all tensors are filled."""
        if self.split and self.loader:
            dataloader.load_state_dicts(list(self.loader))
        elif self.loader:
            dataloader.load_state_dict(self.loader[0])
        rng.restore(self.generators)
        for name, text in self.seeds.items():
            rng.seed(name, text)


def same(own: Mapping[str, Any], saved: Saved, rank: int, *, generators: bool) -> Own:
    """For as many ranks as saved: this rank's ``own``. Raises ``DamagedError`` where a generator is missing."""
    found = Own(content=own.get(CONTENT), loader=[own[LOADER]] if LOADER in own else [])
    if generators and RNG in own:
        lacking = [name for name in rng.EVERYWHERE if name not in own[RNG]]
        if lacking:
            raise DamagedError(f"{saved.source}: the random number generator {lacking[0]!r} is missing")
        found.generators = _checked(own[RNG], saved.source)
        found.seeds = {name: f"{saved.id}/{name}/{rank}" for name in rng.names() if name not in own[RNG]}
    return found


def resized(saved: Saved, rank: int, dataloader: Any, *, generators: bool) -> Own:
    """For another number of ranks, of which this is ``rank``."""
    found = Own(split=True, lost=any(isinstance(own, dict) and CONTENT in own for own in saved.ranks))
    if hasattr(dataloader, "load_state_dicts"):
        found.loader = saved.every(LOADER, saved.arrays)
    if generators:
        found.generators, found.seeds = _generators(saved, rank)
    return found


def _generators(saved: Saved, rank: int) -> tuple[dict[str, Any], dict[str, str]]:
    """States of the generators that all ranks had alike, and texts to start the others from.

    Ranks that drew alike as neighbours (those of one model, under tensor parallelism) do so again.
    """
    every = saved.every(RNG, ArraysSeen(saved.arrays.infos, saved.crcs))
    if not all(isinstance(states, dict) for states in every):
        raise DamagedError(f"{saved.source}: the random number generators of a rank are no table")
    if not every:
        return {}, {}
    known = {name: all(name in states for states in every) for name in rng.names()}
    alike = {name: neighbours([one[name] for one in every]) if known[name] else 1 for name in known}
    exact = [name for name in known if known[name] and alike[name] == len(every)]
    first = decode(saved.ranks[0][RNG], saved.arrays, saved.source) if exact else {}
    seeds = {name: f"{saved.id}/{name}/{rank // alike[name]}" for name in known if name not in exact}
    return _checked({name: first[name] for name in exact}, saved.source), seeds


def _checked(states: dict[str, Any], source: str) -> dict[str, Any]:
    try:
        rng.check(states)
    except DamagedError as error:
        raise DamagedError(f"{source}: {error}") from error
    return states


def neighbours(states: Sequence[Any]) -> int:
    """The largest n for which the ranks come in groups of n neighbours, all of equal states within a group."""
    number = len(states)
    sizes = (size for size in range(number, 0, -1) if number % size == 0)
    return next(size for size in sizes if all(states[i] == states[i - i % size] for i in range(number)))
