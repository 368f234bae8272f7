"""Tests of the checkpointer on several ranks: all stop at one step, and another number of ranks goes on from there."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rankless
from rankless.errors import EmptyRunError, NoCheckpointError, RankMismatchError
from tests.helpers.pool import Ranks
from tests.helpers.torch_limits import AVERAGES_GRADIENTS

_SAMPLES, _BATCH, _STEPS = 48, 6, 8


def train(path: str, signal_at: int = 0) -> tuple[int, int, list[int], list[float]]:
    """Train on all ranks. Return the steps before and after, the samples of this rank, and the whole weights.

    The last rank gets a signal at a step. After it steps take so long that it is noticed before the last one.
    """
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(5, 3), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = rankless.ResumableLoader(list(range(_SAMPLES)), batch_size=_BATCH // dist.get_world_size(), seed=3)
    samples = []
    with rankless.Checkpointer(
        path, model=model, optimizer=optimizer, dataloader=loader, save_every=100, async_save=True
    ) as checkpointer:
        start = checkpointer.resume()
        for step, batch in enumerate(loader, start + 1):
            samples += batch.tolist()
            model(batch.float().outer(torch.ones(5)) / _SAMPLES).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == signal_at and dist.get_rank() == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if checkpointer.step(step):
                break
            time.sleep(0.5 if signal_at else 0.0)
    return start, checkpointer.last_step, samples, model.weight.full_tensor().flatten().tolist()


def test_a_signal_on_one_rank_stops_all_and_other_ranks_go_on(ranks: Ranks, tmp_path: Path) -> None:
    first = ranks(2, train, str(tmp_path / "a"), 1)
    ((_, stopped),) = {outcome[:2] for outcome in first}
    assert [info.step for info in rankless.list_checkpoints(tmp_path / "a")] == [stopped]
    second = ranks(3, train, str(tmp_path / "a"))
    assert {outcome[:2] for outcome in second} == {(stopped, _STEPS)}
    assert sorted(sample for outcome in (*first, *second) for sample in outcome[2]) == list(range(_SAMPLES))
    uninterrupted = ranks(1, train, str(tmp_path / "b"))
    if AVERAGES_GRADIENTS:
        torch.testing.assert_close(torch.tensor(second[0][3]), torch.tensor(uninterrupted[0][3]))


def resume_nothing(path: str) -> int:
    return rankless.Checkpointer(path, model={"w": torch.zeros(2)}, signals=()).resume()


def test_all_ranks_begin_at_the_first_step_if_there_is_no_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(3, resume_nothing, str(tmp_path / "none")) == [0, 0, 0]


def load_nothing(path: str) -> None:
    rankless.load_checkpoint(path, model={"w": torch.zeros(2)})


def test_all_ranks_learn_that_a_run_directory_is_empty(ranks: Ranks, tmp_path: Path) -> None:
    for error in ranks.outcomes(2, load_nothing, str(tmp_path / "none")):
        assert type(error) is EmptyRunError
        assert isinstance(error, NoCheckpointError)


def resume_differently(path: str) -> None:
    strict = {"model": dist.get_rank() == 0}
    rankless.Checkpointer(path, model={"w": torch.zeros(2)}, signals=()).resume(strict=strict)


def test_ranks_must_be_equally_strict(ranks: Ranks, tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", {"w": torch.ones(2)}, step=1)
    for error in ranks.outcomes(2, resume_differently, str(tmp_path)):
        assert isinstance(error, RankMismatchError)
        assert "strict" in str(error)


def begin_differently(path: str, option: str) -> None:
    first = dist.get_rank() == 0
    options = {"save_every": 2 if first else 3} if option == "save_every" else {"signals": (10,) if first else ()}
    rankless.Checkpointer(path, model={"w": torch.zeros(2)}, **options).step(1)


@pytest.mark.parametrize("option", ["save_every", "signals"])
def test_ranks_must_have_the_same_settings(ranks: Ranks, tmp_path: Path, option: str) -> None:
    for error in ranks.outcomes(2, begin_differently, str(tmp_path), option):
        assert isinstance(error, RankMismatchError)
        assert option in str(error)


def begin_from_weights(run: str, weights: str) -> tuple[int, list[float]]:
    model = torch.nn.Linear(2, 2)
    with rankless.Checkpointer(run, model=model, save_every=1, signals=()) as checkpointer:
        last = checkpointer.resume(init_from=weights)
        first = model.weight.detach().flatten().tolist()
        with torch.no_grad():
            model.weight += 1
        checkpointer.step(last + 1)
    return last, first


@pytest.mark.parametrize("source", ["run", "Hugging Face"])
def test_a_new_run_begins_with_the_weights_of_another_model(ranks: Ranks, tmp_path: Path, source: str) -> None:
    base, weights = torch.nn.Linear(2, 2), tmp_path / "base"
    if source == "run":
        optimizer = torch.optim.AdamW(base.parameters())
        rankless.save_checkpoint(weights, "step_70", base, optimizer, step=70)
    else:
        rankless.save_model(base, weights, shard=True)
    expected = base.weight.detach()
    for last, first in ranks(2, begin_from_weights, str(tmp_path / "run"), str(weights)):
        assert (last, first) == (0, expected.flatten().tolist())
    for last, first in ranks(2, begin_from_weights, str(tmp_path / "run"), str(weights)):
        assert (last, first) == (1, (expected + 1).flatten().tolist())  # it goes on, and does not begin again
    (info,) = {info.run for info in rankless.list_checkpoints(tmp_path / "run")}
    assert source != "run" or info != rankless.list_checkpoints(weights)[0].run


def test_weights_that_do_not_fit_or_have_no_model_are_refused(tmp_path: Path) -> None:
    rankless.save_model(torch.nn.Linear(3, 2), tmp_path / "base", shard=True)
    with pytest.raises(rankless.MismatchError):
        rankless.Checkpointer(tmp_path / "run", model=torch.nn.Linear(2, 2), signals=()).resume(
            init_from=tmp_path / "base"
        )
    with pytest.raises(rankless.InvalidArgumentError, match="pass model= to Checkpointer"):
        rankless.Checkpointer(tmp_path / "run", signals=()).resume(init_from=tmp_path / "base")
    with pytest.raises(rankless.NoCheckpointError, match=r"init_from='.*none'"):
        rankless.Checkpointer(tmp_path / "run", model=torch.nn.Linear(2, 2), signals=()).resume(
            init_from=tmp_path / "none"
        )


def test_the_options_of_the_load_hold_for_the_weights(tmp_path: Path) -> None:
    torch.save({"app": {"net": torch.nn.Linear(2, 2).state_dict()}}, tmp_path / "base.pt")
    model = {"net": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 2)}
    rankless.save_checkpoint(tmp_path / "base", "s", {"net": torch.nn.Linear(2, 2)})
    for source, options in (("base", {"strict": {"model/head": False}}), ("base", {"allow_missing": {"model/head"}})):
        checkpointer = rankless.Checkpointer(tmp_path / "run", model=model, signals=())
        assert checkpointer.resume(init_from=tmp_path / source, **options) == 0
    net = torch.nn.Linear(2, 2)
    checkpointer = rankless.Checkpointer(tmp_path / "run", model=net, signals=())
    checkpointer.resume(init_from=tmp_path / "base.pt", keys={"model": "app.net"})
    assert torch.equal(net.weight, torch.load(tmp_path / "base.pt")["app"]["net"]["weight"])


def begin_from_weights_on_one_rank(run: str, weights: str) -> str:
    checkpointer = rankless.Checkpointer(run, model=torch.nn.Linear(2, 2), signals=())
    with pytest.raises(rankless.RankMismatchError) as caught:
        checkpointer.resume(init_from=weights if dist.get_rank() else None)
    return str(caught.value)


def test_all_ranks_must_begin_with_the_same_weights(ranks: Ranks, tmp_path: Path) -> None:
    """Else the others would wait for those that load."""
    rankless.save_model(torch.nn.Linear(2, 2), tmp_path / "base", shard=True)
    arguments = str(tmp_path / "run"), str(tmp_path / "base")
    assert all("init_from" in message for message in ranks(2, begin_from_weights_on_one_rank, *arguments))


def test_weights_that_do_not_fit_leave_signals_as_they_were(tmp_path: Path) -> None:
    rankless.save_model(torch.nn.Linear(3, 2), tmp_path / "base", shard=True)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(rankless.MismatchError) as caught:
        rankless.Checkpointer(tmp_path / "run", model=torch.nn.Linear(2, 2)).resume(init_from=tmp_path / "base")
    assert signal.getsignal(signal.SIGTERM) is before
    assert not isinstance(caught.value.__context__, rankless.EmptyRunError)
