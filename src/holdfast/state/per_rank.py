"""What belongs to single ranks: taken from this one, and given back to as many ranks as saved it, or to others.

Another number of ranks cannot get it back as it was. Then positions of data loaders are split anew by those that
know how, and generators are started anew, in the same way each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from holdfast.errors import CorruptCheckpointError
from holdfast.ondisk.values import decode_value
from holdfast.state import rng, stateful
from holdfast.state.arrays import ArrayComparer, ArrayDecoder

#: Its parts, as files have them; and what the last one is called elsewhere.
RNG, LOADER, CONTENT = "rng", "dataloader", "content"
PER_RANK_CONTENT = "per_rank_content"


def capture_rank_state(dataloader: Any, content: Any, *, generators: bool) -> dict[str, Any]:
    """What this rank has of its own, as far as it is to be saved."""
    own: dict[str, Any] = {}
    if generators:
        own[RNG] = rng.capture_generators()
    if dataloader is not None:
        own[LOADER] = stateful.check_stateful_object(dataloader, "the data loader").state_dict()
    if content is not None:
        own[CONTENT] = content
    return own


@dataclass(frozen=True)
class SavedRankStates:
    """What the ranks that saved had: ``ranks`` all of them, encoded, with tensors to be found by ``arrays``.

    ``crcs`` tells those of a stored tensor's blocks; ``source`` names the checkpoint.
    """

    ranks: Sequence[Any]
    arrays: ArrayDecoder
    crcs: Callable[[str], Sequence[int] | None]
    source: str

    def every(self, part: str, arrays: ArrayDecoder) -> list[Any]:
        """A part of what each rank had, decoded; nothing where some rank did not have it."""
        found = []
        for own in self.ranks:
            if not isinstance(own, dict):
                raise CorruptCheckpointError(f"{self.source}: what belongs to a rank is no table")
            if part in own:
                found.append(decode_value(own[part], arrays, self.source))
        return found if len(found) == len(self.ranks) else []


@dataclass
class RankState:
    """What one rank gets back: states of generators, texts to start others from, states of data loaders, content.

    ``loader`` has one state, this rank's, or where ``split`` those of all ranks that saved. ``lost`` are the parts that
    were saved and cannot be given to this number of ranks, each with the reason.
    """

    generators: Mapping[str, Any] = field(default_factory=dict)
    seeds: Mapping[str, str] = field(default_factory=dict)
    loader: Sequence[Any] = ()
    split: bool = False
    content: Any = None
    lost: Mapping[str, str] = field(default_factory=dict)

    def has_generators(self) -> bool:
        """Whether there is anything to put into generators."""
        return bool(self.generators or self.seeds)

    def apply(self, dataloader: Any) -> None:
        """Put the data loader and the generators back, once all tensors are filled."""
        if self.split and self.loader:
            dataloader.load_state_dicts(list(self.loader))
        elif self.loader:
            dataloader.load_state_dict(self.loader[0])
        rng.restore_generators(self.generators)
        for name, text in self.seeds.items():
            rng.seed_generators(name, text)


def restore_same_world_size(
    own: Mapping[str, Any], saved: SavedRankStates, rank: int, dataloader: Any, *, generators: bool
) -> RankState:
    """For as many ranks as saved: this rank's ``own``. Raises ``CorruptCheckpointError`` where a generator is missing."""
    found = RankState(content=own.get(CONTENT))
    if dataloader is not None and LOADER in own:
        found.loader = [own[LOADER]]
    if generators and RNG in own:
        lacking = [name for name in rng.EVERYWHERE if name not in own[RNG]]
        if lacking:
            raise CorruptCheckpointError(f"{saved.source}: the random number generator {lacking[0]!r} is missing")
        found.generators = _checked(own[RNG], saved.source)
        lacking = [name for name in rng.generator_names() if name not in own[RNG]]
        if lacking:
            basis = _basis(_states_seen(saved))
            found.seeds = {name: f"{basis}/{name}/{len(saved.ranks)}/{rank}" for name in lacking}
    return found


def restore_resized(saved: SavedRankStates, rank: int, size: int, dataloader: Any, *, generators: bool) -> RankState:
    """For another number of ranks, ``size``, of which this is ``rank``."""
    found = RankState(split=True)
    had = {part for own in saved.ranks if isinstance(own, dict) for part in own}
    counts = f"{len(saved.ranks)} ranks saved, {size} load"
    if hasattr(dataloader, "load_state_dicts"):
        found.loader = saved.every(LOADER, saved.arrays)
    elif LOADER in had:
        found.lost = {LOADER: f"{counts}, and {type(dataloader).__qualname__} has no load_state_dicts(states)"}
    if CONTENT in had:
        found.lost = {**found.lost, PER_RANK_CONTENT: f"each rank has its own, and {counts}"}
    if generators:
        found.seeds = _seeds(saved, rank, size)
    return found


def _seeds(saved: SavedRankStates, rank: int, size: int) -> dict[str, str]:
    """Texts to start the generators from: others for each rank, the same for the same saved states each time.

    Groups of neighbours that drew alike (the ranks of one model, under tensor parallelism) do so again. Where all did,
    nothing tells such groups from ranks that were seeded alike, and each gets a stream of its own.
    """
    every = _states_seen(saved)
    if not every:
        return {}
    _checked(decode_value(saved.ranks[0][RNG], ArrayDecoder(saved.arrays.infos), saved.source), saved.source)
    basis, seeds = _basis(every), {}
    for name in rng.generator_names():
        alike = equal_run_length([states.get(name) for states in every])
        group = rank // (1 if alike == len(every) else alike)
        seeds[name] = f"{basis}/{name}/{size}/{group}"
    return seeds


def _states_seen(saved: SavedRankStates) -> list[dict[str, Any]]:
    """The generators of each rank that saved, with the CRCs of arrays in their place: nothing is read for them."""
    every = saved.every(RNG, ArrayComparer(saved.arrays.infos, saved.crcs))
    if not all(isinstance(states, dict) for states in every):
        raise CorruptCheckpointError(f"{saved.source}: the random number generators of a rank are no table")
    return every


def _basis(every: Sequence[Mapping[str, Any]]) -> str:
    """A text that stands for the generators of all ranks, the same in every process."""
    return blake2b(repr(every).encode(), digest_size=16).hexdigest()


def _checked(states: dict[str, Any], source: str) -> dict[str, Any]:
    try:
        rng.check_generators(states)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{source}: {error}") from error
    return states


def equal_run_length(states: Sequence[Any]) -> int:
    """The largest n for which the ranks come in groups of n neighbours, all of equal states within a group."""
    number = len(states)
    sizes = (size for size in range(number, 0, -1) if number % size == 0)
    return next(size for size in sizes if all(states[i] == states[i - i % size] for i in range(number)))
