"""Tests histories of jobs with a local tier: the short form of ``python -m campaigns.tier.histories``."""

from functools import partial
from pathlib import Path

import pytest

from campaigns.common import case_runner
from campaigns.common.state import ViolationError
from campaigns.tier.histories.history import run_history
from campaigns.tier.histories.notes import Note, State
from campaigns.tier.histories.oracle import Known, Oracle
from campaigns.tier.histories.plan import Incarnation, Incident, TierOptions, draw_history
from tests.helpers.pairwise import first_of


@first_of(1, "seeds", [range(2), range(2, 4)], ids=str)
def test_after_kills_and_stops_the_newest_state_is_loaded(tmp_path: Path, seeds: range) -> None:
    run_one = partial(run_history, length=3, scratch=tmp_path)
    outcomes = [outcome for _, outcome in case_runner.run_cases(seeds, run_one, 2)]
    assert not [outcome.violation for outcome in outcomes if outcome.violation]
    assert sum(len(outcome.happened) for outcome in outcomes) == 6


def test_a_seed_gives_the_same_history() -> None:
    assert draw_history(3, 8) == draw_history(3, 8)
    assert draw_history(3, 8) != draw_history(4, 8)
    drawn = [job.incident for seed in range(20) for job in draw_history(seed, 8, "renam")]
    assert {job.moment.point.name for job in drawn if job.moment} == {"renaming", "renamed"}


# ---------------------------------------------------------------------------------------------------------------
# The oracle would see it if something were wrong


def job(number: int, hosts: str, copies: int = 1, lost: str = "") -> Incarnation:
    options = TierOptions(copies, parity=0, drain_every=10)
    return Incarnation(number, hosts, "plain", options, True, 0.0, "file", Incident("kill all", lost=lost))


def notes(*kinds: tuple[str, State | None]) -> list[Note]:
    return [Note(0, kind, state, "local tier", float(at)) for at, (kind, state) in enumerate(kinds)]


FIRST, SECOND, THIRD = State(0, 1), State(0, 2), State(0, 3)
BEFORE = notes(
    ("loaded", None),
    *(("save", state) for state in (FIRST, SECOND, THIRD)),
    ("durable", FIRST),
    ("copied", SECOND),
    ("local", THIRD),
)


def oracle_with(plan: Incarnation) -> Oracle:
    return Oracle([Known(plan, frozenset(), BEFORE)])


@pytest.mark.parametrize(
    ("lost", "hosts", "newest"),
    [
        ("", "ab", THIRD),
        ("", "abc", THIRD),
        ("a", "ab", SECOND),
        ("", "b", SECOND),
        ("", "cb", SECOND),
        ("ab", "ab", FIRST),
        ("", "cd", FIRST),
    ],
)
def test_what_must_be_loaded_depends_on_the_hosts_that_are_left(lost: str, hosts: str, newest: State) -> None:
    assert max(oracle_with(job(0, "ab", lost=lost)).require(job(1, hosts))) == newest


def test_without_copies_a_lost_host_leaves_what_is_durable() -> None:
    assert max(oracle_with(job(0, "ab", copies=0, lost="a")).require(job(1, "ab"))) == FIRST


def check_second_load(*kinds: tuple[str, State | None]) -> None:
    oracle = oracle_with(job(0, "ab"))
    known = Known(job(1, "ab"), oracle.require(job(1, "ab")), notes(*kinds))
    oracle.history.append(known)
    oracle.check_load(known)


def test_the_newest_state_or_a_later_one_is_right() -> None:
    check_second_load(("loaded", THIRD))
    with pytest.raises(ViolationError, match="which nobody has saved"):
        check_second_load(("loaded", State(0, 4)))


@pytest.mark.parametrize("state", [FIRST, SECOND, None])
def test_an_older_state_is_told(state: State | None) -> None:
    with pytest.raises(ViolationError, match="which is complete"):
        check_second_load(("loaded", state))


def test_a_mixture_and_ranks_with_different_states_are_told() -> None:
    with pytest.raises(ViolationError, match="mixture"):
        check_second_load(("wrong", THIRD), ("loaded", THIRD))
    with pytest.raises(ViolationError, match="different states"):
        check_second_load(("loaded", THIRD), ("loaded", SECOND))


def test_a_state_of_a_branch_that_was_left_is_told() -> None:
    oracle = oracle_with(job(0, "ab"))
    left = State(1, 3)
    second = notes(("loaded", SECOND), ("save", left), ("local", left))
    oracle.history.append(Known(job(1, "cd"), frozenset(), second))
    plan = job(2, "ab")
    known = Known(plan, oracle.require(plan), notes(("loaded", THIRD)))
    assert THIRD not in known.required
    oracle.history.append(known)
    with pytest.raises(ViolationError, match="of a branch"):
        oracle.check_load(known)
