"""Tests that colliding names in a foreign checkpoint are refused, with both paths; unusual keys are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rankless
from rankless.errors import CorruptCheckpointError, FormatError, InvalidArgumentError
from rankless.nxd.reader.sharding_spec import ShardingRule, ShardingSpec
from rankless.nxd.writer.shard import shard_tensor
from tests.helpers.equality import equal_bits
from tests.helpers.torch_files import save_tree


def one(value: float = 1.0) -> torch.Tensor:
    return torch.full((2,), value)


def optimizer(state: Any, **group: Any) -> dict[str, Any]:
    return {"model": {"w": one()}, "optimizer": {"state": state, "param_groups": [{"params": [0], **group}]}}


COLLIDING: dict[str, tuple[Any, str, str]] = {
    "a number and its text": ({1: one(), "1": one(), "x": one()}, "[1]", "['1']"),
    "a dot": ({"model": {"a.b": one(), "a": {"b": one()}}}, "['a.b']", "['a']['b']"),
    "None and its text": ({None: one(), "None": one()}, "[None]", "['None']"),
    "True and its text": ({True: one(), "True": one()}, "[True]", "['True']"),
    "a tuple and its text": ({"model": {(1, 2): one(), "(1, 2)": one()}}, "[(1, 2)]", "['(1, 2)']"),
    "bytes and their text": ({"model": {b"a": one(), "b'a'": one()}}, "[b'a']", "[\"b'a'\"]"),
    "extra state": ({"model": {"a.b_extra_state": {"x": 1}, "a": {"b_extra_state": 2}, "w": one()}}, "a.b", "['a']"),
    "parameters of an optimizer": (optimizer({0: {"m": one()}, "0": {"m": one()}}), "['state'][0]", "['state']['0']"),
    "states of a parameter": (optimizer({0: {1: one(), "1": one()}}), "[0][1]", "[0]['1']"),
    "plain states of a parameter": (optimizer({0: {1: 5, "1": 6}}), "[0][1]", "[0]['1']"),
    "settings": (
        optimizer({}, lr=0.1) | {"optimizer": {"param_groups": [{"params": [0], 1: 2, "1": 3}]}},
        "[1]",
        "['1']",
    ),
    "models": ({"x": 0, 1: {"w": one()}, "1": {"v": one()}}, "[1]", "['1']"),
    "optimizers": (
        {"model": {"w": one()}, 1: optimizer({})["optimizer"], "1": optimizer({})["optimizer"]},
        "[1]",
        "['1']",
    ),
    "a flattened optimizer and wrappers": (
        {
            "model": {"a.w": one()},
            "optim": {"param_groups.a.w.lr": 0.1, "state.a.w.m": one(), "state._orig_mod.a.w.m": one()},
        },
        "['state']['a.w']",
        "['state']['_orig_mod.a.w']",
    ),
}


@pytest.mark.parametrize("kind", COLLIDING)
def test_both_paths_are_named(tmp_path: Path, kind: str) -> None:
    tree, first, second = COLLIDING[kind]
    file = save_tree(tmp_path, tree)
    for ask in (rankless.open, lambda path: rankless.convert(path, tmp_path / "out", to="native")):
        with pytest.raises(FormatError, match=f"{file}.*would both get the name") as caught:
            ask(file)
        assert first in str(caught.value)
        assert second in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_names_with_their_group_before_them(tmp_path: Path) -> None:
    file = save_tree(tmp_path, {"a": {"ema/w": one()}, "b": {"w": one()}})
    with pytest.raises(FormatError, match="'model/ema/w'"):
        rankless.open(file, keys={"model": "a", "model/ema": "b"})


def test_averages_by_number_are_read(tmp_path: Path) -> None:
    """As code for exponential moving averages saves its shadow parameters."""
    ema = {"decay": 0.9, "shadow": {0: one(1), 1: one(2)}}
    file = save_tree(tmp_path, {"model": {"w": one()}, "ema": ema})
    content = rankless.open(file).values["user_content"]["ema"]
    assert equal_bits(content["shadow"][0], one(1))
    assert equal_bits(content["shadow"][1], one(2))


def test_a_model_by_number_is_read(tmp_path: Path) -> None:
    opened = rankless.open(save_tree(tmp_path, {"model": {0: one(1), 1: {2: one(2)}}}))
    assert {name: opened[name][0].item() for name in opened} == {"model/0": 1, "model/1.2": 2}


def test_tuples_as_keys_have_names_of_their_own(tmp_path: Path) -> None:
    opened = rankless.open(save_tree(tmp_path, {"model": {(1, 2): one(1), (3, 4): one(2), "x": one(3)}}))
    assert {name: opened[name][0].item() for name in opened} == {"model/(1, 2)": 1, "model/(3, 4)": 2, "model/x": 3}


def test_names_that_meet_only_without_wrappers_keep_them(tmp_path: Path) -> None:
    opened = rankless.open(save_tree(tmp_path, {"model": {"_orig_mod.a": one(1), "a": one(2)}}))
    assert sorted(opened) == ["model/_orig_mod.a", "model/a"]


def test_tensors_in_values_have_their_whole_paths_as_names(tmp_path: Path) -> None:
    long = "text_model.encoder.transformer.layers.attention.self.projection."
    tree = {"n": 1, "list": [{f"{long}{i}": one(i), i: one(-i)} for i in range(3)]}
    rankless.convert(save_tree(tmp_path, tree), tmp_path / "out", to="native")
    content = rankless.open(tmp_path / "out").values["user_content"]["list"]
    assert [[float(row[key][0]) for key in row] for row in content] == [[i, -i] for i in range(3)]
    raw = (tmp_path / "out" / "state.safetensors").read_bytes()
    assert all(f"user_content.list.{i}.{long}{i}".encode() in raw for i in range(3))


def test_states_of_one_parameter_in_two_files_are_refused(tmp_path: Path) -> None:
    torch.save({0: {"m": one(1)}}, tmp_path / "pytorch_optim-00001.bin")
    torch.save({0: {"m": one(2)}}, tmp_path / "pytorch_optim-00002.bin")
    torch.save([{"lr": 0.1, "params": [0]}], tmp_path / "pytorch_optim_group.bin")
    (tmp_path / "pytorch_optim.bin.index.json").write_text(
        '{"metadata": {"param_groups": "pytorch_optim_group.bin"}, '
        '"weight_map": {"0": "pytorch_optim-00001.bin", "1": "pytorch_optim-00002.bin"}}'
    )
    with pytest.raises(CorruptCheckpointError, match="'m' of optimizer parameter 0 is stored twice"):
        rankless.open(tmp_path)


def test_what_a_layout_of_nxd_would_leave_out_is_refused() -> None:
    """The first rule fits what the second says that a parameter goes into."""
    spec = ShardingSpec((ShardingRule("*.fused", into=("*.a",)), ShardingRule("x.fused", into=("x.b",))))
    with pytest.raises(InvalidArgumentError, match=r"x\.b"):
        shard_tensor(spec, ["x.a", "x.b"])


def test_content_under_a_key_of_lightnings_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    rankless.save_checkpoint(tmp_path / "run", "s", model, user_content={"state_dict": 1})
    with pytest.raises(InvalidArgumentError, match="'state_dict'"):
        rankless.convert(tmp_path / "run" / "s", tmp_path / "out", to="lightning")


def test_a_distributed_checkpoint_with_two_of_one_name_is_refused(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path / "run", "s", user_content={"a.b": one(1), "a": {"b": one(2)}})
    with pytest.raises(InvalidArgumentError, match="joins keys by dots"):
        rankless.convert(tmp_path / "run" / "s", tmp_path / "out", to="dcp")
    assert not (tmp_path / "out").exists()
