"""A folder with the names of torchtitan's own checkpoint manager opens with its model, optimizer and scheduler.

``tests/frameworks/test_torchtitan.py`` reads folders of torchtitan itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import rankless
from tests.helpers.equality import equal_bits
from tests.helpers.stateful import Counter

pytestmark = pytest.mark.filterwarnings("ignore")


def make_training(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = nn.ModuleDict({"tok_embeddings": nn.Embedding(5, 4), "output": nn.Linear(4, 5)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def test_the_model_is_at_the_top_and_the_optimizer_is_flat(tmp_path: Path) -> None:
    model, optimizer, scheduler = make_training(0)
    model["output"](model["tok_embeddings"](torch.arange(3))).square().sum().backward()
    optimizer.step()
    scheduler.step()
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    states = {
        **model.state_dict(),
        "optimizer": flat,
        "lr_scheduler": scheduler,
        "train_state": Counter(3),
        "dataloader": {"dp_rank_0": b"position", "world_size": 1},
    }
    dcp.save(states, checkpoint_id=tmp_path / "step-3", no_dist=True)
    new_model, new_optimizer, new_scheduler = make_training(1)
    result = rankless.restore(
        tmp_path / "step-3", model=new_model, optimizer=new_optimizer, scheduler=new_scheduler, rng=False
    )
    assert set(result.exact) == {"model", "optimizer", "scheduler", "user_content"}
    assert result.user_content["train_state"] == {"count": 3}
    assert result.user_content["dataloader"]["dp_rank_0"] == b"position"
    for name, value in model.named_parameters():
        restored = new_model.get_parameter(name)
        assert equal_bits(restored, value)
        assert equal_bits(new_optimizer.state[restored]["exp_avg"], optimizer.state[value]["exp_avg"])
    assert new_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert new_scheduler.last_epoch == 1
