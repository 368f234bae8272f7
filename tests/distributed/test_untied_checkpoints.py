"""Tests of checkpoints with two tensors under names that are one tensor of the model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import rankless
from rankless.errors import MismatchError
from tests.helpers.pool import Ranks


class Net(nn.Module):
    """A model with an embedding and a head, which may be one tensor."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def _save_native(path: Path, net: Net) -> None:
    rankless.save_checkpoint(path, "s", model=net, rng=False)


def _save_torch(path: Path, net: Net) -> None:
    torch.save({"model": {name: tensor.clone() for name, tensor in net.state_dict().items()}}, path)


def _save_hugging_face(path: Path, net: Net) -> None:
    path.mkdir()
    save_file({name: tensor.clone() for name, tensor in net.state_dict().items()}, path / "model.safetensors")


def _save_dcp(path: Path, net: Net) -> None:
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    dcp.save({"model": state}, checkpoint_id=path, no_dist=True)


WRITERS = [_save_native, _save_torch, _save_hugging_face, _save_dcp]


@pytest.mark.parametrize("save", WRITERS)
def test_a_tensor_that_would_be_dropped_is_named(tmp_path: Path, save: Callable[[Path, Net], None]) -> None:
    untied, tied = Net(tied=False), Net(tied=True)
    before = tied.embed.weight.detach().clone()
    save(tmp_path / "saved", untied)
    with pytest.raises(MismatchError, match=r"head\.weight: the same tensor as embed\.weight here"):
        rankless.load_checkpoint(tmp_path / "saved", model=tied, rng=False)
    assert torch.equal(tied.embed.weight, before)
    restored = rankless.restore(tmp_path / "saved", model=tied, rng=False, strict=False)
    assert (restored.exact, restored.unexpected) == ((), ("head.weight",))
    assert torch.equal(tied.head.weight, untied.embed.weight)


@pytest.mark.parametrize("save", WRITERS)
def test_equal_tensors_are_one(tmp_path: Path, save: Callable[[Path, Net], None]) -> None:
    untied, tied = Net(tied=False), Net(tied=True)
    untied.head.weight.data.copy_(untied.embed.weight)
    save(tmp_path / "saved", untied)
    assert rankless.restore(tmp_path / "saved", model=tied, rng=False).exact == ("model",)
    assert torch.equal(tied.head.weight, untied.embed.weight)


def _load(path: str, strict: bool) -> Any:
    try:
        restored = rankless.restore(path, model=Net(tied=True), rng=False, strict=strict)
    except MismatchError as error:
        return "head.weight" in str(error)
    return restored.exact, restored.unexpected


def test_all_ranks_agree(ranks: Ranks, tmp_path: Path) -> None:
    _save_native(tmp_path, Net(tied=False))
    assert ranks(2, _load, str(tmp_path), True) == [True, True]
    assert ranks(2, _load, str(tmp_path), False) == [((), ("head.weight",))] * 2
