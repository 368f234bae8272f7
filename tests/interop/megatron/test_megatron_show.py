"""Tests that ``show`` names the family of a checkpoint of Megatron, where it is known from, and the layouts it has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import rankless
from tests.helpers.equality import equal_bits
from tests.helpers.megatron_configs import build_model
from tests.helpers.megatron_folders import MODEL, save_bridge, save_nemo
from tests.helpers.megatron_models import ARGS, build_tensors, save_torch_dist
from tests.helpers.processes import run_command

pytestmark = pytest.mark.filterwarnings("ignore")


def show_family(path: Path, *options: str) -> str:
    family = json.loads(run_command("show", str(path), "--json", *options).stdout)["family"]
    text = " ".join(run_command("show", str(path), *options).stdout.split())
    assert f"family {family}" in text
    return str(family)


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral", "gpt2"])
def test_a_family_by_args(tmp_path: Path, family: str) -> None:
    path = save_torch_dist(tmp_path / "iter_0000007", build_tensors(ARGS[family]), ARGS[family])
    assert show_family(path) == f"{family}, by args; --layout hf gives the names of transformers"


def test_a_family_by_a_configuration(tmp_path: Path) -> None:
    assert show_family(save_nemo(tmp_path / "nemo")).startswith("qwen3, by model.yaml; --layout hf")
    assert show_family(save_bridge(tmp_path / "bridge")).startswith("qwen3, by run_config.yaml; --layout hf")


def test_an_unknown_family(tmp_path: Path) -> None:
    """The reason is in the text. It wraps, so the JSON is compared."""
    args = {**ARGS["llama"], "multi_latent_attention": True}
    path = save_torch_dist(tmp_path / "iter_0000007", build_tensors(ARGS["llama"]), args)
    family = json.loads(run_command("show", str(path), "--json").stdout)["family"]
    assert family.startswith("unknown, so there are Megatron's names only")
    assert "multi_latent_attention is set" in family
    run = save_nemo(tmp_path / "nemo", MODEL.replace("  num_layers: 3\n", ""))
    assert "num_layers" in json.loads(run_command("show", str(run), "--json").stdout)["family"]


def test_the_output_layer_of_gpt_neox(tmp_path: Path) -> None:
    """Files of transformers call it ``embed_out``, and models of transformers 5 ``lm_head``: both get the tensor."""
    tensors = build_tensors(ARGS["gpt_neox"])
    path = save_torch_dist(tmp_path / "iter_0000007", tensors, ARGS["gpt_neox"])
    output = tensors["output_layer.weight"][:60]
    opened = rankless.open(rankless.convert(path, tmp_path / "hf", to="hf"))
    assert equal_bits(opened["model/embed_out.weight"], output)
    model = build_model("gpt_neox")
    rankless.load_checkpoint(path, model=model, keys={"layout": "hf"})
    parameters = dict(model.named_parameters())
    assert torch.equal(parameters["lm_head.weight"], output)
    rankless.save_checkpoint(tmp_path / "run", "step_1", model)
    model.config.save_pretrained(tmp_path / "config")  # type: ignore[operator, union-attr]
    back = rankless.convert(tmp_path / "run", tmp_path / "back", to="megatron", config=str(tmp_path / "config"))
    assert equal_bits(rankless.open(back)["model/output_layer.weight"][:60], output)
