"""Tests that recurrent modules on the meta device are loaded: they keep weak references to their weights."""

from pathlib import Path

import torch
from torch import nn

import rankless
from tests.helpers.pairwise import first_of


@first_of(1, "kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_module_on_meta_computes_what_the_saved_one_does(tmp_path: Path, kind: type[nn.RNNBase]) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(nn.Linear(3, 3), kind(3, 4, num_layers=2))

    source = make()
    rankless.save_checkpoint(tmp_path, "a", source)
    with torch.device("meta"):
        model = make()
    weights = list(model[1].parameters())
    rankless.load_checkpoint(tmp_path, None, model)
    sequence = torch.ones(5, 2, 3)
    assert torch.equal(model(sequence)[0], source(sequence)[0])
    assert all(kept is weight for kept, weight in zip(model[1].parameters(), weights, strict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model(sequence)[0].detach()
    model(sequence)[0].sum().backward()
    optimizer.step()
    assert not torch.equal(model(sequence)[0], before)
