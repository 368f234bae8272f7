"""Tests what ``convert --to megatron`` writes, with rankless's own reader and torch's.

``tests/peers/megatron`` loads the same with megatron-core.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

import rankless
from rankless.dcp.writer import dcp_files
from rankless.errors import CorruptCheckpointError, FormatError, InvalidArgumentError
from tests.helpers.cost import limit_cost
from tests.helpers.equality import equal_bits
from tests.helpers.megatron_configs import CONFIGS, build_model, fuse_tensors
from tests.helpers.megatron_models import EXPERTS, HIDDEN, LAYERS, VOCAB
from tests.helpers.pool import Ranks
from tests.helpers.processes import run_command
from tests.interop.megatron.conftest import NAMES, Fixture

pytestmark = pytest.mark.filterwarnings("ignore")

HF = {"layout": "hf"}

#: The names of norms in Megatron's modules, and in its checkpoints.
_NORMS = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}


def save_hf(path: Path, family: str) -> dict[str, Tensor]:
    """Save a model of transformers, and return its tensors as Megatron stores them."""
    model = build_model(family)
    model.save_pretrained(path)  # type: ignore[operator]
    return stored_names(fuse_tensors(model.state_dict()), family)


def stored_names(tensors: dict[str, Tensor], family: str) -> dict[str, Tensor]:
    stored = {}
    for name, tensor in tensors.items():
        own = name
        for module, key in _NORMS.items():
            if module == ".input_layernorm." or family not in {"mixtral", "qwen3_moe"}:
                own = own.replace(module, key)
        stored[own] = tensor
    if family in {"gpt2", "qwen2"}:
        stored.pop("output_layer.weight", None)
    return stored


def check_equal(path: Path, expected: dict[str, Tensor], prefix: str = "model/") -> None:
    opened = rankless.open(path)
    assert {name for name in opened if name.startswith(prefix)} == {prefix + name for name in expected}
    assert [name for name, tensor in expected.items() if not equal_bits(opened[prefix + name], tensor.data)] == []


@pytest.mark.parametrize("family", CONFIGS)
def test_a_folder_of_transformers(tmp_path: Path, family: str) -> None:
    expected = save_hf(tmp_path / "hf", family)
    out = rankless.convert(tmp_path / "hf", tmp_path / "out", to="megatron")
    check_equal(out, expected)
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "release"
    back = rankless.convert(out, tmp_path / "back", to="hf")
    first, second = rankless.open(tmp_path / "hf"), rankless.open(back)
    assert set(first) == set(second)
    assert all(equal_bits(first[name], second[name]) for name in first)
    args = rankless.open(out).values["user_content"]["args"]
    assert args.no_save_optim is args.no_save_rng is True


def train(model: torch.nn.Module) -> torch.optim.AdamW:
    """AdamW with one group after two steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "mixtral", "gpt_neox"])
def test_a_checkpoint_with_an_optimizer(tmp_path: Path, family: str) -> None:
    """The optimizer's states are placed as the weights are, whatever transformers calls these in memory."""
    model = build_model(family)
    optimizer = train(model)
    rankless.save_checkpoint(tmp_path / "run", "a", model, optimizer=optimizer, step=9)
    out = rankless.convert(tmp_path / "run", tmp_path / "out", to="megatron", vocab_divisible_by=64)
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "9"
    weights = stored_names(fuse_tensors(dict(model.named_parameters()), 64), family)
    check_equal(out, weights)
    opened = rankless.open(out)
    for state in ("exp_avg", "exp_avg_sq"):
        moments = {name: optimizer.state[parameter][state] for name, parameter in model.named_parameters()}
        for name, moment in stored_names(fuse_tensors(moments, 64), family).items():
            assert equal_bits(opened[f"optimizer/{name}/{state}"], moment), name
    assert all(opened[f"optimizer/{name}/step"] == 2.0 for name in weights)
    values = opened.values
    assert [(group["settings"]["wd_mult"], group["settings"]["lr"]) for group in values["optimizer"]["groups"]] == [
        (1.0, 0.01),
        (0.0, 0.01),
    ]
    assert values["user_content"]["iteration"] == values["user_content"]["args"].iteration == 9


@pytest.mark.parametrize("name", NAMES)
def test_what_megatron_wrote(open_fixture: Callable[[str], Fixture], tmp_path: Path, name: str) -> None:
    """Every form of the optimizer becomes ``fully_reshardable``, with all values, bit for bit."""
    fixture = open_fixture(name)
    out = rankless.convert(fixture.path, tmp_path / "out", to="megatron")
    check_equal(out, fixture.of_kind("master"))
    for keys in ({"weights": "model"}, {}):
        first, second = rankless.open(fixture.path, keys=keys), rankless.open(out, keys=keys)
        assert set(first) == set(second)
        assert all(equal_bits(first[key], second[key]) for key in first)
    before, after = first.values["user_content"], second.values["user_content"]
    states = [as_plain(list(content["rng_state"].values())) for content in (before, after)]
    assert states[0] == states[1]
    assert all(before[key] == after[key] for key in ("iteration", "opt_param_scheduler", "checkpoint_version"))
    changed = {"no_save_optim", "ckpt_format", "use_distributed_optimizer", "dist_ckpt_optim_fully_reshardable"}
    args = [
        {key: value for key, value in vars(content["args"]).items() if key not in changed}
        for content in (before, after)
    ]
    assert args[0] == args[1]
    assert vars(after["args"])["ckpt_format"] == "torch_dist"
    settings = [
        [{**group["settings"], "params": sorted(group["params"])} for group in opened.values["optimizer"]["groups"]]
        for opened in (first, second)
    ]
    assert settings[0] == settings[1]
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "30"


def as_plain(value: Any) -> Any:
    """A tree with lists in place of tensors and arrays, which conversions write as tensors."""
    if isinstance(value, dict):
        return {key: as_plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(inner) for inner in value]
    return value.tolist() if hasattr(value, "tolist") else value


def test_the_folder_is_as_megatron_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads the tensors, the chunks are small, and the modules have the states that Megatron asks for."""
    monkeypatch.setattr(dcp_files, "_CHUNK", 1024)
    save_hf(tmp_path / "hf", "mixtral")
    folder = rankless.convert(tmp_path / "hf", tmp_path / "out", to="megatron", max_shard_size=8192) / "release"
    assert json.loads((folder / "metadata.json").read_text()) == {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    metadata = FileSystemReader(folder).read_metadata()
    assert metadata.planner_data is None
    entries = metadata.state_dict_metadata
    experts = entries["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    assert experts.size == (LAYERS, EXPERTS, 96, HIDDEN)
    assert all(chunk.sizes.numel() * 4 <= 1024 for chunk in experts.chunks)
    assert sum(chunk.sizes.numel() for chunk in experts.chunks) == experts.size.numel()
    assert len(list(folder.glob("*.distcp"))) > 5
    tensors = {name: torch.zeros(entry.size) for name, entry in entries.items() if hasattr(entry, "size")}
    torch.distributed.checkpoint.load(tensors, checkpoint_id=folder, no_dist=True)
    expected = rankless.open(folder)
    rows = tensors["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    name = "model/decoder.layers.2.mlp.experts.local_experts.3.linear_fc1.weight"
    assert equal_bits(rows[2, 3], expected[name])
    for key in (
        f"decoder.layers.self_attention.linear_qkv._extra_state/shard_{LAYERS - 1}_{LAYERS}",
        f"decoder.layers.self_attention.core_attention._extra_state/shard_0_{LAYERS}",
        f"decoder.layers.mlp.experts.experts.linear_fc2._extra_state/shard_1.{EXPERTS - 1}_{LAYERS}.{EXPERTS}",
        "decoder.final_layernorm._extra_state/shard_0_1",
    ):
        assert key in entries


def test_padding_is_zero(tmp_path: Path) -> None:
    expected = save_hf(tmp_path / "hf", "llama")
    out = rankless.convert(tmp_path / "hf", tmp_path / "out", to="megatron", vocab_divisible_by=128)
    opened = rankless.open(out)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert equal_bits(opened[f"model/{name}"][:VOCAB], expected[name].data)
        assert opened[f"model/{name}"].shape == (128, HIDDEN)
        assert not opened[f"model/{name}"][VOCAB:].any()
    args = opened.values["user_content"]["args"]
    assert (args.vocab_size, args.padded_vocab_size, args.make_vocab_size_divisible_by) == (VOCAB, 128, 128)


def test_a_cast_keeps_the_masters(tmp_path: Path) -> None:
    model = build_model("llama")
    rankless.save_checkpoint(tmp_path / "run", "a", model, optimizer=train(model), step=1)
    out = rankless.convert(tmp_path / "run", tmp_path / "out", to="megatron", dtype="bfloat16")
    masters = stored_names(fuse_tensors(model.state_dict()), "llama")
    check_equal(out, masters)
    weights = rankless.open(out, keys={"weights": "model"})
    assert all(equal_bits(weights[f"model/{name}"], tensor.data.bfloat16()) for name, tensor in masters.items())
    assert weights.values["user_content"]["args"].bf16 is True


def test_ranks_share_the_work(ranks: Ranks, tmp_path: Path) -> None:
    expected = save_hf(tmp_path / "hf", "gpt2")
    ranks(2, rankless_convert, str(tmp_path / "hf"), str(tmp_path / "out"))
    check_equal(tmp_path / "out", expected)


def rankless_convert(source: str, out: str) -> None:
    rankless.convert(source, out, to="megatron")


def test_the_command(tmp_path: Path) -> None:
    expected = save_hf(tmp_path / "hf", "llama")
    shutil.move(tmp_path / "hf/config.json", tmp_path / "config.json")
    arguments = ["convert", str(tmp_path / "hf"), str(tmp_path / "out"), "--to", "megatron"]
    failed = run_command(*arguments)
    assert failed.returncode == 2
    assert "--config" in failed.stderr
    options = ["--config", str(tmp_path / "config.json"), "--consumed-samples", "40", "--vocab-divisible-by", "4"]
    assert run_command(*arguments, *options).returncode == 0
    check_equal(tmp_path / "out", expected)
    assert rankless.open(tmp_path / "out").values["user_content"]["args"].consumed_train_samples == 40


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_corrupt_source(tmp_path: Path, family: str) -> None:
    """Blocks of matrices that are transposed are verified as well."""
    model = build_model(family)
    rankless.save_checkpoint(tmp_path / "run", "a", model)
    file = next((tmp_path / "run/a/model").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"does not match|do not match"):
        rankless.convert(tmp_path / "run", tmp_path / "out", to="megatron")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "bert"}, "models of the type 'bert' cannot be written"),
        ({"num_hidden_layers": 4}, "4 equal layers"),
        ({"num_attention_heads": 8}, "'model.layers.0.self_attn.q_proj.weight'|should have"),
        ({"vocab_size": 61}, "'model.embed_tokens.weight' has the shape"),
        ({"tie_word_embeddings": True}, "no place for 'lm_head.weight'"),
        ({"model_type": "qwen3"}, "q_layernorm"),
        ({"hidden_size": "32"}, "hidden_size as a positive integer"),
        ({"num_hidden_layers": 10**9}, "a model of 1000000000 layers has more tensors than"),
    ],
)
def test_other_configurations_are_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    save_hf(tmp_path / "hf", "llama")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps({**config, **changed}))
    with limit_cost(memory=True), pytest.raises(FormatError, match=message):
        rankless.convert(tmp_path / "hf", tmp_path / "out", to="megatron")


def test_a_parallel_residual_is_refused(tmp_path: Path) -> None:
    save_hf(tmp_path / "hf", "gpt_neox")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps({**config, "use_parallel_residual": True}))
    with pytest.raises(FormatError, match="use_parallel_residual"):
        rankless.convert(tmp_path / "hf", tmp_path / "out", to="megatron")


def save_named(path: Path, tensors: dict[str, Tensor]) -> Path:
    torch.save({"model": tensors}, path)
    return path


def test_tensors_without_a_place_are_named(tmp_path: Path) -> None:
    model = build_model("llama")
    tensors = {**model.state_dict(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    source = save_named(tmp_path / "c.pt", tensors)
    model.config.save_pretrained(tmp_path)  # type: ignore[union-attr, operator]
    with pytest.raises(FormatError, match=r"no place for 'model.layers.0.self_attn.rotary_emb.inv_freq'.*--exclude"):
        rankless.convert(source, tmp_path / "out", to="megatron", config=str(tmp_path))
    out = rankless.convert(source, tmp_path / "out", to="megatron", config=str(tmp_path), exclude="*inv_freq")
    check_equal(out, stored_names(fuse_tensors(model.state_dict()), "llama"))


def test_megatrons_names_are_checked(tmp_path: Path) -> None:
    tensors = {f"decoder.layers.{n}.mlp.linear_fc1.weight": torch.ones(4, 2) for n in (0, 2)}
    with pytest.raises(FormatError, match="no complete model"):
        rankless.convert(save_named(tmp_path / "a.pt", tensors), tmp_path / "out", to="megatron")
    tensors = {"decoder.layers.0.mlp.linear_fc1.weight": torch.ones(4, 2), "mtp.w": torch.ones(1)}
    with pytest.raises(FormatError, match=r"'mtp.w' has no place in a GPT"):
        rankless.convert(save_named(tmp_path / "b.pt", tensors), tmp_path / "out", to="megatron")


def test_layers_that_differ_are_not_stacked(tmp_path: Path) -> None:
    tensors = {f"decoder.layers.{n}.mlp.linear_fc1.weight": torch.full((4 + n, 2), float(n)) for n in (0, 1)}
    out = rankless.convert(save_named(tmp_path / "a.pt", tensors), tmp_path / "out", to="megatron")
    check_equal(out, tensors)
    metadata = FileSystemReader(out / "release").read_metadata()
    assert "decoder.layers.1.mlp.linear_fc1.weight" in metadata.state_dict_metadata
    content = rankless.open(out).values["user_content"]["content_metadata"]
    assert content["non_homogeneous_layers"] is True


def test_parts_of_other_dtypes_are_named(tmp_path: Path) -> None:
    model = build_model("llama")
    model.model.layers[1].self_attn.k_proj.half()  # type: ignore[union-attr, index]
    model.save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    with pytest.raises(FormatError, match=r"k_proj.weight' F16, and Megatron has them in one tensor"):
        rankless.convert(tmp_path / "hf", tmp_path / "out", to="megatron")
    assert rankless.convert(tmp_path / "hf", tmp_path / "out", to="megatron", dtype="bfloat16").exists()


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def amsgrad(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), amsgrad=True)


def two_rates(model: torch.nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    return torch.optim.AdamW([{"params": [first], "lr": 0.5}, {"params": others}], lr=0.1)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (sgd, "has the state 'momentum_buffer' of"),
        (amsgrad, "has the state 'max_exp_avg_sq' of"),
        (two_rates, "has lr 0.5 and .* has 0.1"),
    ],
)
def test_other_optimizers_are_refused(
    tmp_path: Path, build: Callable[..., torch.optim.Optimizer], message: str
) -> None:
    model = build_model("llama")
    optimizer = build(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    rankless.save_checkpoint(tmp_path / "run", "a", model, optimizer=optimizer)
    with pytest.raises(FormatError, match=f"{message}.*--model-only"):
        rankless.convert(tmp_path / "run", tmp_path / "out", to="megatron")
    assert rankless.convert(tmp_path / "run", tmp_path / "out", to="megatron", model_only=True).exists()


def test_parameters_that_are_trained_in_part_are_refused(tmp_path: Path) -> None:
    model = build_model("llama")
    model.model.layers[1].mlp.gate_proj.weight.requires_grad_(False)  # type: ignore[union-attr, index]
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    rankless.save_checkpoint(tmp_path / "run", "a", model, optimizer=optimizer)
    with pytest.raises(FormatError, match=r"no exp_avg of 'model.layers.1.mlp.gate_proj.weight'"):
        rankless.convert(tmp_path / "run", tmp_path / "out", to="megatron")


def test_options_are_checked(tmp_path: Path) -> None:
    save_hf(tmp_path / "hf", "llama")
    for options, message in (
        ({"vocab_divisible_by": 0}, "vocab_divisible_by must be a whole number of at least 1"),
        ({"consumed_samples": -1}, "consumed_samples must be"),
        ({"expert_parallel": 1}, "expert_parallel must be True or False"),
        ({"tp_size": 2}, "has no options tp_size"),
        ({"config": str(tmp_path / "none")}, "none"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            rankless.convert(tmp_path / "hf", tmp_path / "out", to="megatron", **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="has no options vocab_divisible_by"):
        rankless.convert(tmp_path / "hf", tmp_path / "out", to="hf", vocab_divisible_by=8)
