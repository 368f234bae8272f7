"""Tests of folders of NeMo 2 and Megatron-Bridge: the same tensors, with the model's arguments in files of YAML."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

import holdfast
from holdfast.errors import CorruptCheckpointError, FormatError
from tests.helpers.commands import run_command
from tests.helpers.equality import equal_bits
from tests.helpers.megatron_models import ARGS, GROUP_SETTINGS, build_tensors, stack_tensors
from tests.helpers.megatron_runs import build_module, build_optimizer, gather_tensors

pytestmark = pytest.mark.filterwarnings("ignore")

MASTERS = build_tensors(ARGS["qwen3"])
STATES = {"param": MASTERS, "exp_avg": build_tensors(ARGS["qwen3"], 1), "exp_avg_sq": build_tensors(ARGS["qwen3"], 2)}

#: The configuration of the model, as both write it: with Python's names, which are never imported.
MODEL = """\
  _target_: {target}
  activation_func:
    _call_: false
    _target_: torch.nn.functional.silu
  add_bias_linear: false
  add_qkv_bias: false
  ffn_hidden_size: 48
  gated_linear_unit: true
  hidden_size: 32
  init_method: !!python/object/apply:os.system ['touch {mark}']
  kv_channels: 8
  layernorm_zero_centered_gamma: false
  normalization: RMSNorm
  num_attention_heads: 4
  num_layers: 3
  num_moe_experts: null
  num_query_groups: 2
  params_dtype:
    _call_: false
    _target_: torch.bfloat16
  position_embedding_type: rope
  qk_layernorm: true
  rotary_percent: 1.0
  share_embeddings_and_output_weights: false
  vocab_size: 60
"""


def save_folder(folder: Path, prefix: str, common: Mapping[str, Any]) -> Path:
    """Write an iteration of ``torch_dist``."""
    entries: dict[str, Any] = {f"{prefix}{key}": tensor for key, tensor in stack_tensors(MASTERS).items()}
    for state, tensors in STATES.items():
        entries |= {f"optimizer.state.{state}.{prefix}{key}": own for key, own in stack_tensors(tensors).items()}
    dcp.save(entries, checkpoint_id=folder, planner=DefaultSavePlanner(flatten_state_dict=False), no_dist=True)
    torch.save(dict(common), folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return folder


OPTIMIZER = {"param_state_sharding_type": "fully_reshardable", "optimizer": {"param_groups": GROUP_SETTINGS}}


def save_nemo(folder: Path, model: str = MODEL) -> Path:
    common = {"global_step": 7, "epoch": 0, "state_dict": {}, "optimizer": [OPTIMIZER], "optimizer_states": {}}
    save_folder(folder / "weights", "module.", common)
    (folder / "context").mkdir()
    text = model.format(target="nemo.collections.llm.gpt.model.llama.Llama3Config", mark=folder / "executed")
    (folder / "context/model.yaml").write_text(f"_target_: nemo.collections.llm.LlamaModel\nconfig:\n{text}")
    (folder / "context/io.json").write_text("{}")
    return folder


def save_bridge(folder: Path, model: str = MODEL) -> Path:
    iteration = folder / "iter_0000007"
    save_folder(iteration, "", {"iteration": 7, "checkpoint_version": 3.0, "optimizer": OPTIMIZER})
    text = model.format(target="megatron.bridge.models.qwen.Qwen3ModelProvider", mark=folder / "executed")
    (iteration / "run_config.yaml").write_text(f"checkpoint:\n  save_optim: true\nmodel:\n{text}")
    state = {"step": torch.tensor(7), "consumed_train_samples": torch.tensor(56), "do_train": torch.tensor(True)}
    torch.save(state, iteration / "train_state.pt")
    torch.save(state, folder / "latest_train_state.pt")
    return folder


SAVES = {"nemo": save_nemo, "bridge": save_bridge}


@pytest.mark.parametrize("name", SAVES)
def test_a_training_resumes(tmp_path: Path, name: str) -> None:
    run = SAVES[name](tmp_path / "run")
    opened = holdfast.open(run)
    assert opened.format == "megatron"
    assert all(equal_bits(opened[f"model/{key}"], tensor) for key, tensor in MASTERS.items())
    module = build_module({key: tuple(tensor.shape) for key, tensor in MASTERS.items()})
    optimizer = build_optimizer(module)
    content = holdfast.load_checkpoint(run, model=module, optimizer=optimizer)
    tensors = gather_tensors(module, optimizer)
    for state, expected in STATES.items():
        kind = "master" if state == "param" else state
        assert all(equal_bits(tensors[f"{kind}/{key}"], tensor) for key, tensor in expected.items())
    if name == "bridge":
        assert content["train_state"]["consumed_train_samples"] == 56
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert holdfast.open(holdfast.convert(run, tmp_path / "run2/native", to="native")).step == 7


@pytest.mark.parametrize("name", SAVES)
def test_the_names_of_transformers(tmp_path: Path, name: str) -> None:
    """The family is that of the configuration, and nothing that it names is run."""
    run = SAVES[name](tmp_path / "run")
    opened = holdfast.open(holdfast.convert(run, tmp_path / "hf", to="hf"))
    embedding = MASTERS["embedding.word_embeddings.weight"]
    assert equal_bits(opened["model/model.embed_tokens.weight"], embedding[:60])
    assert "model/model.layers.2.self_attn.q_norm.weight" in opened.keys()
    gate, _ = MASTERS["decoder.layers.1.mlp.linear_fc1.weight"].chunk(2)
    assert equal_bits(opened["model/model.layers.1.mlp.gate_proj.weight"], gate)
    assert not (run / "executed").exists()


@pytest.mark.parametrize("name", SAVES)
def test_paths_inside_of_a_folder(tmp_path: Path, name: str) -> None:
    run = SAVES[name](tmp_path / "run")
    inner = run / ("weights" if name == "nemo" else "iter_0000007")
    assert holdfast.open(inner, keys={"layout": "hf"}).format == "megatron"
    assert run_command("verify", str(run)).returncode == 0


CHANGES = {
    "another activation": ("torch.nn.functional.silu", "nemo.fusions.fast_gelu", r"activation_func is set.*is none of"),
    "latent attention": ("qk_layernorm: true", "multi_latent_attention: true", r"multi_latent_attention is set"),
    "no size": ("  num_attention_heads: 4\n", "", r"model\.yaml: args must have num_attention_heads"),
    "no YAML": ("  num_layers: 3\n", "  num_layers: 3: [\n", r"model\.yaml is not valid YAML"),
    "an alias": ("  num_layers: 3\n", "  num_layers: *other\n", r"model\.yaml is not valid YAML"),
    "a deep list": ("num_layers: 3", f"num_layers: {'[' * 4000}{']' * 4000}", r"is not valid YAML"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_configurations_that_fit_no_family(tmp_path: Path, change: str) -> None:
    """They are refused with the names of transformers, by name and with what to do, and readable with Megatron's."""
    old, new, message = CHANGES[change]
    assert old in MODEL
    run = save_nemo(tmp_path / "run", MODEL.replace(old, new))
    with pytest.raises(FormatError, match=message) as caught:
        holdfast.open(run, keys={"layout": "hf"})
    assert "--layout megatron" in str(caught.value) or "YAML" in str(caught.value)
    assert len(holdfast.open(run).keys()) == 4 * len(MASTERS)


def test_without_a_configuration_or_pyyaml(tmp_path: Path) -> None:
    run = save_nemo(tmp_path / "run")
    with mock.patch.dict(sys.modules, {"yaml": None}), pytest.raises(FormatError, match="pip install pyyaml"):
        holdfast.open(run, keys={"layout": "hf"})
    shutil.rmtree(run / "context")
    with pytest.raises(FormatError, match=r"has no args.*--layout megatron"):
        holdfast.open(run, keys={"layout": "hf"})
    assert holdfast.open(run).format == "megatron"


def test_a_state_that_is_none(tmp_path: Path) -> None:
    run = save_bridge(tmp_path / "run")
    torch.save({"step": torch.ones(3)}, run / "latest_train_state.pt")
    with pytest.raises(CorruptCheckpointError, match="must hold the step of the training"):
        holdfast.open(run)
