"""Tests folders of diffusers: names of files, configurations, pipelines. ``tests/frameworks`` has the package."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import rankless
from rankless.errors import FormatError, UnsafeNameError
from rankless.formats.huggingface import find_exported_files

STEM = "diffusion_pytorch_model"


class ModelMixin(nn.Module):
    """A stand-in for the base class of diffusers' models, which is recognized by its name."""

    def to_json_string(self) -> str:
        return json.dumps({"_class_name": type(self).__name__, "_diffusers_version": "0.42.1", "size": 4})


ModelMixin.__module__ = "diffusers.models.modeling_utils"


class Denoiser(ModelMixin):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.config = {"size": 4}


def is_equal(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(tensor, other) for tensor, other in pairs)


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("use_safetensors", "form"), [(True, "safetensors"), (False, "bin")])
def test_save_model_names_the_files_as_diffusers_does(tmp_path: Path, use_safetensors: bool, form: str) -> None:
    model, options = Denoiser(), {"shard": True, "use_safetensors": use_safetensors}
    rankless.save_model(model, tmp_path / "one", **options)
    assert list_names(tmp_path / "one") == ["config.json", f"{STEM}.{form}"]
    rankless.save_model(model, tmp_path / "two", max_shard_size=100, **options)
    numbered = [f"{STEM}-0000{number}-of-00002.{form}" for number in (1, 2)]
    assert list_names(tmp_path / "two") == ["config.json", *numbered, f"{STEM}.{form}.index.json"]
    index = json.loads((tmp_path / "two" / f"{STEM}.{form}.index.json").read_text())
    assert set(index["weight_map"].values()) == set(numbered)
    for folder in ("one", "two"):
        loaded = Denoiser(1)
        rankless.load_model(loaded, tmp_path / folder)
        assert is_equal(loaded, model)
        assert json.loads((tmp_path / folder / "config.json").read_text())["_class_name"] == "Denoiser"


def test_a_model_replaces_one_with_other_names(tmp_path: Path) -> None:
    rankless.save_model(nn.Linear(2, 2), tmp_path, shard=True)
    rankless.save_model(Denoiser(), tmp_path, shard=True)
    assert list_names(tmp_path) == ["config.json", f"{STEM}.safetensors"]


def test_exports_of_a_checkpoint_have_these_names_too(tmp_path: Path) -> None:
    model = Denoiser()
    rankless.save_checkpoint(tmp_path / "run", "s", model)
    rankless.convert(tmp_path / "run", tmp_path / "converted", to="hf")
    rankless.export_model(tmp_path / "run", tmp_path / "exported", max_shard_size=100)
    rankless.convert(tmp_path / "exported", tmp_path / "copied", to="hf")
    assert list_names(tmp_path / "converted") == ["config.json", f"{STEM}.safetensors"]
    assert f"{STEM}.safetensors.index.json" in list_names(tmp_path / "exported")
    assert 'library_name: "diffusers"' in (tmp_path / "exported/README.md").read_text()
    for folder in ("converted", "exported", "copied"):
        loaded = Denoiser(1)
        rankless.load_model(loaded, tmp_path / folder)
        assert is_equal(loaded, model)
    rankless.convert(tmp_path / "converted", tmp_path / "file.safetensors", to="safetensors")
    assert rankless.open(tmp_path / "file.safetensors")["model/first.weight"].shape == (4, 4)


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """Return a folder with two models, a scheduler, and a part that is not there."""
    folder = tmp_path / "pipeline"
    for name, file, seed in (("unet", STEM, 1), ("text_encoder", "model", 2)):
        (folder / name).mkdir(parents=True)
        save_file(Denoiser(seed).state_dict(), folder / name / f"{file}.safetensors")
        (folder / name / "config.json").write_text(json.dumps({"_diffusers_version": "0"} if name == "unet" else {}))
    (folder / "scheduler").mkdir()
    parts: dict[str, Any] = {name: ["diffusers", "Class"] for name in ("unet", "text_encoder", "scheduler")}
    parts |= {"_class_name": "Pipeline", "safety_checker": [None, None], "../unet": ["diffusers", "Class"], "": []}
    (folder / "model_index.json").write_text(json.dumps(parts))
    return folder


def test_a_pipeline_has_several_models(pipeline: Path, tmp_path: Path) -> None:
    names = {name.rsplit("/", 1)[0] for name in rankless.open(pipeline)}
    assert names == {"model/unet", "model/text_encoder"}
    models = {"unet": Denoiser(), "text_encoder": Denoiser()}
    rankless.load_checkpoint(pipeline, model=models)
    assert is_equal(models["unet"], Denoiser(1))
    assert is_equal(models["text_encoder"], Denoiser(2))
    rankless.convert(pipeline, tmp_path / "run/s", to="native")
    rankless.load_checkpoint(tmp_path / "run", model=models)


def test_one_model_of_a_pipeline_is_selected(pipeline: Path, tmp_path: Path) -> None:
    rankless.convert(pipeline, tmp_path / "one", to="hf", keys={"model": "unet"})
    assert list_names(tmp_path / "one") == ["config.json", f"{STEM}.safetensors"]
    model = Denoiser()
    rankless.load_model(model, pipeline / "unet")
    assert is_equal(model, Denoiser(1))
    with pytest.raises(FormatError, match="text_encoder, unet"):
        rankless.convert(pipeline, tmp_path / "two", to="hf", keys={"model": "vae"})


def test_a_pipeline_reads_no_files_outside_of_its_folder(pipeline: Path, tmp_path: Path) -> None:
    (pipeline / "unet").rename(tmp_path / "outside")
    (pipeline / "unet").symlink_to(tmp_path / "outside")
    with pytest.raises(UnsafeNameError):
        rankless.open(pipeline)


def test_models_in_the_cache_of_the_hub_are_links_to_its_blobs(pipeline: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a/snapshots/0123", tmp_path / "models--a/blobs"
    blobs.mkdir(parents=True)
    for number, file in enumerate(path for path in pipeline.rglob("*") if path.is_file()):
        link = snapshot / file.relative_to(pipeline)
        link.parent.mkdir(parents=True, exist_ok=True)
        file.rename(blobs / str(number))
        link.symlink_to(blobs / str(number))
    models = {"unet": Denoiser(), "text_encoder": Denoiser()}
    rankless.load_checkpoint(snapshot, model=models)
    rankless.load_model(models["text_encoder"], snapshot / "unet")
    assert is_equal(models["unet"], models["text_encoder"])


def test_a_pipeline_without_models_is_named(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("[]")
    with pytest.raises(FormatError, match="no weights"):
        rankless.open(tmp_path)


def test_only_an_export_of_rankless_is_replaced(tmp_path: Path) -> None:
    rankless.save_model(Denoiser(), tmp_path / "ours", shard=True, max_shard_size=100)
    assert find_exported_files(tmp_path / "ours") == {*list_names(tmp_path / "ours")} - {"config.json"}
    save_file(Denoiser().state_dict(), tmp_path / f"{STEM}.safetensors")
    assert find_exported_files(tmp_path) is None
