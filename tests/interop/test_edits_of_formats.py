"""Edits of checkpoints that other systems wrote, and edits written in their formats.

An edit of a foreign checkpoint is the edit of the same checkpoint in rankless's format. An edit written in a foreign
format is the conversion of the edit in rankless's format.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import rankless
from rankless.errors import RanklessError
from tests.helpers.equality import equal_bits

#: The checkpoints in each archive: of DeepSpeed, Megatron-LM, Accelerate, the Trainer and Lightning.
ARCHIVES = {
    "deepspeed/deepspeed.tar.xz": ("moe_w2_ep2_z1_fp32/ckpt", "pipe_p2_d2_z1_bf16/ckpt"),
    "megatron/megatron.tar.xz": ("full_tp2_pp2_bf16_mcore19/ckpt", "legacy_tp2_pp1_dp1_bf16_mcore16/ckpt"),
    "megatron/fsdp_dtensor.tar.xz": ("fsdp_tp2_dp2_bf16_mcore16/ckpt",),
    "accelerate/checkpoints.tar.xz": ("acc_ds_z2_w2/ckpt", "acc_fsdp2_w2/ckpt", "acc_plain_w1/ckpt"),
    "lightning/lightning.tar.xz": ("ddp-adamw.ckpt", "fsdp2-adamw.ckpt"),
}
CASES = [(archive, name) for archive, names in ARCHIVES.items() for name in names]

EDITS = ["rename ^=net.", "cast bfloat16", "layers keep=0", "freeze *"]

#: The formats that edits are written in, and the edits.
TARGETS = ["hf", "safetensors", "torch", "lightning", "lightning-folder", "dcp", "megatron", "deepspeed-universal"]

#: The configuration of the model of the Trainer.
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 28,
    "vocab_size": 61,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("others")
    for archive in ARCHIVES:
        with tarfile.open(Path(__file__).parent / archive) as opened:
            opened.extractall(path / archive, filter="data")
    return path


def contents(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {
        f"{file.parent.relative_to(checkpoint)}/{name}": tensor
        for file in sorted(checkpoint.rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def outcome(source: Path, output: Path, edit: str) -> dict[str, torch.Tensor] | type[Exception]:
    try:
        return contents(rankless.edit(source, output, [edit]))
    except RanklessError as error:
        assert not output.exists()
        return type(error)


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize(("archive", "name"), CASES)
def test_an_edit_of_another_format(folder: Path, tmp_path: Path, archive: str, name: str, edit: str) -> None:
    source = folder / archive / name
    converted = rankless.convert(source, tmp_path / "converted", to="native")
    direct, expected = (outcome(path, tmp_path / f"{path.name}-edited", edit) for path in (source, converted))
    if isinstance(direct, type) or isinstance(expected, type):
        assert direct == expected
        return
    assert direct.keys() == expected.keys()
    assert all(equal_bits(tensor, expected[key]) for key, tensor in direct.items())


@pytest.mark.parametrize("to", TARGETS)
def test_an_edit_into_another_format(folder: Path, tmp_path: Path, to: str) -> None:
    source = tmp_path / "source"
    shutil.copytree(folder / "accelerate/checkpoints.tar.xz/trainer_fsdp2_w2/ckpt", source)
    (source / "config.json").write_text(json.dumps(CONFIG))  # the writer for Megatron-LM needs the numbers of heads
    edits = ["layers order=1,0,1", "resize-vocab 68 rows=zeros"]
    native = rankless.edit(source, tmp_path / "native", edits)
    made = rankless.edit(source, tmp_path / "made.ckpt", edits, to=to)
    expected = rankless.convert(native, tmp_path / "expected.ckpt", to=to)
    read = [rankless.convert(path, tmp_path / f"{path.name}-read", to="native") for path in (made, expected)]
    direct, converted = map(contents, read)
    assert direct.keys() == converted.keys()
    assert all(equal_bits(tensor, converted[key]) for key, tensor in direct.items())
    assert (read[0] / "state.json").read_bytes() == (read[1] / "state.json").read_bytes()
    assert "model.layers.2.mlp.up_proj.weight" in str(direct.keys()) or to == "megatron"
