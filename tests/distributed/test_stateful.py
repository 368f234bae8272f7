"""Tests objects with a state of their own, shared by all ranks or one per rank."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rankless
from rankless.errors import InvalidArgumentError, MismatchError
from tests.helpers.pool import Ranks


class Loader:
    """A data loader of a rank: where it is, and in which order it goes."""

    def __init__(self, position: int = 0) -> None:
        self.position, self.order = position, torch.randperm(20, generator=torch.Generator().manual_seed(position))

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.order = state["position"], state["order"]


def test_scalers_and_averages_come_back(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    scaler.update(4.0)
    average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 2))
    rankless.save_checkpoint(tmp_path, "s", stateful={"scaler": scaler, "average": average})
    again = torch.amp.GradScaler("cpu")
    other = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 2))
    restored = rankless.restore(tmp_path, stateful={"scaler": again, "average": other})
    assert again.state_dict() == scaler.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), average.parameters(), strict=True))
    assert "stateful" in restored.exact


def test_what_the_checkpoint_lacks_is_told_before_anything_is_changed(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", stateful={"a": Loader(3)})
    a, b = Loader(1), Loader(2)
    with pytest.raises(MismatchError, match=r"(?s)missing.*'b'.*missing.*dataloader"):
        rankless.restore(tmp_path, stateful={"a": a, "b": b}, dataloader=Loader())
    assert a.position == 1
    restored = rankless.restore(tmp_path, stateful={"a": a, "b": b}, strict=False)
    assert (a.position, b.position, restored.missing) == (3, 2, ("stateful object 'b'",))


@pytest.mark.parametrize(
    "options", [{"stateful": [1]}, {"stateful": {"a": 1}}, {"dataloader": 3}, {"stateful": {1: 2}}]
)
def test_what_has_no_state_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        rankless.save_checkpoint(tmp_path, "s", **options)
    assert not list(tmp_path.iterdir())


def save(path: str) -> None:
    rankless.save_checkpoint(path, "s", dataloader=Loader(10 + dist.get_rank()))


def load(path: str, **options: Any) -> tuple[int, bool, tuple[str, ...], tuple[str, ...]]:
    loader = Loader()
    restored = rankless.restore(path, dataloader=loader, **options)
    in_order = torch.equal(loader.order, Loader(loader.position).order)
    return loader.position, in_order, restored.missing, restored.exact


def load_at_least(path: str) -> tuple[int, bool, tuple[str, ...], tuple[str, ...]]:
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        return load(path, allow_missing="dataloader")


def test_each_rank_gets_its_own_data_loader_back_and_another_world_size_is_told_that_it_cannot(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(3, save, str(tmp_path))
    assert ranks(3, load, str(tmp_path)) == [(10 + rank, True, (), ("dataloader",)) for rank in range(3)]
    assert [type(error) for error in ranks.outcomes(2, load, str(tmp_path))] == [MismatchError] * 2
    assert ranks(2, load_at_least, str(tmp_path)) == [(0, True, ("dataloader",), ())] * 2


class Splittable(Loader):
    """One that other numbers of ranks can take over: the first goes on where any was the farthest."""

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        positions = [state["position"] for state in states]
        for state in states:
            assert torch.equal(state["order"], Loader(state["position"]).order)
        self.position = 100 * max(positions) + dist.get_rank()


def load_split(path: str) -> tuple[int, tuple[str, ...], tuple[str, ...]]:
    loader = Splittable()
    restored = rankless.restore(path, dataloader=loader)
    return loader.position, restored.exact, restored.reconstructed


@pytest.mark.parametrize("number", [2, 5])
def test_a_data_loader_that_knows_how_is_given_the_states_of_all_ranks_on_another_world_size(
    ranks: Ranks, tmp_path: Path, number: int
) -> None:
    ranks(3, save, str(tmp_path))
    expected = [(1200 + rank, (), ("dataloader",)) for rank in range(number)]
    assert ranks(number, load_split, str(tmp_path)) == expected
    assert ranks(3, load_split, str(tmp_path)) == [(10 + rank, ("dataloader",), ()) for rank in range(3)]


def test_loading_does_not_ask_for_the_state_that_it_replaces(tmp_path: Path) -> None:
    """It may be large, or not be there yet."""

    class Fresh(Loader):
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("not yet")

    rankless.save_checkpoint(tmp_path, "s", stateful={"a": Loader(3)}, dataloader=Loader(4))
    a, loader = Fresh(), Fresh()
    rankless.load_checkpoint(tmp_path, stateful={"a": a}, dataloader=loader)
    assert (a.position, loader.position) == (3, 4)
