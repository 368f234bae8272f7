"""``from_pretrained`` of transformers with weights of ``open_weights``: the model is the one from its own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig

import rankless
from rankless.errors import CorruptCheckpointError
from tests.helpers.corruption import flip_tensor_bit
from tests.helpers.pool import Ranks

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

#: A dense model with tied weights, and one whose experts are stored apart and fused by ``from_pretrained``.
CONFIGS: dict[str, Any] = {
    "LlamaForCausalLM": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "MixtralForCausalLM": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),
}


def write_model(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    model = getattr(transformers, name)(CONFIGS[name]())
    model.to(torch.bfloat16).save_pretrained(folder / "hub")
    rankless.save_model(model, folder / "ours", shard=True)
    return folder


def local(tensor: Any) -> torch.Tensor:
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def load_both(name: str, folder: Path, layout: str) -> tuple[list[str], float, bool]:
    """Return what differs, what was needed of the parameters of the rank, and whether it was verified."""
    model_class, size = getattr(transformers, name), dist.get_world_size()
    options = {"distributed_config": DistributedConfig(**{layout: size})} if size > 1 else {}
    expected = model_class.from_pretrained(folder / "hub", dtype=torch.bfloat16, **options)
    config = transformers.AutoConfig.from_pretrained(folder / "hub")
    with rankless.open_weights(folder / "ours") as weights:
        model = model_class.from_pretrained(
            None, config=config, state_dict=weights.slices(), dtype=torch.bfloat16, **options
        )
    ours, theirs = model.state_dict(), expected.state_dict()
    wrong = [key for key in theirs if not torch.equal(local(ours[key]), local(theirs[key]))]
    assert list(ours) == list(theirs)
    assert [type(p) for p in model.parameters()] == [type(p) for p in expected.parameters()]
    own = sum(local(parameter).nbytes for parameter in model.parameters())
    return wrong, weights.report.needed / own, weights.report.verified


@pytest.mark.parametrize(("n", "layout"), [(1, "none"), (2, "tp_size"), (2, "fsdp_size"), (4, "fsdp_size")])
@pytest.mark.parametrize("name", CONFIGS)
def test_all_parameters_are_equal_and_each_rank_reads_its_own(
    ranks: Ranks, tmp_path: Path, name: str, n: int, layout: str
) -> None:
    write_model(name, tmp_path)
    for wrong, needed, is_verified in ranks(n, load_both, name, tmp_path, layout):
        assert not wrong
        # The tied embedding has both of its names, and transformers takes it twice: 0.077 of this model.
        assert needed <= (1.08 if name == "LlamaForCausalLM" else 1)
        assert is_verified


def load_corrupt(folder: Path) -> str:
    config = transformers.AutoConfig.from_pretrained(folder / "hub")
    options = {"distributed_config": DistributedConfig(fsdp_size=dist.get_world_size())}
    with pytest.raises(CorruptCheckpointError) as caught, rankless.open_weights(folder / "ours") as weights:
        transformers.MixtralForCausalLM.from_pretrained(None, config=config, state_dict=weights.slices(), **options)
    return str(caught.value)


def test_a_flipped_bit_is_an_error_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    write_model("MixtralForCausalLM", tmp_path)
    flip_tensor_bit(tmp_path / "ours/model.safetensors", "model.norm.weight")
    for error in ranks(2, load_corrupt, tmp_path):
        assert "'model.norm.weight'" in error
        assert "is corrupt" in error
