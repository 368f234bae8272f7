"""Promises about the ranks that save and load together."""

from __future__ import annotations

import errno
from contextlib import nullcontext

import torch.distributed as dist

from rankless.errors import InvalidArgumentError, RanklessError, StorageError
from tests.helpers.pool import Ranks
from tests.promises.moments import at_each_change
from tests.promises.places import SLOW, Place, in_new_job
from tests.promises.promise import because, promise

_FRAMEWORKS = because(
    "which ranks there are is the framework's: its own tests have them",
    "Lightning",
    "Lightning's format",
    *SLOW,
    "ColossalAI",
)


def save_on_rank(place: Place, tag: str, value: float) -> None:
    place.save(tag, value)


def load_on_rank(place: Place, tag: str) -> float:
    return place.load(tag)


_NO_RANKS = _FRAMEWORKS | because("the drain has one process", "`rankless drain`")


@promise("what any number of ranks has saved, any other number loads", exempt=_NO_RANKS, in_one_process=True)
def test_other_numbers_of_ranks(place: Place, ranks: Ranks) -> None:
    place.save("one", 1.0)
    place = in_new_job(place)
    assert ranks(2, load_on_rank, place, "one") == [1.0] * 2
    ranks(4, save_on_rank, place, "four", 4.0)
    assert place.load("four") == 4.0
    assert ranks(2, load_on_rank, place, "four") == [4.0] * 2


@promise(
    "ranks load and save in any order of their mesh",
    exempt=_NO_RANKS
    | because(
        "DCP would put shards into the wrong place: it is refused with the reason", "DCP in a folder", "DCP in a store"
    ),
    in_one_process=True,
)
def test_order_of_the_mesh(place: Place, ranks: Ranks) -> None:
    place = in_new_job(place)
    ranks(3, save_on_rank, place, "three", 3.0)
    assert place.load("three") == 3.0
    assert ranks(3, load_on_rank, place, "three") == [3.0] * 3


def fail() -> None:
    raise StorageError(errno.EIO, "the disk of this host is broken")


def save_while_a_rank_fails(place: Place, tag: str, value: float, failing: int) -> None:
    with at_each_change(fail) if dist.get_rank() == failing else nullcontext():
        place.save(tag, value, overwrite=True)


@promise("if the storage fails on one rank, all ranks raise the same error", exempt=_NO_RANKS, in_one_process=True)
def test_one_error_on_all_ranks(place: Place, ranks: Ranks) -> None:
    place.save("one", 1.0)
    other = in_new_job(place)
    for failing in (0, 1):
        outcomes = ranks.outcomes(2, save_while_a_rank_fails, other, f"new_{failing}", 2.0, failing)
        assert len({(type(error), str(error)) for error in outcomes}) == 1
        assert isinstance(outcomes[0], RanklessError) or (failing == 1 and outcomes[0] is None)  # it may write nothing
    assert place.load("one") == 1.0
    ranks(2, save_on_rank, other, "new_0", 3.0)
    assert place.load("new_0") == 3.0


def save_with_a_wrong_name(place: Place, tag: str, value: float, failing: int) -> None:
    place.save("no\0name" if dist.get_rank() == failing else tag, value)


@promise(
    "what is wrong in the arguments of one rank is an error on all ranks at once",
    exempt=_NO_RANKS
    | because("the writer is made before the ranks meet, in torch's collectives", "DCP in a folder", "DCP in a store"),
    in_one_process=True,
)
def test_a_wrong_argument_on_one_rank(place: Place, ranks: Ranks) -> None:
    for failing in (0, 1):
        outcomes = ranks.outcomes(2, save_with_a_wrong_name, place, f"new_{failing}", 2.0, failing)
        assert {type(outcome) for outcome in outcomes} == {InvalidArgumentError}
        assert f"rank {failing} of 2" in str(outcomes[1 - failing])
    ranks(2, save_on_rank, place, "new", 3.0)
    assert place.load("new") == 3.0
