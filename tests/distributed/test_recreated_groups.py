"""Tests process groups that are created again over the same store, by elastic jobs or by a new division of ranks."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, Store, TCPStore
from torch.distributed.distributed_c10d import _get_default_store

import rankless
from campaigns.common.fork_server import CONTEXT
from rankless import api
from rankless.engine.comm.daemon_executor import DaemonExecutor
from rankless.engine.comm.job_store import DeadlineStore
from rankless.engine.comm.rendezvous import Rendezvous, SessionStore, rendezvous_of
from rankless.engine.comm.session import RankGroup as Members
from rankless.errors import RankMismatchError, RankTimeoutError
from tests.helpers.pool import Ranks
from tests.helpers.torch_limits import LISTS_KEYS

#: Who is in each group, in the order of the ranks. Processes that come later have made fewer calls.
GENERATIONS = [[0, 1], [0, 1, 2], [2, 1], [1, 0, 2], [1, 0, 2]]


def live(number: int, store_at: int | str, path: str) -> None:
    """Be in one group after another, save and load in each."""
    store: Store = (
        TCPStore("127.0.0.1", store_at, is_master=False) if isinstance(store_at, int) else FileStore(store_at)
    )
    for generation, members in enumerate(GENERATIONS):
        if number in members:
            rank, size = members.index(number), len(members)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
            _save_and_load(f"{path}/{generation}", generation)
            dist.barrier()
            dist.destroy_process_group()
        _together(store, f"after {generation}")
        if number == 0:  # gloo would connect to addresses of the group before
            for key in store.list_keys():
                if "//cpu//" in key:
                    store.delete_key(key)
        _together(store, f"before {generation + 1}")


def _together(store: Store, what: str) -> None:
    store.add(what, 1)
    while store.add(what, 0) < 3:
        time.sleep(0.01)


def _save_and_load(path: str, generation: int) -> None:
    for save in range(generation + 1, 4):
        rankless.save_checkpoint(path, f"s{save}", {"w": torch.full((100,), float(save))}, timeout=20)
    rankless.save_checkpoint(path, "last", {"w": torch.full((100,), 9.0)}, async_save=True, timeout=20)
    rankless.finalize()
    target = {"w": torch.zeros(100)}
    rankless.load_checkpoint(path, model=target, timeout=20)
    assert torch.equal(target["w"], torch.full((100,), 9.0))


needs_list_of_keys = pytest.mark.skipif(not LISTS_KEYS, reason="the keys of a gloo group cannot be removed")


@needs_list_of_keys
@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_ranks_save_and_load_in_every_group_over_one_store(tmp_path: Path, kind: str) -> None:
    master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    at = master.port if kind == "tcp" else str(tmp_path / "store")
    processes = [CONTEXT.Process(target=live, args=(number, at, str(tmp_path / "runs"))) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(list((tmp_path / "runs").iterdir())) == len(GENERATIONS)


# ---------------------------------------------------------------------------------------------------------------
# Meetings of ranks in one process, a look at a time, over a store in memory


def shared(store: Store) -> DeadlineStore:
    return DeadlineStore(store, DaemonExecutor("store"), 5.0)


def met(store: DeadlineStore, *meetings: Rendezvous) -> list[str | None]:
    """The names that ranks know when nobody has anything left to do."""
    for _ in range(3):
        names = [meeting.poll_name(store) for meeting in meetings]
    return names


def test_all_learn_the_name_of_their_own_group_whoever_comes_first() -> None:
    store = shared(HashStore())
    first = [Rendezvous(rank, 3) for rank in range(3)]
    (name,) = set(met(store, *first))
    second = [Rendezvous(rank, 3) for rank in range(3)]
    assert met(store, second[1], second[2]) == [None, None]  # they are early: all that is there is of the first
    assert {*met(store, *second)} == {second[0].poll_name(store)} != {name}
    assert all(meeting.is_over for meeting in second)


def test_rank_0_of_a_group_that_was_made_again_answers_nobody() -> None:
    store = shared(HashStore())
    old, new, other = Rendezvous(0, 3), Rendezvous(0, 3), Rendezvous(1, 3)
    old.close()
    assert met(store, other, old)[0] is None
    assert met(store, other, old, new)[0] == new.poll_name(store)


def test_who_died_on_arrival_holds_up_nobody() -> None:
    keys = HashStore()
    keys.add("arrivals", 1)  # and no id
    keys.add("arrivals", 1)
    keys.set("arrival/2", b"who never asks")
    leader, other = Rendezvous(0, 2), Rendezvous(1, 2)
    assert met(shared(keys), leader, other) == [leader.poll_name(shared(keys))] * 2
    assert leader.is_over


def conversation(keys: Store, meeting: Rendezvous, seconds: float = 5.0) -> SessionStore:
    return SessionStore(keys, DaemonExecutor("store"), seconds, meeting, meeting.next_session_number())


def test_a_rank_that_has_waited_in_vain_is_heard_in_the_next_conversation() -> None:
    keys, leader, other = HashStore(), Rendezvous(0, 2), Rendezvous(1, 2)
    vain = conversation(keys, other, 0.2)
    assert not vain.check(["any"])
    with pytest.raises(RankTimeoutError, match="rank 0 did not come"):
        vain.set("word")
    late, following = conversation(keys, leader), conversation(keys, leader)
    assert not late.check(["word"])
    conversation(keys, other).set("word", b"again")
    assert not late.check(["word"])
    assert following.get("word") == [b"again"]


def test_rank_0_waits_for_nobody_to_tell_something() -> None:
    alone = conversation(HashStore(), Rendezvous(0, 2))
    alone.set("word", b"said")
    assert alone.get("word") == [b"said"]
    assert not alone.has_met_all()


# ---------------------------------------------------------------------------------------------------------------
# Real ranks


def meetings_at_one_place() -> list[bool]:
    """Whether the meetings of two groups, the second made after the first, answer nobody any more."""
    group, again = dist.group.WORLD, dist.new_group()
    assert group is not None
    first = rendezvous_of(group, "place")
    assert rendezvous_of(group, "place") is first
    return [first.is_over, rendezvous_of(again, "place").is_over, first.is_over]


def test_a_group_that_was_made_again_ends_the_meeting_of_the_one_before(ranks: Ranks) -> None:
    assert ranks(2, meetings_at_one_place) == [[False, False, True]] * 2


def sessions_of_two() -> list[tuple[int, str]]:
    """Ranks that have other objects for one group, and vote over them in turn."""
    first, second = Members(), Members()
    mine = [first, second, first, second] if dist.get_rank() else [second, first, first, second]
    sessions = [item.open_session(10.0) for item in mine]
    return [
        (session.number, session.vote(f"vote {number}", lambda: b"", lambda own: own, b"".join)[1].decode())
        for number, session in enumerate(sessions)
    ]


def test_the_nth_session_of_every_rank_is_the_same_whichever_object_it_is_of(ranks: Ranks) -> None:
    assert ranks(3, sessions_of_two) == [[(number, "") for number in range(1, 5)]] * 3


def save_in_subgroups(path: str) -> int:
    """Groups of the same two ranks have the same name, one after another."""
    done = 0
    for number in range(3):
        group = dist.new_group([0, 2], use_local_synchronization=True, backend="gloo")
        if dist.get_rank() in {0, 2}:
            for save in range(3 - number):
                tag = f"{number}.{save}"
                rankless.save_checkpoint(path, tag, {"w": torch.ones(9)}, process_group=group, timeout=10)
                done += 1
            dist.barrier(group)
            api._defaults.clear()
            dist.destroy_process_group(group)
        del group
        dist.barrier()
        if dist.get_rank() == 0:  # as above
            store = _get_default_store()
            for key in store.list_keys():
                if "//cpu//" in key and not key.startswith("0//"):
                    store.delete_key(key)
        dist.barrier()
    return done


@needs_list_of_keys
def test_subgroups_of_one_name_follow_each_other(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(3, save_in_subgroups, str(tmp_path)) == [6, 0, 6]


def call_differently(path: str) -> str:
    """The first call of ranks in a new group is not the same."""
    try:
        rankless.save_checkpoint(f"{path}/{dist.get_rank()}", "s", {"w": torch.ones(2)}, timeout=10)
    except RankMismatchError as error:
        return str(error)
    return ""


def test_ranks_whose_first_calls_differ_are_told_so(ranks: Ranks, tmp_path: Path) -> None:
    (message,) = set(ranks(2, call_differently, str(tmp_path)))
    assert "ranks disagree about the path" in message
