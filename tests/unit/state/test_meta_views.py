"""Tests of models on the meta device whose tensors share one storage: each tensor gets memory of its own."""

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import rankless
from rankless.errors import MismatchError


class Shared(nn.Module):
    """A tensor, and what ``derive`` makes of it."""

    def __init__(self, whole: torch.Tensor, derive: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        if isinstance(whole, nn.Parameter):
            self.whole = whole
        else:
            self.register_buffer("whole", whole)
        derived = derive(self.whole)
        if isinstance(derived, torch.Tensor):
            self.register_buffer("derived", derived)
        else:
            self.kept = derived


def make_buffer() -> torch.Tensor:
    return torch.ones(4)


def make_parameter() -> torch.Tensor:
    return nn.Parameter(torch.ones(4))


VIEWS = [
    lambda whole: whole[:2],
    lambda whole: whole.view(2, 2),
    lambda whole: [whole[1:]],
    lambda whole: [weakref.ref(whole)],
]


@pytest.mark.parametrize("make", [make_buffer, make_parameter])
@pytest.mark.parametrize("derive", VIEWS)
def test_a_tensor_that_others_are_views_of_is_named_before_anything_changes(
    make: Callable[[], torch.Tensor], derive: Callable[[torch.Tensor], object], tmp_path: Path
) -> None:
    rankless.save_checkpoint(tmp_path, "s", Shared(make(), derive), rng=False)
    with torch.device("meta"):
        model = Shared(make(), derive)
    with pytest.raises(MismatchError, match="whole: on the meta device here, and another tensor is a view of it"):
        rankless.restore(tmp_path, model=model, rng=False)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("make", [make_buffer, make_parameter])
def test_tensors_that_no_longer_share_memory_are_not_called_exact(
    make: Callable[[], torch.Tensor], tmp_path: Path
) -> None:
    def derive(whole: torch.Tensor) -> torch.Tensor:
        return whole.detach()[1:3]

    rankless.save_checkpoint(tmp_path, "s", Shared(make(), derive), rng=False)
    with torch.device("meta"):
        model = Shared(make(), derive)
    restored = rankless.restore(tmp_path, model=model, rng=False)
    assert (restored.exact, restored.reconstructed) == ((), ("model",))
    assert model.derived.tolist() == [1.0, 1.0]


def test_separate_parts_of_one_storage_are_exact(tmp_path: Path) -> None:
    def make() -> nn.Module:
        storage = torch.ones(4)
        return nn.ParameterList([nn.Parameter(storage[:2]), nn.Parameter(storage[2:])])

    rankless.save_checkpoint(tmp_path, "s", make(), rng=False)
    with torch.device("meta"):
        model = make()
    assert rankless.restore(tmp_path, model=model, rng=False).exact == ("model",)
