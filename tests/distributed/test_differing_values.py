"""Tests of values that differ between ranks where one value for all is expected: no load calls rank 0's exact."""

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankless
from rankless.errors import RankMismatchError
from tests.helpers.fake_http import BUCKET
from tests.helpers.fake_s3 import FakeS3, store_at
from tests.helpers.pool import Ranks


class Counted(nn.Module):
    """A model with a buffer and an extra state."""

    def __init__(self, number: int, *, large: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("tokens", torch.full((3,), number))
        self.scales = torch.full((20_000 if large else 2,), float(number))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.weight

    def get_extra_state(self) -> Any:
        return {"scales": self.scales}

    def set_extra_state(self, state: Any) -> None:
        self.scales = state["scales"]


class Counter:
    """An object with a number as its state."""

    def __init__(self, number: int) -> None:
        self.number = number

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def _save(run: Path, tag: str, number: int, *, large: bool = False) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rankless.save_checkpoint(
            run,
            tag,
            model=Counted(number, large=large),
            stateful={"counter": Counter(number)},
            user_content={"number": number},
            rng=False,
        )
    return [str(warning.message) for warning in caught]


def _load(run: Path, tag: str) -> tuple[list[Any], set[str], set[str], list[str]]:
    model, counter = Counted(-1), Counter(-1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        restored = rankless.restore(run, tag, model=model, stateful={"counter": counter}, rng=False)
    numbers = [model.tokens[0].item(), model.scales[0].item(), counter.number, restored.user_content["number"]]
    messages = [str(warning.message) for warning in caught]
    return numbers, set(restored.exact), set(restored.reconstructed), messages


COMPONENTS = {"model", "stateful", "user_content"}


def _save_and_load(run: str, large: bool) -> Any:
    said = _save(Path(run), "s", dist.get_rank(), large=large)
    return said, _load(Path(run), "s")


@pytest.mark.parametrize("large", [False, True])
def test_each_rank_gets_its_own_values_back(ranks: Ranks, tmp_path: Path, large: bool) -> None:
    for rank, (_, (numbers, exact, reconstructed, messages)) in enumerate(
        ranks(2, _save_and_load, str(tmp_path), large)
    ):
        assert numbers == [rank] * 4
        assert (exact, reconstructed, messages) == (COMPONENTS, set(), [])


def _save_and_load_elsewhere(run: Path, local: str | None) -> Any:
    """Save and load in another place than a folder alone; the load of a generation comes before its drain ends."""
    number = dist.get_rank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rankless.save_checkpoint(run, "s", model=Counted(number), stateful={"counter": Counter(number)}, local=local)
    model, counter = Counted(-1), Counter(-1)
    restored = rankless.restore(run, "s", model=model, stateful={"counter": counter}, local=local)
    return [model.tokens[0].item(), model.scales[0].item(), counter.number], set(restored.exact)


@pytest.mark.parametrize("tier", [False, True])
@pytest.mark.parametrize("bucket", [False, True])
def test_each_rank_gets_its_own_values_back_from_every_place(
    ranks: Ranks, tmp_path: Path, bucket: bool, tier: bool
) -> None:
    local = str(tmp_path / "tier") if tier else None
    with FakeS3().served() if bucket else nullcontext() as url:
        run = store_at(url).path(f"{BUCKET}/run") if bucket else tmp_path / "run"
        for rank, (numbers, exact) in enumerate(ranks(2, _save_and_load_elsewhere, run, local)):
            assert numbers == [rank] * 3
            assert exact >= {"model", "stateful"}


def test_other_ranks_get_those_of_rank_0_and_are_told_so(ranks: Ranks, tmp_path: Path) -> None:
    said, _ = ranks(2, _save_and_load, str(tmp_path), False)[0]
    assert len(said) == 1
    numbers, exact, reconstructed, messages = _load(tmp_path, "s")
    assert numbers == [0] * 4
    assert (exact, reconstructed) == (set(), COMPONENTS)
    names = ("model/tokens", "model/_extra_state", "stateful/counter", "user_content")
    assert len(messages) == 1
    assert all(name in text for name in names for text in (messages[0], said[0]))


def _save_what_is_equal(run: str) -> Any:
    return _save(Path(run), "s", 7)


def test_equal_values_are_exact_everywhere(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, _save_what_is_equal, str(tmp_path)) == [[], []]
    numbers, exact, reconstructed, messages = _load(tmp_path, "s")
    assert numbers == [7] * 4
    assert (exact, reconstructed, messages) == (COMPONENTS, set(), [])


def _save_several(run: str) -> Any:
    """Make saves whose values begin to differ, and end to: only the first that differ are worth a warning."""
    model = Counted(0)
    with (
        warnings.catch_warnings(record=True) as caught,
        rankless.Checkpointer(run, model=model, save_every=1) as checkpointer,
    ):
        warnings.simplefilter("always")
        said = []
        for step, value in enumerate([0, dist.get_rank(), 2 * dist.get_rank(), 3], start=1):
            model.tokens.fill_(value)
            checkpointer.step(step)
            said.append(len(caught))
    results = []
    for step in range(1, 5):
        loaded = Counted(-1)
        rankless.restore(run, f"step_{step}", model=loaded)
        results.append(loaded.tokens[0].item())
    return said, results


def test_only_the_first_save_that_differs_warns(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = ranks(2, _save_several, str(tmp_path))
    assert [results for _, results in outcomes] == [[0, 0, 0, 3], [0, 1, 2, 3]]
    assert outcomes[0][0] == [0, 1, 1, 1]


def _save_batch_norm(run: str, broadcast: bool) -> Any:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model = DistributedDataParallel(net, broadcast_buffers=broadcast)
    model(torch.randn(4, 2, generator=torch.Generator().manual_seed(dist.get_rank()))).sum().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rankless.save_checkpoint(run, "s", model=model, rng=False)
    return len(caught), net[1].running_mean.tolist()


@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers_that_ddp_overwrites_are_those_of_rank_0(ranks: Ranks, tmp_path: Path, broadcast: bool) -> None:
    outcomes = ranks(2, _save_batch_norm, str(tmp_path), broadcast)
    assert outcomes[0][1] != outcomes[1][1]
    assert outcomes[0][0] == (0 if broadcast else 1)
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        restored = rankless.restore(tmp_path, model=net)
    assert net[1].running_mean.tolist() == outcomes[0][1]
    assert ("model" in restored.exact, len(caught)) == ((True, 0) if broadcast else (False, 1))


def _resume_late_buffer(run: str) -> tuple[list[float], tuple[str, ...]]:
    net = nn.Linear(2, 2)
    model = DistributedDataParallel(net)
    net.register_buffer("late", torch.full((2,), float(dist.get_rank())))
    model(torch.ones(1, 2)).sum().backward()
    rankless.save_checkpoint(run, "s", model=model, rng=False)
    net.late.fill_(-1)
    restored = rankless.restore(run, model=model)
    return net.late.tolist(), restored.exact


def test_the_first_buffer_of_a_model_that_ddp_has_already_is_that_of_each_rank(ranks: Ranks, tmp_path: Path) -> None:
    # DDP broadcasts no buffers if the model had none when it was wrapped
    assert ranks(2, _resume_late_buffer, str(tmp_path)) == [([0.0, 0.0], ("model",)), ([1.0, 1.0], ("model",))]


def _save_of_rank_0(run: str) -> Any:
    content = {"loss": 0.5} if dist.get_rank() == 0 else None
    rankless.save_checkpoint(run, "s", user_content=content, rng=False)
    dist.barrier()
    restored = rankless.restore(run, rng=False)
    return restored.user_content, restored.exact


def test_content_that_only_rank_0_passes_is_exact(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, _save_of_rank_0, str(tmp_path)) == [({"loss": 0.5}, ("user_content",))] * 2


def _save_large_twice(run: Path) -> list[float]:
    """Save values of more bytes than replicas are sampled of, which begin to differ in one element after a save."""
    content = {"values": torch.zeros(2**24 + 4096)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rankless.save_checkpoint(run, "a", user_content=content, rng=False)
        content["values"][2**23] = dist.get_rank()
        rankless.save_checkpoint(run, "b", user_content=content, rng=False)
    loaded = rankless.restore(run, "b", rng=False).user_content["values"]
    return [loaded[2**23].item()]


def test_one_element_of_large_values_that_differs_at_a_later_save_is_found(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, _save_large_twice, tmp_path) == [[0.0], [1.0]]


def save_content_of_rank_1(run: Path) -> str:
    with pytest.raises(RankMismatchError) as error:
        rankless.save_checkpoint(run, "a", nn.Linear(1, 1), user_content={"n": 1} if dist.get_rank() == 1 else None)
    assert not rankless.has_checkpoint(run)
    return str(error.value)


def test_content_that_rank_0_does_not_pass_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    for message in ranks(2, save_content_of_rank_1, tmp_path):
        assert message.startswith("rank 1 passed user_content, and rank 0,")
