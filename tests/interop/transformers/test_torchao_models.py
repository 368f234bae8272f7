"""Tests models of transformers that torchao has quantized: written for from_pretrained, and read back."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import rankless
from rankless.errors import CorruptCheckpointError, MismatchError, UnsupportedTensorError
from rankless.ondisk.torchao_form import check_described, header_notes, native_names, read_descriptions
from rankless.state.torchao_description import describe_for_torchao
from tests.helpers.pairwise import first_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

IDS = torch.arange(8)[None]
CONFIGS = [
    *("Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig"),
    "Int8DynamicActivationInt8WeightConfig",
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model that is not quantized."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_key_value_heads=2, tie_word_embeddings=False)
    folder = tmp_path_factory.mktemp("base")
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def quantize(base: Path, kind: str) -> Any:
    config = transformers.TorchAoConfig(getattr(quantization, kind)())
    return open_model(base, quantization_config=config)


def open_model(folder: Path, **options: Any) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(IDS).logits
    return result


def read_headers(folder: Path) -> Iterator[tuple[set[str], dict[str, Any]]]:
    """Yield the keys and the metadata of each safetensors file, with the names of tensors in any order."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), "pt") as opened:
            notes = opened.metadata()
            yield set(opened.keys()), {**notes, "tensor_names": sorted(json.loads(notes["tensor_names"]))}


@first_of(1, "kind", CONFIGS)
def test_saved_and_converted_folders_are_those_of_save_pretrained(kind: str, base: Path, tmp_path: Path) -> None:
    model = quantize(base, kind)
    model.save_pretrained(tmp_path / "expected")
    [(keys, notes)] = read_headers(tmp_path / "expected")
    rankless.save_model(model, tmp_path / "saved", shard=True)
    rankless.save_checkpoint(tmp_path / "run", "s", model)
    rankless.convert(tmp_path / "run", tmp_path / "converted", to="hf")
    rankless.export_model(tmp_path / "run", tmp_path / "exported")
    rankless.convert(tmp_path / "expected", tmp_path / "copied", to="hf")
    for name in ("saved", "converted", "exported", "copied"):
        assert torch.equal(logits(open_model(tmp_path / name)), logits(model)), name
        [(own_keys, own_notes)] = read_headers(tmp_path / name)
        assert own_keys == keys
        assert {key: text for key, text in own_notes.items() if not key.startswith("rankless.")} == notes


def test_files_of_any_size_open(base: Path, tmp_path: Path) -> None:
    model = quantize(base, "Int8WeightOnlyConfig")
    rankless.save_model(model, tmp_path / "m", shard=True, max_shard_size="4KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 2
    assert torch.equal(logits(open_model(tmp_path / "m")), logits(model))


@pytest.mark.parametrize("writer", ["save_pretrained", "save_model", "save_checkpoint"])
def test_a_quantized_model_is_loaded_from_each_kind_of_folder(writer: str, base: Path, tmp_path: Path) -> None:
    model, other = quantize(base, "Int8WeightOnlyConfig"), quantize(base, "Int8WeightOnlyConfig")
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
        model.model.layers[0].mlp.up_proj.weight.qdata.neg_()
    if writer == "save_pretrained":
        model.save_pretrained(tmp_path)
    elif writer == "save_model":
        rankless.save_model(model, tmp_path / "m", shard=True)
    else:
        rankless.save_checkpoint(tmp_path, "s", model)
    rankless.load_model(other, tmp_path / "m" if writer == "save_model" else tmp_path)
    assert torch.equal(logits(other), logits(model))


def test_weights_of_another_configuration_are_refused_by_name(base: Path, tmp_path: Path) -> None:
    quantize(base, "Int8WeightOnlyConfig").save_pretrained(tmp_path)
    other = quantize(base, "Int8DynamicActivationInt8WeightConfig")
    with pytest.raises(MismatchError, match=r"q_proj\.weight: .*Int8Tensor.* in the checkpoint.*MappingType.* here"):
        rankless.load_model(other, tmp_path)


def test_a_model_from_a_quantized_folder_is_saved_and_loaded_again(base: Path, tmp_path: Path) -> None:
    model = quantize(base, "Int8WeightOnlyConfig")
    model.save_pretrained(tmp_path / "first")
    opened = open_model(tmp_path / "first")
    rankless.save_model(opened, tmp_path / "second", shard=True)
    again = open_model(tmp_path / "second")
    assert torch.equal(logits(again), logits(model))
    rankless.load_model(again, tmp_path / "first")
    assert torch.equal(logits(again), logits(model))


def test_the_description_of_a_shard_is_that_of_the_whole_tensor() -> None:
    weight = torch.randn(8, 32, dtype=torch.bfloat16)
    whole = quantization.Float8Tensor.from_hp(weight, granularity=quantization.PerTensor())
    shard = quantization.Float8Tensor.from_hp(weight[:4], granularity=quantization.PerTensor())
    assert describe_for_torchao(shard, (8, 32)) == describe_for_torchao(whole, (8, 32))


def test_a_class_that_torchao_does_not_store_is_refused_by_name() -> None:
    values = {"a.weight": {"tensor_subclass": "NF4Tensor"}}
    check_described(values, {}, b"{}")
    with pytest.raises(UnsupportedTensorError, match=r"'a\.weight' is a NF4Tensor.*shard=False"):
        check_described(values, {}, b'{"quantization_config": {"quant_method": "torchao"}}')


@pytest.mark.usefixtures("without_garbage")
def test_metadata_of_other_libraries_means_nothing() -> None:
    for text in ("", "1", '"x"', "[1]", '["a.weight"]', "[" * 100_000):
        assert read_descriptions({"tensor_names": text, "a.weight": "[]"}) == {}


def test_names_under_another_prefix_are_known_by_their_ending() -> None:
    description = json.dumps({"_type": "Int8Tensor", "_data": {}, "_tensor_data_names": ["qdata"]})
    described = read_descriptions(header_notes({"model.up.weight": description}, ["model.norm"]))
    stored = ["model.language_model.up._weight_qdata", "model.norm"]
    assert native_names(stored, described) == {stored[0]: "model.language_model.up.weight.qdata"}


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    description = json.dumps({"_type": "Int8Tensor", "_data": {}, "_tensor_data_names": ["qdata"]})
    tensors = {"up._weight_qdata": torch.ones(2), "up.weight.qdata": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors", header_notes({"up.weight": description}, []))
    with pytest.raises(CorruptCheckpointError, match="description of torchao"):
        rankless.open(tmp_path)
