"""Tests that transformers opens directories of save_model, and load_model those of save_pretrained.

The oracle is the model's output: the loaded model gives the logits of the saved one.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import rankless
from tests.helpers.pool import Ranks

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

TINY = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    )


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**TINY, num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=2)
    )


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
    )


BUILDS: list[Callable[[], nn.Module]] = [llama, gpt2, mixtral, t5]
LAYOUTS = [("plain", 1), ("fsdp", 4), ("tp", 4)]


def built(build: Callable[[], nn.Module], dtype: torch.dtype, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return build().to(dtype).eval()


def wrapped(model: nn.Module, layout: str) -> nn.Module:
    if layout == "fsdp":
        for module in [m for m in model.modules() if type(m).__name__ in {"LlamaDecoderLayer", "MixtralDecoderLayer"}]:
            fully_shard(module)
        return fully_shard(model)
    if layout == "tp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        cut: dict[int, nn.Parameter] = {}
        for number, (path, tensor) in enumerate(list(model.named_parameters(remove_duplicate=False))):
            placed = distribute_tensor(tensor.detach(), mesh, [Shard(number % tensor.ndim)], src_data_rank=None)
            owner, _, name = path.rpartition(".")
            setattr(model.get_submodule(owner), name, cut.setdefault(id(tensor), nn.Parameter(placed)))
    return model


def whole(model: nn.Module, build: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """A plain model with the values of a sharded one."""
    plain = built(build, dtype, seed=2)
    for name, tensor in model.state_dict().items():
        plain.state_dict()[name].copy_(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
    return plain


def logits(model: nn.Module) -> torch.Tensor:
    tokens = torch.arange(5)[None]
    with torch.no_grad():
        if isinstance(model, transformers.T5ForConditionalGeneration):
            return model(tokens, decoder_input_ids=tokens).logits
        return model(tokens).logits


def save(path: str, layout: str, build: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    rankless.save_model(wrapped(built(build, dtype), layout), path, shard=True, max_shard_size=4194)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("layout", "n"), LAYOUTS)
def test_from_pretrained_opens_what_save_model_writes(
    ranks: Ranks, tmp_path: Path, build: Callable[[], nn.Module], dtype: torch.dtype, layout: str, n: int
) -> None:
    ranks(n, save, str(tmp_path / "m"), layout, build, dtype)
    expected = built(build, dtype)
    actual, info = type(expected).from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert actual.dtype == dtype
    assert torch.equal(logits(actual.eval()), logits(expected))
    expected.save_pretrained(tmp_path / "theirs")
    with safe_open(tmp_path / "theirs/model.safetensors", "pt") as theirs:
        names = {name for file in (tmp_path / "m").glob("*.safetensors") for name in load_file(file)}
        assert names == set(theirs.keys())


def load(path: str, layout: str, build: Callable[[], nn.Module], dtype: torch.dtype) -> torch.Tensor:
    model = wrapped(built(build, dtype, seed=7), layout)
    rankless.load_model(model, path)
    return logits(whole(model, build, dtype))


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("layout", "n"), LAYOUTS)
def test_load_model_takes_what_save_pretrained_writes(
    ranks: Ranks, tmp_path: Path, build: Callable[[], nn.Module], dtype: torch.dtype, layout: str, n: int
) -> None:
    expected = built(build, dtype)
    expected.save_pretrained(tmp_path, max_shard_size="4KB")
    for result in ranks(n, load, str(tmp_path), layout, build, dtype):
        assert torch.equal(result, logits(expected))


@pytest.mark.parametrize("build", BUILDS)
def test_so_it_does_with_files_of_torch_save(ranks: Ranks, tmp_path: Path, build: Callable[[], nn.Module]) -> None:
    expected = built(build, torch.float32)
    rankless.save_model(expected, tmp_path / "m", shard=True, max_shard_size=4194, use_safetensors=False)
    loaded = type(expected).from_pretrained(tmp_path / "m")
    assert torch.equal(logits(loaded.eval()), logits(expected))
    other = built(build, torch.float32, seed=7)
    rankless.load_model(other, tmp_path / "m")
    assert torch.equal(logits(other), logits(expected))


def llava() -> nn.Module:
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=vision, text_config=transformers.LlamaConfig(**TINY))
    )


def dinov2() -> nn.Module:
    return transformers.Dinov2ForImageClassification(
        transformers.Dinov2Config(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4, num_labels=3
        )
    )


RENAMED: list[Callable[[], nn.Module]] = [llava, dinov2]


def shard_all(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A model whose parts are sharded, so that each class that transformers knows is another one."""
    model = built(build, torch.float32, seed)
    parts = [part for part in model.modules() if isinstance(part, transformers.PreTrainedModel) and part is not model]
    for part in reversed(parts):
        fully_shard(part)
    return fully_shard(model)


def save_and_load_renamed(folder: str, build: Callable[[], nn.Module]) -> dict[str, torch.Tensor]:
    sharded = shard_all(build, 1)
    rankless.save_model(sharded, f"{folder}/ours", shard=True)
    other = shard_all(build, 2)
    rankless.load_model(other, f"{folder}/theirs")
    return {name: tensor.full_tensor() for name, tensor in other.state_dict().items()}


@pytest.mark.parametrize("build", RENAMED)
def test_fsdp2_keeps_the_names_on_disk(ranks: Ranks, tmp_path: Path, build: Callable[[], nn.Module]) -> None:
    expected = built(build, torch.float32)
    expected.save_pretrained(tmp_path / "theirs")
    loaded = ranks(2, save_and_load_renamed, str(tmp_path), build)[0]
    assert loaded.keys() == expected.state_dict().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.state_dict().items())
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_a_model_with_a_part_called_prompt_encoder_has_a_configuration(tmp_path: Path) -> None:
    vision = transformers.SamVisionConfig(
        hidden_size=16, output_channels=8, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=4
    )
    prompts = transformers.SamPromptEncoderConfig(hidden_size=8, image_size=16, patch_size=4)
    decoder = transformers.SamMaskDecoderConfig(
        hidden_size=8, mlp_dim=8, num_attention_heads=2, iou_head_hidden_dim=8, num_hidden_layers=1
    )
    model = transformers.SamModel(
        transformers.SamConfig(vision_config=vision, prompt_encoder_config=prompts, mask_decoder_config=decoder)
    )
    rankless.save_model(model, tmp_path / "m", shard=True)
    reopened, info = transformers.SamModel.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not info["missing_keys"]
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in reopened.state_dict().items())


def marian() -> nn.Module:
    return transformers.MarianMTModel(
        transformers.MarianConfig(
            vocab_size=64,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            pad_token_id=63,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            max_position_embeddings=32,
            decoder_start_token_id=63,
        )
    )


def test_tensors_that_transformers_does_not_store_are_neither_stored_nor_required(tmp_path: Path) -> None:
    model, positions = marian(), "model.encoder.embed_positions.weight"
    model.save_pretrained(tmp_path / "theirs")
    rankless.save_model(model, tmp_path / "ours", shard=True)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert positions not in ours
    for folder in ("ours", "theirs"):
        other = built(marian, torch.float32, seed=2)
        rankless.load_model(other, tmp_path / folder)
        assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_what_is_missing_beside_them_is_an_error(tmp_path: Path) -> None:
    tensors = marian().state_dict()
    del tensors["model.encoder.layers.0.fc1.weight"], tensors["final_logits_bias"]
    torch.save(tensors, tmp_path / "a.pt")
    with pytest.raises(rankless.MismatchError, match=r"layers\.0\.fc1\.weight") as error:
        rankless.load_model(marian(), tmp_path / "a.pt")
    assert "final_logits_bias" not in str(error.value)


@pytest.mark.parametrize("name", ["diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors"])
def test_a_folder_of_diffusers_is_a_checkpoint(tmp_path: Path, name: str) -> None:
    model, other = nn.Linear(2, 3), nn.Linear(2, 3)
    save_file(model.state_dict(), tmp_path / name)
    rankless.load_model(other, tmp_path)
    assert torch.equal(model.weight, other.weight)


def test_a_folder_of_diffusers_may_have_an_index(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 3), nn.Linear(2, 3)
    stem = "diffusion_pytorch_model"
    files = {name: f"{stem}-0000{number}-of-00002.safetensors" for number, name in enumerate(model.state_dict(), 1)}
    for name, file in files.items():
        save_file({name: model.state_dict()[name]}, tmp_path / file)
    index = {"metadata": {"total_size": 36}, "weight_map": files}
    (tmp_path / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    rankless.load_model(other, tmp_path)
    assert torch.equal(model.weight, other.weight)


def test_a_flipped_bit_in_any_part_of_a_joined_tensor_is_found(tmp_path: Path) -> None:
    """The files of NomicBERT have queries, keys and values as one tensor."""
    config = transformers.NomicBertConfig(**TINY)
    model = transformers.NomicBertModel(config)
    rankless.save_model(model, tmp_path, shard=True)
    file = tmp_path / "model.safetensors"
    intact = file.read_bytes()
    start = 8 + int.from_bytes(intact[:8], "little")
    begin, end = json.loads(intact[8:start])["encoder.layers.0.attn.Wqkv.weight"]["data_offsets"]
    for part in range(3):
        damaged = bytearray(intact)
        damaged[start + begin + (end - begin) * part // 3] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(rankless.CorruptCheckpointError, match="Wqkv"):
            rankless.load_model(transformers.NomicBertModel(config), tmp_path)
