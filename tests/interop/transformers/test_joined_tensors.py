"""Tests of files in which the tensors that are several ones of a model, or parts of one, do not fit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import rankless
from rankless.errors import MismatchError

#: The rows of the queries, keys and values of a layer of NomicBert.
JOINED = "encoder.layers.0.attn.Wqkv.weight"

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}

Tensors = dict[str, torch.Tensor]


def make_nomic_bert() -> nn.Module:
    return transformers.NomicBertModel(transformers.NomicBertConfig(**SIZES))


def make_mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=2)
    return transformers.MixtralForCausalLM(config)


def cut_joined(tensors: Tensors) -> None:
    tensors[JOINED] = tensors[JOINED][:-1].clone()


def add_part(tensors: Tensors) -> None:
    tensors["layers.0.self_attn.k_proj.weight"] = torch.zeros(16, 16)


def cut_expert(tensors: Tensors) -> None:
    name = next(name for name in sorted(tensors) if name.endswith("experts.1.w1.weight"))
    tensors[name] = tensors[name][:-1].clone()


def cast_expert(tensors: Tensors) -> None:
    name = next(name for name in sorted(tensors) if name.endswith("experts.1.w1.weight"))
    tensors[name] = tensors[name].bfloat16()


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (make_nomic_bert, cut_joined, r"Wqkv.weight: shape \[47, 16\] in the checkpoint, \[48, 16\] here"),
        (make_nomic_bert, add_part, "k_proj.weight: in the checkpoint twice, by itself and as a part of .*Wqkv"),
        (make_mixtral, cut_expert, r"experts.1.w1.weight: shape \[15, 16\] in the checkpoint, \[16, 16\] here"),
        (make_mixtral, cast_expert, r"gate_up_proj: its parts have several dtypes .*w1.weight is BF16.* is F32"),
    ],
)
def test_joined_tensors_that_do_not_fit_are_named(
    make: Callable[[], Any], change: Callable[[Tensors], None], message: str, strict: bool, tmp_path: Path
) -> None:
    make().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    model = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(MismatchError, match=message):
        rankless.load_model(model, tmp_path, strict=strict)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
