"""Tests of traces of several ranks: each writes a file. Merged, they are one trace, in which a rank is a process."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import rankless
from tests.helpers.chrome_traces import ChromeTrace
from tests.helpers.pool import Ranks
from tests.helpers.slow_writes import slow_down_writes

#: Microseconds by which the clocks of processes of one host differ at most.
SKEW = 1000


def sharded() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: distribute_tensor(torch.ones(4096), mesh, [Shard(0)], src_data_rank=None) for name in "abc"}


def save_and_load(folder: str, async_save: bool) -> tuple[str, str]:
    path, state = Path(folder), sharded()
    with slow_down_writes(0.5), rankless.trace(path / "save.json") as saving:
        rankless.save_checkpoint(path / "run", "a", state, async_save=async_save).wait()
    saving.wait(60)
    with rankless.trace(path / "load.json") as loading:
        rankless.load_checkpoint(path / "run", model=state)
    return saving.path.name, loading.path.name


def merge(folder: Path, name: str, size: int) -> ChromeTrace:
    rankless.merge_traces(folder / f"{name}.json", [folder / f"{name}.rank{rank}.json" for rank in range(size)])
    return ChromeTrace(folder / f"{name}.json")


def best_covered(ranks: Ranks, folder: Path, name: str, *, asynchronous: bool) -> list[float]:
    """The part of a slice of each rank that its phases take: the best of up to three saves, as the host may be busy."""
    best = [0.0] * 4
    for attempt in range(3):
        (folder / str(attempt)).mkdir()
        ranks(4, save_and_load, str(folder / str(attempt)), asynchronous)
        trace = merge(folder / str(attempt), "save", 4)
        best = [max(best[rank], trace.covered(trace.only(name, rank))) for rank in range(4)]
        if min(best) >= 0.95:
            break
    return best


def test_each_rank_writes_a_file_and_all_are_one_trace(ranks: Ranks, tmp_path: Path) -> None:
    files = ranks(4, save_and_load, str(tmp_path), False)
    assert files == [(f"save.rank{rank}.json", f"load.rank{rank}.json") for rank in range(4)]
    for name in ("save", "load"):
        trace = merge(tmp_path, name, 4)
        assert sorted(trace.processes) == [0, 1, 2, 3]
        assert [trace.processes[rank].split(" (")[0] for rank in range(4)] == [f"rank {rank}" for rank in range(4)]
        assert all(trace.only(name, rank).contains(each) for rank in range(4) for each in trace.named("vote", rank))
    committed = {each.pid for each in merge(tmp_path, "save", 4).slices if each.category == "commit"}
    assert committed == {0}


def test_the_phases_of_each_rank_add_up_to_the_call(ranks: Ranks, tmp_path: Path) -> None:
    shares = best_covered(ranks, tmp_path, "save", asynchronous=False)
    assert all(0.95 <= share <= 1.0 for share in shares)


def test_no_rank_leaves_a_vote_before_all_have_come(ranks: Ranks, tmp_path: Path) -> None:
    """So the times of several ranks of one host can be compared."""
    ranks(4, save_and_load, str(tmp_path), False)
    trace = merge(tmp_path, "save", 4)
    votes = [trace.named("vote", rank) for rank in range(4)]
    assert len({tuple(vote.detail for vote in of_rank) for of_rank in votes}) == 1
    for same in zip(*votes, strict=True):
        assert max(vote.start for vote in same) <= min(vote.stop for vote in same) + SKEW


def test_an_asynchronous_save_is_recorded_on_all_ranks_to_its_end(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4, save_and_load, str(tmp_path), True)
    trace = merge(tmp_path, "save", 4)
    for rank in range(4):
        call, background = trace.only("save", rank), trace.only("save in the background", rank)
        assert call.tid != background.tid
        assert background.contains(trace.only("writing", rank))
        assert not any(call.contains(each) for each in trace.named("write", rank))
    assert min(best_covered(ranks, tmp_path, "save in the background", asynchronous=True)) >= 0.95


def fail_on_rank_1(folder: str) -> str:
    path, state = Path(folder), {"w": torch.ones(3)}
    with rankless.trace(path / "save.json"):
        try:
            rankless.save_checkpoint(path / "run", "../a" if dist.get_rank() == 1 else "a", state)
        except rankless.RanklessError as error:
            return type(error).__name__
    return ""


def test_of_a_failed_save_every_rank_shows_where(ranks: Ranks, tmp_path: Path) -> None:
    errors = ranks(2, fail_on_rank_1, str(tmp_path))
    assert all(errors)
    trace = merge(tmp_path, "save", 2)
    for rank, error in enumerate(errors):
        marked = [each for each in trace.slices if each.pid == rank and each.error == error]
        assert marked[0] == trace.only("save", rank)
        assert all(outer.contains(inner) for outer, inner in pairwise(marked))
