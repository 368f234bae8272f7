"""Tests models of diffusers: its ``from_pretrained`` opens what rankless writes, and its folders are read."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rankless
from tests.helpers.pool import Ranks

diffusers = pytest.importorskip("diffusers")


def make_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return diffusers.UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip


def assert_opens(folder: Path, **options: Any) -> None:
    opened, expected = diffusers.UNet2DModel.from_pretrained(folder, **options), make_model()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(opened.state_dict()[name], tensor), name


@pytest.mark.parametrize("size", ["100KB", "1GB"])
@pytest.mark.parametrize("use_safetensors", [True, False])
def test_from_pretrained_opens_what_save_model_writes(tmp_path: Path, size: str, use_safetensors: bool) -> None:
    options = {"max_shard_size": size, "use_safetensors": use_safetensors}
    make_model().save_pretrained(tmp_path / "expected")
    rankless.save_model(make_model(), tmp_path / "saved", shard=True, **options)
    assert_opens(tmp_path / "saved", use_safetensors=use_safetensors)
    config = "config.json"
    assert (tmp_path / "saved" / config).read_bytes() == (tmp_path / "expected" / config).read_bytes()


def save_sharded(folder: Path) -> None:
    model = fully_shard(make_model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    rankless.save_model(model, folder / "saved", shard=True)
    rankless.save_checkpoint(folder / "run", "s", model)


def test_from_pretrained_opens_what_sharded_ranks_write(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save_sharded, tmp_path)
    rankless.export_model(tmp_path / "run", tmp_path / "exported")
    assert_opens(tmp_path / "saved")
    assert_opens(tmp_path / "exported")


def test_a_pipeline_and_its_models_are_read(tmp_path: Path) -> None:
    diffusers.DDPMPipeline(make_model(), diffusers.DDPMScheduler()).save_pretrained(tmp_path / "pipeline")
    of_pipeline, single = make_model(1), make_model(2)
    rankless.load_checkpoint(tmp_path / "pipeline", model={"unet": of_pipeline})
    rankless.load_model(single, tmp_path / "pipeline/unet")
    rankless.convert(tmp_path / "pipeline", tmp_path / "converted", to="hf", keys={"model": "unet"})
    assert_opens(tmp_path / "converted")
    for name, tensor in make_model().state_dict().items():
        assert torch.equal(of_pipeline.state_dict()[name], tensor)
        assert torch.equal(single.state_dict()[name], tensor)
