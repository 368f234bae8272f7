"""Tests that what Megatron-FSDP of megatron-core 0.16.1 wrote is read bit for bit: weights, moments, steps and groups.

The trainings ran on the CPU over gloo, with megatron-core's own modules, distributed optimizer and key handlers. The
oracle is AdamW of torch in one process, on whole tensors.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import rankless
from rankless.errors import CorruptCheckpointError, NoCheckpointError
from tests.helpers.equality import equal_bits
from tests.helpers.megatron_runs import build_module, build_optimizer, gather_tensors, resume_sharded
from tests.helpers.pool import Ranks
from tests.helpers.processes import run_command
from tests.interop.megatron.conftest import Fixture

pytestmark = pytest.mark.filterwarnings("ignore")

NAMES = [
    "fsdp_ep2_dp2_bf16_mcore16",
    "fsdp_gpt_dp2_fp32_mcore16",
    "fsdp_tied_dp3_bf16_mcore16",
    "fsdp_tp1_dp2_bf16_mcore16",
    "fsdp_tp2_dp2_bf16_mcore16",
]
KINDS = ("master", "exp_avg", "exp_avg_sq")

OpenFsdp = Callable[[str], Fixture]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fsdp_dtensor")
    with tarfile.open(Path(__file__).parent / "fsdp_dtensor.tar.xz") as archive:
        archive.extractall(path, filter="data")
    return path


@pytest.fixture(scope="module")
def open_fsdp(folders: Path) -> OpenFsdp:
    def read(name: str) -> Fixture:
        folder = folders / name
        groups = json.loads((folder / "oracle.json").read_text())
        return Fixture(folder / "ckpt", load_file(folder / "oracle.safetensors"), groups)

    return read


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_equals_the_oracle(open_fsdp: OpenFsdp, name: str) -> None:
    fixture = open_fsdp(name)
    opened = rankless.open(fixture.path)
    assert opened.format == "megatron"
    masters = fixture.of_kind("master")
    names = {f"model/{key}" for key in masters}
    names |= {f"optimizer/{key}/{state}" for key in masters for state in ("exp_avg", "exp_avg_sq", "step")}
    assert set(opened.keys()) == names
    for key, master in masters.items():
        assert equal_bits(opened[f"model/{key}"], master)
        for state in ("exp_avg", "exp_avg_sq", "step"):
            assert equal_bits(opened[f"optimizer/{key}/{state}"], fixture.of_kind(state)[key])
    assert len(masters) >= 14
    assert not [check for check in opened.verify() if check.problem]


@pytest.mark.parametrize("name", NAMES)
def test_a_training_resumes(open_fsdp: OpenFsdp, name: str) -> None:
    fixture = open_fsdp(name)
    module = build_module(shapes_of(fixture))
    optimizer = build_optimizer(module)
    content = rankless.load_checkpoint(fixture.path, model=module, optimizer=optimizer)
    check_tensors(fixture, gather_tensors(module, optimizer))
    assert content["iteration"] == 30
    assert isinstance(content["args"], Namespace)
    (random_states,) = content["rng_state"].values()
    assert random_states[0]["torch_rng_state"].dtype == torch.uint8
    names = {id(parameter): key for key, parameter in module.named_parameters()}
    for group in optimizer.param_groups:
        settings = [fixture.numbers[names[id(parameter)]] for parameter in group["params"]]
        assert all((own["lr"], own["weight_decay"]) == (group["lr"], group["weight_decay"]) for own in settings)


def shapes_of(fixture: Fixture) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in fixture.of_kind("master").items()}


def check_tensors(fixture: Fixture, tensors: dict[str, Tensor]) -> None:
    for kind in KINDS:
        assert all(equal_bits(tensors[f"{kind}/{key}"], tensor) for key, tensor in fixture.of_kind(kind).items())


@pytest.mark.parametrize("name", ["fsdp_tied_dp3_bf16_mcore16", "fsdp_tp2_dp2_bf16_mcore16"])
def test_ranks_load_their_shards(ranks: Ranks, open_fsdp: OpenFsdp, name: str) -> None:
    fixture = open_fsdp(name)
    for world_size in (2, 3):
        for tensors, groups in ranks(world_size, resume_sharded, str(fixture.path), shapes_of(fixture)):
            check_tensors(fixture, tensors)
            assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


@pytest.mark.parametrize("to", ["native", "torch", "dcp", "megatron"])
def test_conversions_keep_everything(open_fsdp: OpenFsdp, tmp_path: Path, to: str) -> None:
    fixture = open_fsdp("fsdp_tp2_dp2_bf16_mcore16")
    converted = rankless.convert(fixture.path, tmp_path / f"converted{'.pt' if to == 'torch' else ''}", to=to)
    module = build_module(shapes_of(fixture))
    optimizer = build_optimizer(module)
    content = rankless.load_checkpoint(converted, model=module, optimizer=optimizer)
    check_tensors(fixture, gather_tensors(module, optimizer))
    assert content["iteration"] == 30


def test_the_names_of_transformers(open_fsdp: OpenFsdp, tmp_path: Path) -> None:
    fixture = open_fsdp("fsdp_tp2_dp2_bf16_mcore16")
    opened = rankless.open(rankless.convert(fixture.path, tmp_path / "hf", to="hf"))
    masters = fixture.of_kind("master")
    gate, projection = masters["decoder.layers.1.mlp.linear_fc1.weight"].chunk(2)
    assert equal_bits(opened["model/model.layers.1.mlp.gate_proj.weight"], gate)
    assert equal_bits(opened["model/model.layers.1.mlp.up_proj.weight"], projection)
    assert equal_bits(opened["model/model.embed_tokens.weight"], masters["embedding.word_embeddings.weight"][:30])
    qkv = masters["decoder.layers.0.self_attention.linear_qkv.weight"].view(2, 4, 4, 16)  # groups, heads, head, hidden
    assert equal_bits(opened["model/model.layers.0.self_attn.q_proj.weight"], qkv[:, :2].reshape(16, 16))
    for name, count in (("fsdp_ep2_dp2_bf16_mcore16", 41), ("fsdp_gpt_dp2_fp32_mcore16", 29)):
        folder = rankless.convert(open_fsdp(name).path, tmp_path / name, to="hf")
        assert len(rankless.open(folder).keys()) == count, name


def test_the_commands(open_fsdp: OpenFsdp) -> None:
    path = open_fsdp("fsdp_tied_dp3_bf16_mcore16").path
    assert json.loads(run_command("show", str(path), "--json").stdout)["format"] == "megatron"
    assert run_command("verify", str(path)).returncode == 0
    assert run_command("diff", str(path), str(path / "iter_0000030")).returncode == 0


def test_files_that_are_missing_or_short(open_fsdp: OpenFsdp, tmp_path: Path) -> None:
    for number, damage in enumerate((Path.unlink, lambda file: file.write_bytes(file.read_bytes()[:-99]))):
        run = tmp_path / str(number)
        shutil.copytree(open_fsdp("fsdp_tp1_dp2_bf16_mcore16").path, run)
        damage(run / "iter_0000030/__1_0.distcp")
        with pytest.raises(CorruptCheckpointError, match=r"__1_0\.distcp"):
            rankless.open(run)
    (run / "iter_0000030/.metadata").unlink()
    with pytest.raises(NoCheckpointError, match="iter_0000030, which is not there or not complete"):
        rankless.open(run)
