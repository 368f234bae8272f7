"""Tests that ``cast_dtype=True`` casts an optimizer's states with their parameters, as torch's own load does."""

from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

import rankless
from tests.helpers.pairwise import each_value

OPTIMIZERS: dict[str, Any] = {
    "adam": optim.Adam,
    "adamw foreach": lambda params: optim.AdamW(params, foreach=True),
    "adamw fused": lambda params: optim.AdamW(params, fused=True),
    "amsgrad": lambda params: optim.Adam(params, amsgrad=True),
    "sgd fused": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "adagrad": optim.Adagrad,
    "rmsprop": lambda params: optim.RMSprop(params, momentum=0.9),
}


def train(model: nn.Module, optimizer: optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.3)
    optimizer.step()


@each_value(
    {
        "kind": OPTIMIZERS,
        "saved, here": [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
        "has_stepped": [False, True],
    }
)
def test_a_step_after_a_cast_is_the_one_after_torchs_own_load(
    tmp_path: Path, kind: str, saved: torch.dtype, here: torch.dtype, has_stepped: bool
) -> None:
    source = nn.Linear(4, 3, dtype=saved)
    source_optimizer = OPTIMIZERS[kind](source.parameters())
    train(source, source_optimizer)
    rankless.save_checkpoint(tmp_path, "a", source, source_optimizer)

    expected, actual = nn.Linear(4, 3, dtype=here), nn.Linear(4, 3, dtype=here)
    expected.load_state_dict(source.state_dict())
    expected_optimizer, optimizer = OPTIMIZERS[kind](expected.parameters()), OPTIMIZERS[kind](actual.parameters())
    expected_optimizer.load_state_dict(source_optimizer.state_dict())
    if has_stepped:
        train(actual, optimizer)
    restored = rankless.restore(tmp_path, None, actual, optimizer, cast_dtype=True)

    assert restored.reconstructed[:2] == ("model", "optimizer")
    for parameter, peer in zip(actual.parameters(), expected.parameters(), strict=True):
        for name, value in expected_optimizer.state[peer].items():
            assert torch.equal(optimizer.state[parameter][name], value)
            if value.ndim:
                assert optimizer.state[parameter][name].dtype == value.dtype
        assert kind not in {"adam", "amsgrad"} or optimizer.state[parameter]["step"].dtype == torch.float32
    train(actual, optimizer)
    train(expected, expected_optimizer)
    assert all(torch.equal(*pair) for pair in zip(actual.parameters(), expected.parameters(), strict=True))


def test_states_of_another_dtype_than_their_parameters_are_not_cast(tmp_path: Path) -> None:
    source = nn.Linear(4, 3, dtype=torch.bfloat16)
    optimizer = optim.SGD(source.parameters(), lr=0.1, momentum=0.9)
    train(source, optimizer)
    for states in optimizer.state.values():
        states["momentum_buffer"] = torch.full_like(states["momentum_buffer"], 1 / 3, dtype=torch.float32)
    rankless.save_checkpoint(tmp_path, "a", source, optimizer)
    wide = nn.Linear(4, 3, dtype=torch.float64)
    wide_optimizer = optim.SGD(wide.parameters(), lr=0.1, momentum=0.9)
    rankless.load_checkpoint(tmp_path, None, wide, wide_optimizer, cast_dtype=True)
    assert {states["momentum_buffer"].dtype for states in wide_optimizer.state.values()} == {torch.float32}
