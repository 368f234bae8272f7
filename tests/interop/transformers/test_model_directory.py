"""Tests that a checkpoint's model directory is a Hugging Face checkpoint, and that both libraries load both."""

import threading
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import rankless
from tests.helpers.pool import Ranks

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def llama() -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(config)


def gpt2() -> transformers.PreTrainedModel:
    torch.manual_seed(2)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    )


def t5() -> transformers.PreTrainedModel:
    torch.manual_seed(3)
    config = transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
    return transformers.T5ForConditionalGeneration(config)


CAUSAL = [llama, gpt2]


def same(model: torch.nn.Module, other: torch.nn.Module) -> bool:
    left, right = model.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("build", CAUSAL)
@pytest.mark.parametrize("size", ["5GB", "4KB"])
def test_from_pretrained_opens_the_folder_as_it_lies(tmp_path: Path, build, size: str) -> None:
    model = build()
    rankless.save_checkpoint(tmp_path, "s", model, max_shard_size=size)
    files = list((tmp_path / "s/model").glob("*.safetensors"))
    assert (len(files) == 1) == (size == "5GB")
    actual, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "s/model", output_loading_info=True)
    assert type(actual) is type(model)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert same(actual, model)


def save_sharded(path: str, build) -> None:
    model = build()
    for layer in [m for m in model.modules() if type(m).__name__ in {"LlamaDecoderLayer", "GPT2Block"}]:
        fully_shard(layer)
    fully_shard(model)
    rankless.save_checkpoint(path, "s", model)


@pytest.mark.parametrize("build", CAUSAL)
def test_so_it_does_when_ranks_have_sharded_the_model(ranks: Ranks, tmp_path: Path, build) -> None:
    ranks(2, save_sharded, str(tmp_path), build)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "s/model")
    assert type(loaded) is type(build())
    assert same(loaded, build())
    rankless.save_checkpoint(tmp_path / "plain", "s", build())
    for file in ("config.json", "generation_config.json", "model.safetensors"):
        assert (tmp_path / "s/model" / file).read_bytes() == (tmp_path / "plain/s/model" / file).read_bytes()


@pytest.mark.parametrize("build", [gpt2, t5])
def test_tied_weights_are_stored_once_under_the_name_transformers_keeps(tmp_path: Path, build) -> None:
    model = build()
    rankless.save_checkpoint(tmp_path, "s", model)
    model.save_pretrained(tmp_path / "theirs")
    ours = load_file(tmp_path / "s/model/model.safetensors")
    theirs = load_file(tmp_path / "theirs/model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    other = build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    rankless.load_checkpoint(tmp_path, model=other)
    assert same(model, other)
    assert other.get_output_embeddings().weight is other.get_input_embeddings().weight


@pytest.mark.parametrize("build", [llama, gpt2, t5])
@pytest.mark.parametrize("size", ["5GB", "4KB"])
def test_a_folder_of_save_pretrained_loads(tmp_path: Path, build, size: str) -> None:
    model = build()
    model.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    other = build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    result = rankless.restore(tmp_path / "theirs", model=other)
    assert same(model, other)
    assert not result.verified
    assert result.user_content is None


def load_sharded(path: str) -> bool:
    model = llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    fully_shard(model)
    rankless.load_checkpoint(path, model=model)
    expected = llama().state_dict()
    return all(torch.equal(value.full_tensor(), expected[name]) for name, value in model.state_dict().items())


def test_their_folder_loads_into_shards(ranks: Ranks, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path, max_shard_size="4KB")
    assert ranks(3, load_sharded, str(tmp_path)) == [True] * 3


def test_our_model_folder_loads_by_itself_and_is_verified(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", gpt2())
    other = gpt2()
    torch.nn.init.zeros_(other.transformer.wte.weight)
    assert rankless.restore(tmp_path / "s/model", model=other).verified
    assert same(other, gpt2())


def test_a_model_with_a_config_of_its_own_is_saved(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.config = {"lock": threading.Lock()}  # type: ignore[assignment]
    rankless.save_checkpoint(tmp_path, "s", model)
    assert not (tmp_path / "s/model/config.json").exists()
