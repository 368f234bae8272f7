"""Tests weights that torchao has quantized: restored exactly, unsharded and sharded by rows."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import _from_local_no_grad
from torch.distributed.tensor import Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import rankless
from rankless.errors import MismatchError
from tests.helpers.file_contents import read_state_files
from tests.helpers.pool import Ranks
from tests.interop.quantised.runs import assert_equal_bits, flat_tensors

pytest.importorskip("torchao", reason="torchao is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

CONFIGS = [
    "Int8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Float8WeightOnlyConfig",
    "IntxWeightOnlyConfig",
    "Int8DynamicActivationIntxWeightConfig",
]


def quantized_model(kind: str, seed: int = 0) -> nn.Module:
    from torchao import quantization
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128)).bfloat16()
    if kind == "NF4":
        for layer in model:
            layer.weight = nn.Parameter(to_nf4(layer.weight.detach()), requires_grad=False)
    else:
        quantization.quantize_(model, getattr(quantization, kind)())
    return model


@pytest.mark.parametrize("kind", [*CONFIGS, "NF4"])
def test_weights_are_restored_exactly(kind: str, tmp_path: Path) -> None:
    model, blank = quantized_model(kind), quantized_model(kind, seed=1)
    rankless.save_checkpoint(tmp_path, "s", model)
    rankless.load_checkpoint(tmp_path, model=blank)
    for name, parameter in model.named_parameters():
        assert_equal_bits(flat_tensors(name, blank.get_parameter(name)), flat_tensors(name, parameter))
    if kind != "NF4":
        batch = torch.randn(4, 128, dtype=torch.bfloat16)
        assert torch.equal(blank(batch), model(batch))


def test_another_configuration_is_refused_by_name(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", quantized_model("Int8WeightOnlyConfig"))
    with pytest.raises(MismatchError, match=r"0\.weight: context .*act_quant_kwargs"):
        rankless.load_checkpoint(tmp_path, model=quantized_model("Int8DynamicActivationInt8WeightConfig"))


def shard_weights(kind: str, seed: int) -> dict[str, Any]:
    """Shard the weights by rows, as FSDP2 makes its parameters: not all classes have the view that from_local takes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = quantized_model(kind, seed).state_dict()
    for name in ("0.weight", "1.weight"):
        whole = state[name]
        rows = -(-len(whole) // dist.get_world_size())
        local = whole[dist.get_rank() * rows : min((dist.get_rank() + 1) * rows, len(whole))]
        meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
        state[name] = _from_local_no_grad(local, DTensorSpec(mesh, (Shard(0),), tensor_meta=meta))
    return state


def save_sharded(path: Path, kind: str, seed: int) -> None:
    state = shard_weights(kind, seed)
    if seed:
        rankless.load_checkpoint(path.parent / "1", model=state)
    rankless.save_checkpoint(path, "s", state)


@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_sharded_by_rows_are_stored_like_whole_ones(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path / "1", "s", quantized_model(kind).state_dict())
    ranks(2, save_sharded, tmp_path / "2", kind, 0)
    ranks(3, save_sharded, tmp_path / "3", kind, 1)
    for size in (2, 3):
        assert read_state_files(tmp_path / f"{size}/s") == read_state_files(tmp_path / "1/s"), size


def save_sharded_folder(path: Path, kind: str) -> None:
    rankless.save_model(shard_weights(kind, 0), path, shard=True)


def test_folders_of_sharded_weights_describe_the_whole_ones(ranks: Ranks, tmp_path: Path) -> None:
    """torchao's description of a shard may have the shape of the shard."""
    kind = "Int8WeightOnlyConfig"
    rankless.save_model(quantized_model(kind).state_dict(), tmp_path / "1", shard=True)
    ranks(2, save_sharded_folder, tmp_path / "2", kind)
    name = "model.safetensors"
    assert (tmp_path / "2" / name).read_bytes() == (tmp_path / "1" / name).read_bytes()
    with safe_open(str(tmp_path / "1" / name), "pt") as file:
        assert "0._weight_qdata" in file.keys()  # noqa: SIM118 - it is no dict
        described = json.loads(file.metadata()["0.weight"])
    assert described["_type"] == "Int8Tensor"
    assert {"qdata", "scale"} <= {*described["_tensor_data_names"]}
