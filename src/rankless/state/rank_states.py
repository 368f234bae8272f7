"""State that belongs to single ranks: captured from this one, and restored on as many ranks as saved it, or on others.

On another number of ranks it cannot be restored exactly. Then positions of data loaders are split again if the loader
supports that, and generators are seeded, in the same way each time.

:mod:`rankless.state.capture` captures on each rank, in the first vote of a save; :mod:`rankless.load.load_operation`
and the receivers of a live copy restore on each rank. Nothing is changed before :meth:`RankState.apply`, in the vote
"putting values in place". The keys are in ``ranks.json``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from rankless.errors import CorruptCheckpointError, MismatchError
from rankless.ondisk.values import decode_value
from rankless.state import rng, user_objects
from rankless.state.array_decoder import ArrayComparer, ArrayDecoder
from rankless.state.differing_values import DIFFERING, LAYOUT, list_differing
from rankless.state.user_objects import loading_code

#: Keys of its components in files; the last one has another name in the API.
RNG, LOADER, CONTENT = "rng", "dataloader", "content"
PER_RANK_CONTENT = "per_rank_content"


def capture_rank_state(dataloader: Any, content: Any, *, generators: bool) -> dict[str, Any]:
    """Return the values of this rank that are saved."""
    rank_values: dict[str, Any] = {}
    if generators:
        rank_values[RNG] = rng.capture_generators()
    if dataloader is not None:
        rank_values[LOADER] = user_objects.read_state(user_objects.check_stateful_object(dataloader, "the data loader"))
    if content is not None:
        rank_values[CONTENT] = content
    return rank_values


class SavedRankStates(msgspec.Struct, frozen=True):
    """The encoded values of all ranks that saved, ``ranks``, with their tensors in ``arrays``.

    ``crcs`` returns the CRCs of a stored tensor's blocks, or ``None``; ``source`` names the checkpoint.
    """

    ranks: Sequence[Any]
    arrays: ArrayDecoder
    crcs: Callable[[str], Sequence[int] | None]
    source: str

    def decode_component(self, component: str, arrays: ArrayDecoder) -> list[Any]:
        """Return one component of each rank, decoded; an empty list if some rank did not save it."""
        decoded = []
        for rank_values in self.ranks:
            if not isinstance(rank_values, dict):
                raise CorruptCheckpointError(f"{self.source}: the values of a rank are not a table")
            if component in rank_values:
                decoded.append(decode_value(rank_values[component], arrays, self.source))
        return decoded if len(decoded) == len(self.ranks) else []


class RankState(msgspec.Struct):
    """The values that one rank gets back: generator states, seed texts of other generators, loader states, content.

    ``loader`` is this rank's loader state or, if ``split``, the states of all ranks that saved: for another number of
    ranks, or for a loader with ``needs_all_states``. ``lost`` are the components that were saved and cannot be restored
    on this number of ranks, each with the reason. ``differing`` are the names of values that differed between the ranks
    that saved; ``own`` are those that this rank had, if its number of ranks is the same, and ``layout`` tells if its
    models must be, too.
    """

    generators: Mapping[str, Any] = msgspec.field(default_factory=dict)
    seeds: Mapping[str, str] = msgspec.field(default_factory=dict)
    loader: Sequence[Any] = ()
    split: bool = False
    content: Any = None
    lost: Mapping[str, str] = msgspec.field(default_factory=dict)
    differing: frozenset[str] = frozenset()
    own: Mapping[str, Any] = msgspec.field(default_factory=dict)
    layout: str = ""

    def has_generators(self) -> bool:
        """Return whether there is a state or seed for any generator."""
        return bool(self.generators or self.seeds)

    def apply(self, dataloader: Any) -> None:
        """Restore the data loader and the generators, once all tensors are filled."""
        if self.loader:
            with loading_code(dataloader, "data loader"):
                if self.split:
                    dataloader.load_state_dicts(list(self.loader))
                else:
                    dataloader.load_state_dict(self.loader[0])
        rng.restore_generators(self.generators)
        for name, text in self.seeds.items():
            rng.seed_generators(name, text)


def restore_same_world_size(
    rank_values: Mapping[str, Any], saved: SavedRankStates, rank: int, dataloader: Any, *, generators: bool
) -> RankState:
    """Return the state of this rank, with ``rank_values``, for as many ranks as saved.

    Raises ``MismatchError`` if the state of a generator is missing, or is of another kind.
    """
    state = RankState(
        content=rank_values.get(CONTENT),
        differing=list_differing(saved.ranks),
        own=rank_values.get(DIFFERING, {}),
        layout=rank_values.get(LAYOUT, ""),
    )
    if dataloader is not None and LOADER in rank_values:
        state.split = getattr(dataloader, "needs_all_states", False)
        state.loader = saved.decode_component(LOADER, saved.arrays) if state.split else [rank_values[LOADER]]
    if generators and RNG in rank_values:
        missing = [name for name in rng.EVERYWHERE if name not in rank_values[RNG]]
        if missing:
            raise MismatchError(
                f"{saved.source} has no state of the random number generator {missing[0]!r}: pass rng=False to leave "
                "the generators as they are"
            )
        state.generators = _check_states(rank_values[RNG], saved.source)
        missing = [name for name in rng.generator_names() if name not in rank_values[RNG]]
        if missing:
            digest = _digest_states(_comparable_states(saved))
            state.seeds = {name: f"{digest}/{name}/{len(saved.ranks)}/{rank}" for name in missing}
    return state


def restore_resized(saved: SavedRankStates, rank: int, size: int, dataloader: Any, *, generators: bool) -> RankState:
    """Return the state of rank ``rank`` of ``size``, another number of ranks than saved."""
    state = RankState(split=True, differing=list_differing(saved.ranks))
    saved_components = {
        component for rank_values in saved.ranks if isinstance(rank_values, dict) for component in rank_values
    }
    counts = f"{len(saved.ranks)} ranks saved, {size} load"
    if hasattr(dataloader, "load_state_dicts"):
        state.loader = saved.decode_component(LOADER, saved.arrays)
    elif LOADER in saved_components:
        state.lost = {LOADER: f"{counts}, and {type(dataloader).__qualname__} has no load_state_dicts(states)"}
    if CONTENT in saved_components:
        state.lost = {**state.lost, PER_RANK_CONTENT: f"each rank has its own, and {counts}"}
    if generators:
        state.seeds = _make_seeds(saved, rank, size)
    return state


def restore_newcomer(saved: SavedRankStates, rank: int, size: int, dataloader: Any, *, generators: bool) -> RankState:
    """Return the state of a rank that joins running ranks, or takes over from them, with the states ``saved``.

    A generator that has one state on all of these ranks gets that state. Others are seeded, on each rank differently.
    """
    state = restore_resized(saved, rank, size, dataloader, generators=False)
    all_states = _comparable_states(saved) if generators else []
    if not all_states:
        return state
    names = [name for name in rng.generator_names() if name in all_states[0]]
    equal = [name for name in names if all(states.get(name) == all_states[0][name] for states in all_states)]
    encoded = {name: saved.ranks[0][RNG][name] for name in equal}
    state.generators = _check_states(decode_value(encoded, saved.arrays, saved.source), saved.source)
    digest = _digest_states(all_states)
    state.seeds = {name: f"{digest}/{name}/{size}/{rank}" for name in rng.generator_names() if name not in equal}
    return state


def _make_seeds(saved: SavedRankStates, rank: int, size: int) -> dict[str, str]:
    """Return the texts to seed the generators from: different for each rank, equal for equal saved states each time.

    Groups of neighbouring ranks that drew the same numbers (the ranks of one model, under tensor parallelism) do so
    again. If all ranks did, such groups cannot be distinguished from ranks with equal seeds, and each rank gets its own
    stream.

    A load promises that the same checkpoint gives the same random numbers each time, and the texts are a part of this
    promise.
    """
    all_states = _comparable_states(saved)
    if not all_states:
        return {}
    _check_states(decode_value(saved.ranks[0][RNG], ArrayDecoder(saved.arrays.infos), saved.source), saved.source)
    digest, seeds = _digest_states(all_states), {}
    for name in rng.generator_names():
        group_size = equal_run_length([states.get(name) for states in all_states])
        group = rank // (1 if group_size == len(all_states) else group_size)
        seeds[name] = f"{digest}/{name}/{size}/{group}"
    return seeds


def _comparable_states(saved: SavedRankStates) -> list[dict[str, Any]]:
    """Return the generator states of each rank that saved, with CRCs in place of arrays: no tensor is read."""
    all_states = saved.decode_component(RNG, ArrayComparer(saved.arrays.infos, saved.crcs))
    if not all(isinstance(states, dict) for states in all_states):
        raise CorruptCheckpointError(f"{saved.source}: the random number generators of a rank are not a table")
    return all_states


def _digest_states(all_states: Sequence[Mapping[str, Any]]) -> str:
    """Return a digest of the generator states of all ranks, the same in every process."""
    return blake2b(repr(all_states).encode(), digest_size=16).hexdigest()


def _check_states(states: dict[str, Any], source: str) -> dict[str, Any]:
    try:
        rng.check_generators(states)
    except MismatchError as error:
        raise MismatchError(f"{source}: {error}") from error
    return states


def equal_run_length(states: Sequence[Any]) -> int:
    """Return the largest n such that ranks form groups of n neighbours with equal states.

    For example, the states ``[a, a, b, b]`` give 2, and ``[a, b, b, b]`` gives 1.
    """
    number = len(states)
    sizes = (size for size in range(number, 0, -1) if number % size == 0)
    return next(size for size in sizes if all(states[i] == states[i - i % size] for i in range(number)))
