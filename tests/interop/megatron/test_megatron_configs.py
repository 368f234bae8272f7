"""Tests of folders of NeMo 2 and Megatron-Bridge: the same tensors, with the model's arguments in files of YAML."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import rankless
from rankless.errors import CorruptCheckpointError, FormatError
from tests.helpers.equality import equal_bits
from tests.helpers.megatron_folders import MASTERS, MODEL, STATES, save_bridge, save_fsdp, save_nemo
from tests.helpers.megatron_runs import build_module, build_optimizer, gather_tensors
from tests.helpers.processes import run_command

pytest.importorskip("yaml")

pytestmark = pytest.mark.filterwarnings("ignore")

SAVES = {"nemo": save_nemo, "bridge": save_bridge}


@pytest.mark.parametrize("name", SAVES)
def test_a_training_resumes(tmp_path: Path, name: str) -> None:
    run = SAVES[name](tmp_path / "run")
    opened = rankless.open(run)
    assert opened.format == "megatron"
    assert all(equal_bits(opened[f"model/{key}"], tensor) for key, tensor in MASTERS.items())
    module = build_module({key: tuple(tensor.shape) for key, tensor in MASTERS.items()})
    optimizer = build_optimizer(module)
    content = rankless.load_checkpoint(run, model=module, optimizer=optimizer)
    tensors = gather_tensors(module, optimizer)
    for state, expected in STATES.items():
        kind = "master" if state == "param" else state
        assert all(equal_bits(tensors[f"{kind}/{key}"], tensor) for key, tensor in expected.items())
    if name == "bridge":
        assert content["train_state"]["consumed_train_samples"] == 56
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert rankless.open(rankless.convert(run, tmp_path / "run2/native", to="native")).step == 7


@pytest.mark.parametrize("name", SAVES)
def test_the_names_of_transformers(tmp_path: Path, name: str) -> None:
    """The family is that of the configuration, and nothing that it names is run."""
    run = SAVES[name](tmp_path / "run")
    opened = rankless.open(rankless.convert(run, tmp_path / "hf", to="hf"))
    embedding = MASTERS["embedding.word_embeddings.weight"]
    assert equal_bits(opened["model/model.embed_tokens.weight"], embedding[:60])
    assert "model/model.layers.2.self_attn.q_norm.weight" in opened
    gate, _ = MASTERS["decoder.layers.1.mlp.linear_fc1.weight"].chunk(2)
    assert equal_bits(opened["model/model.layers.1.mlp.gate_proj.weight"], gate)
    assert not (run / "executed").exists()


@pytest.mark.parametrize("name", SAVES)
def test_paths_inside_of_a_folder(tmp_path: Path, name: str) -> None:
    run = SAVES[name](tmp_path / "run")
    inner = run / ("weights" if name == "nemo" else "iter_0000007")
    assert rankless.open(inner, keys={"layout": "hf"}).format == "megatron"
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
        rankless.open(run, keys={"layout": "hf"})
    assert "--layout megatron" in str(caught.value) or "YAML" in str(caught.value)
    assert len(rankless.open(run).keys()) == 4 * len(MASTERS)


def test_without_a_configuration_or_pyyaml(tmp_path: Path) -> None:
    run = save_nemo(tmp_path / "run")
    with mock.patch.dict(sys.modules, {"yaml": None}), pytest.raises(FormatError, match="pip install pyyaml"):
        rankless.open(run, keys={"layout": "hf"})
    shutil.rmtree(run / "context")
    with pytest.raises(FormatError, match=r"has no args.*--layout megatron"):
        rankless.open(run, keys={"layout": "hf"})
    assert rankless.open(run).format == "megatron"


def test_a_folder_of_megatron_fsdp(tmp_path: Path) -> None:
    opened = rankless.open(save_fsdp(tmp_path / "iter_0000007"))
    assert all(equal_bits(opened[f"model/{key}"], tensor) for key, tensor in MASTERS.items())
    assert all(equal_bits(opened[f"optimizer/{key}/exp_avg"], tensor) for key, tensor in STATES["exp_avg"].items())


def test_a_state_that_is_none(tmp_path: Path) -> None:
    run = save_bridge(tmp_path / "run")
    torch.save({"step": torch.ones(3)}, run / "latest_train_state.pt")
    with pytest.raises(CorruptCheckpointError, match="must hold the step of the training"):
        rankless.open(run)
