"""Tests that a model of transformers, loaded from Megatron's tensors, computes what Megatron computes with them.

The oracle is a forward pass on Megatron's own tensors: ``tests/helpers/megatron_models.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import rankless
from rankless.errors import FormatError, InvalidArgumentError
from tests.helpers.cost import limit_cost
from tests.helpers.equality import equal_bits
from tests.helpers.megatron_configs import CONFIGS, build_model
from tests.helpers.megatron_models import (
    ARGS,
    HIDDEN,
    VOCAB,
    build_tensors,
    run_model,
    save_sharded,
    save_torch_dist,
)
from tests.helpers.pool import Ranks

pytestmark = pytest.mark.filterwarnings("ignore")

HF = {"layout": "hf"}


@pytest.mark.parametrize("family", ARGS)
def test_a_loaded_model_computes_the_same(tmp_path: Path, family: str) -> None:
    tensors = build_tensors(ARGS[family])
    folder = save_torch_dist(tmp_path / "iter_0000007", tensors, ARGS[family])
    tokens = torch.randint(VOCAB, (2, 11), generator=torch.Generator().manual_seed(3))
    model = build_model(family)
    expected = run_model(tensors, ARGS[family], tokens)
    with torch.no_grad():
        assert not torch.allclose(model(tokens).logits, expected, atol=1e-2)
        rankless.load_checkpoint(folder, model=model, keys=HF)
        torch.testing.assert_close(model(tokens).logits, expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("family", ARGS)
def test_the_optimizer_follows_the_names(tmp_path: Path, family: str) -> None:
    """The moments are copies of the weights, so after the load each must equal its parameter."""
    tensors = build_tensors(ARGS[family])
    states = {"param": tensors, "exp_avg": tensors, "exp_avg_sq": tensors}
    folder = save_torch_dist(tmp_path / "iter_0000007", tensors, ARGS[family], states)
    model = build_model(family)
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1.0)
    rankless.load_checkpoint(folder, model=model, optimizer=optimizer, keys=HF)
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        assert torch.equal(state["exp_avg"], parameter)
        assert torch.equal(state["exp_avg_sq"], parameter)
        assert state["step"] == 5.0
    assert [(group["lr"], group["betas"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (0.01, (0.9, 0.95), 0.1),
        (0.01, (0.9, 0.95), 0.0),
    ]
    optimizer.step()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_tensors_of_tensor_parallel_ranks(ranks: Ranks, tmp_path: Path, family: str) -> None:
    """Queries, keys and values are cut out of the columns and rows that each rank has stored."""
    ranks(2, save_sharded, str(tmp_path / "sharded"), family)
    sharded = rankless.open(tmp_path / "sharded", keys=HF)
    whole = rankless.open(save_torch_dist(tmp_path / "whole", build_tensors(ARGS[family]), ARGS[family]), keys=HF)
    assert sharded.keys() == whole.keys()
    assert len(list(tmp_path.glob("sharded/*.distcp"))) == 2
    assert all(equal_bits(sharded[name], whole[name]) for name in whole)


def test_a_folder_for_transformers(tmp_path: Path) -> None:
    """``to="hf"`` implies the names of transformers, and casts if it is asked to."""
    tensors = build_tensors(ARGS["llama"])
    folder = save_torch_dist(tmp_path / "run/iter_0000007", tensors, ARGS["llama"])
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("7")
    for source in (folder, tmp_path / "run"):
        out = rankless.convert(source, tmp_path / f"hf-{source.name}", to="hf")
        CONFIGS["llama"]().save_pretrained(out)
        model = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
        tokens = torch.arange(10)[None]
        with torch.no_grad():
            torch.testing.assert_close(
                model(tokens).logits, run_model(tensors, ARGS["llama"], tokens), atol=2e-4, rtol=1e-3
            )
    own = rankless.convert(folder, tmp_path / "own", to="hf", layout="megatron")
    assert rankless.open(own).info("model/decoder.layers.0.self_attention.linear_qkv.weight").shape == (64, HIDDEN)


def test_the_padding_of_the_vocabulary(tmp_path: Path) -> None:
    args = {**ARGS["llama"], "vocab_size": None}
    folder = save_torch_dist(tmp_path / "c", build_tensors(args), args)
    name = "model/model.embed_tokens.weight"
    assert rankless.open(folder, keys=HF).info(name).shape == (64, HIDDEN)
    assert rankless.open(folder, keys={**HF, "vocab_size": "50"}).info(name).shape == (50, HIDDEN)
    with pytest.raises(FormatError, match="fewer than the vocab_size 70"):
        rankless.open(folder, keys={**HF, "vocab_size": "70"})
    with pytest.raises(InvalidArgumentError, match="vocab_size is for layout=hf"):
        rankless.open(folder, keys={"vocab_size": "50"})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"swiglu": False}, "swiglu False"),
        ({"normalization": "LayerNorm"}, "normalization LayerNorm"),
        ({"rotary_interleaved": True}, "rotary_interleaved is set"),
        ({"rotary_percent": 0.5}, "is none of llama"),
        ({"multi_latent_attention": True}, "multi_latent_attention is set"),
        ({"num_query_groups": 4}, "by args it should have"),
        ({"num_layers": 4}, "by args it should have 4 equal layers"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"add_qkv_bias": True}, "have no self_attention.linear_qkv.bias"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    args = {**ARGS["llama"], **changed}
    folder = save_torch_dist(tmp_path / "c", build_tensors(ARGS["llama"]), args)
    with pytest.raises(FormatError, match=message):
        rankless.open(folder, keys=HF)
    assert rankless.open(folder).keys()


@pytest.mark.parametrize(
    ("family", "name", "message"),
    [
        ("llama", "num_layers", "it should have 1000000000 equal layers"),
        ("mixtral", "num_layers", "it should have 1000000000 equal layers"),
        ("mixtral", "num_experts", "have no mlp.experts.local_experts.4.linear_fc1.weight"),
    ],
)
def test_the_cost_of_huge_models(tmp_path: Path, family: str, name: str, message: str) -> None:
    """The names that a model should have are not all made before those that it has not are noticed."""
    folder = save_torch_dist(tmp_path / "c", build_tensors(ARGS[family]), {**ARGS[family], name: 10**9})
    with limit_cost(memory=True), pytest.raises(FormatError, match=message):
        rankless.open(folder, keys=HF)


def test_tensors_of_no_family_are_refused(tmp_path: Path) -> None:
    tensors = build_tensors(ARGS["llama"])
    for name in ("decoder.sinks", "mtp.layers.0.eh_proj.weight"):
        folder = save_torch_dist(tmp_path / name, {**tensors, name: torch.ones(3)}, ARGS["llama"])
        with pytest.raises(FormatError, match=f"family llama, which its args describe, has no '{name}'"):
            rankless.open(folder, keys=HF)
