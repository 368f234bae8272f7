"""Tests saving and loading FSDP1, with original and with flat parameters, against torch's own gathering."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard

import rankless
from rankless.errors import OptimizerMismatchError
from tests.helpers.fsdp1 import gather_optimizer_state, gather_state_dict, make_nested, make_net, train_model
from tests.helpers.pool import Ranks

Flat = dict[str, torch.Tensor]


def gathered(model: Any, optimizer: torch.optim.Optimizer) -> Flat:
    """Model and states, by the names that a checkpoint has for them, as torch's own state dicts tell."""
    actual = {f"model/{name}": tensor for name, tensor in gather_state_dict(model).items()}
    for fqn, states in gather_optimizer_state(model, optimizer).items():
        actual |= {f"optimizer/{fqn}/{name}": torch.as_tensor(tensor).clone() for name, tensor in states.items()}
    return actual


def save(path: str, *, orig: bool) -> Flat:
    model = make_nested(use_orig_params=orig)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train_model(model, optimizer)
    rankless.save_checkpoint(path, "s", model, optimizer)
    return gathered(model, optimizer)


def load(path: str, *, orig: bool, stepped: bool) -> Flat:
    model = make_nested(use_orig_params=orig)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    if stepped:
        train_model(model, optimizer, 1)
    rankless.load_checkpoint(path, model=model, optimizer=optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1]
    actual = gathered(model, optimizer)
    train_model(model, optimizer, 1)  # goes on
    return actual


def load_fsdp2(path: str) -> Flat:
    model = make_net()
    fully_shard(model.body)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    rankless.load_checkpoint(path, model=model, optimizer=optimizer)
    names = {id(p): name for name, p in model.named_parameters()}
    actual = {f"model/{name}": getattr(t, "full_tensor", lambda t=t: t)() for name, t in model.state_dict().items()}
    for p, states in optimizer.state.items():
        for name, t in states.items():
            actual[f"optimizer/{names[id(p)]}/{name}"] = getattr(t, "full_tensor", lambda t=t: t)()
    return actual


def stored(folder: Path) -> Flat:
    return {
        f"{file.parent.name}/{name}": tensor
        for file in folder.glob("*/*.safetensors")
        for name, tensor in load_file(file).items()
    }


def assert_same(actual: Flat, expected: Flat) -> None:
    for name in actual.keys() & expected.keys():
        assert actual[name].dtype == expected[name].dtype, name
        assert torch.equal(actual[name].view(expected[name].shape), expected[name]), name


@pytest.mark.parametrize("orig", [True, False], ids=["orig", "flat"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_what_fsdp1_saves_is_what_torch_gathers_and_comes_back_anywhere(
    ranks: Ranks, tmp_path: Path, n: int, *, orig: bool
) -> None:
    """On 4 ranks some hold no piece of a parameter."""
    expected = ranks(n, _save, str(tmp_path), orig)[0]
    on_disk = stored(tmp_path / "s")
    assert on_disk.keys() == expected.keys() - {
        name for name in expected if name.rpartition(".")[0] in {"model/head", "model/out", "model/again"}
    }
    assert_same(on_disk, expected)
    for readers, flat in ((1, True), (2, True), (3, False), (4, True), (4, False)):
        for result in ranks(readers, _load, str(tmp_path), flat, readers != 3):
            assert result.keys() == expected.keys()
            assert_same(result, expected)
    for result in ranks(3, load_fsdp2, str(tmp_path)):
        assert {"model/embed.weight", "optimizer/scale/exp_avg"} <= result.keys()
        assert_same(result, expected)


def _save(path: str, orig: bool) -> Flat:
    return save(path, orig=orig)


def _load(path: str, orig: bool, stepped: bool) -> Flat:
    return load(path, orig=orig, stepped=stepped)


def refused(path: str) -> str:
    model = make_nested(use_orig_params=False)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(OptimizerMismatchError) as raised:
        rankless.load_checkpoint(path, model=model, optimizer=optimizer)
    return str(raised.value)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda states: states.clear(), "different optimizer states of 'scale' and"),
        (lambda states: states.update(exp_avg=states["exp_avg"].double()), "layout is unknown"),
        (lambda states: states.update(step=torch.tensor(9.0)), "differ in the checkpoint"),
    ],
    ids=["none of one", "another dtype", "another step"],
)
def test_states_that_a_flat_parameter_cannot_keep_apart_are_refused(
    ranks: Ranks, tmp_path: Path, spoil: Any, words: str
) -> None:
    """Parameters that FSDP1 keeps as one have one set of states, of one dtype, and one step."""
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters())
    train_model(model, optimizer)
    spoil(optimizer.state[model.scale])
    rankless.save_checkpoint(tmp_path, "s", model, optimizer)
    assert all(words in message for message in ranks(2, refused, str(tmp_path)))
