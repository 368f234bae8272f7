"""Tests exports of models with merged adapters: their weights are those of PEFT's ``merge_and_unload``."""

from pathlib import Path

import peft
import pytest
import torch
import transformers

import rankless
from rankless.errors import CorruptCheckpointError, InvalidArgumentError, TagExistsError
from tests.helpers.commands import invoke
from tests.helpers.fake_http import BUCKET
from tests.helpers.fake_s3 import FakeS3
from tests.helpers.peft_models import LAYOUTS, lora, make_base, make_peft, randomize
from tests.helpers.pool import Ranks


def opened(folder: Path) -> dict[str, torch.Tensor]:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    return model.state_dict()


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())


KINDS = ["lora", "lora of embeddings", "lora with whole modules", "lora with tokens", "dora", "ia3"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_merged_weights_are_those_of_peft(tmp_path: Path, kind: str) -> None:
    rankless.save_checkpoint(tmp_path / "run", "s", make_peft(kind))
    assert rankless.merge_adapters(tmp_path / "run", tmp_path / "merged") == tmp_path / "merged"
    assert same(opened(tmp_path / "merged"), make_peft(kind).merge_and_unload().state_dict())


@pytest.mark.filterwarnings("error:The PEFT config")
def test_that_the_base_model_is_elsewhere_now_is_no_warning(tmp_path: Path) -> None:
    make_base().save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    rankless.save_checkpoint(tmp_path / "run", "s", peft.get_peft_model(base, lora()))
    rankless.merge_adapters(tmp_path / "run", tmp_path / "merged")


@pytest.mark.parametrize("targets", [["embed_tokens", "lm_head"], ["embed_tokens"], ["lm_head"]])
def test_adapters_of_tied_weights_do_not_change_the_other_layer(targets: list[str], tmp_path: Path) -> None:
    """PEFT merges them into the tied weight, for both layers."""
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, tie_word_embeddings=True)
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), peft.LoraConfig(r=2, target_modules=targets))
    model = randomize(model, 0).eval()
    rankless.save_checkpoint(tmp_path / "run", "s", model)
    rankless.merge_adapters(tmp_path / "run", tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(merged(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_model_in_memory_is_saved_like_any_other(tmp_path: Path, kind: str) -> None:
    merged = make_peft(kind).merge_and_unload()
    rankless.save_model(merged, tmp_path, shard=True)
    assert same(opened(tmp_path), merged.state_dict())


def test_the_dtype_of_the_base_model_is_kept(tmp_path: Path) -> None:
    """The adapters of such models are trained in single precision."""

    def make() -> peft.PeftModel:
        return randomize(peft.get_peft_model(make_base().to(torch.bfloat16), lora()), 0)

    model = make()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32, torch.bfloat16}
    rankless.save_checkpoint(tmp_path / "run", "s", model)
    rankless.merge_adapters(tmp_path / "run", tmp_path / "merged")
    assert same(opened(tmp_path / "merged"), make().merge_and_unload().state_dict())


def save(path: Path, layout: str) -> None:
    rankless.save_checkpoint(path, "s", LAYOUTS[layout](make_peft("lora")))


def test_the_command_merges_a_checkpoint_of_several_ranks(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save, tmp_path / "run", "fsdp2")
    invoke("convert", tmp_path / "run", tmp_path / "merged", "--to", "hf", "--merge")
    assert same(opened(tmp_path / "merged"), make_peft("lora").merge_and_unload().state_dict())


def test_adapters_are_merged_from_and_into_an_object_store(tmp_path: Path) -> None:
    fake = FakeS3()
    with fake.connected():
        path = fake.store_at("http://fake").path(f"{BUCKET}/out")
        for folder in (tmp_path, path):
            rankless.save_checkpoint(folder / "run", "s", make_peft("lora"))
            assert rankless.merge_adapters(folder / "run", folder / "merged", max_shard_size=5000) == folder / "merged"
        for info in path.store.list_objects(path / "merged"):
            copy = tmp_path / "copy" / info.path.name
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(path.store.read_small(info.path))
        with pytest.raises(TagExistsError, match="exists already"):
            rankless.merge_adapters(path / "run", path / "merged")
    expected = {file.name: file.read_bytes() for file in (tmp_path / "merged").iterdir()}
    assert {file.name: file.read_bytes() for file in (tmp_path / "copy").iterdir()} == expected
    assert same(opened(tmp_path / "copy"), make_peft("lora").merge_and_unload().state_dict())


def merge(path: Path) -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        rankless.merge_adapters(path / "run", path / "merged")
    return str(caught.value)


def test_several_ranks_do_not_merge(ranks: Ranks, tmp_path: Path) -> None:
    assert all("by one process" in message for message in ranks(2, merge, tmp_path))


def test_what_cannot_be_merged_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(TagExistsError, match="there"):
        rankless.merge_adapters(tmp_path / "run", tmp_path / "there")
    rankless.save_checkpoint(tmp_path / "a", "s", make_base())
    rankless.save_checkpoint(tmp_path / "b", "s", make_peft("lora"), adapter_only=True)
    for run in ("a", "b"):
        with pytest.raises(InvalidArgumentError, match=rf"{run}/s is not .*with its base model"):
            rankless.merge_adapters(tmp_path / run, tmp_path / "merged")
    rankless.save_checkpoint(tmp_path / "c", "s", make_peft("prompt tuning"))
    with pytest.raises(InvalidArgumentError, match=r"^PROMPT_TUNING trains prompts"):
        rankless.merge_adapters(tmp_path / "c", tmp_path / "merged")
    model = make_peft("lora")
    model.add_adapter("other", lora())
    rankless.save_checkpoint(tmp_path / "d", "s", model)
    with pytest.raises(InvalidArgumentError, match="adapter, adapter/other"):
        rankless.merge_adapters(tmp_path / "d", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


DERIVED = {
    "psoft": lambda: peft.PsoftConfig(r=4, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM"),
    "osf": lambda: peft.OSFConfig(target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM"),
    "frod": lambda: peft.FrodConfig(target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("kind", DERIVED)
def test_adapters_that_compute_tensors_from_the_base_model(tmp_path: Path, kind: str) -> None:
    """They store none of these tensors, so the adapter is put into a model that has the right weights."""
    model = peft.get_peft_model(make_base(), DERIVED[kind]())
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    rankless.save_checkpoint(tmp_path / "run", "s", model)
    rankless.merge_adapters(tmp_path / "run", tmp_path / "merged")
    expected = model.merge_and_unload().state_dict()
    merged = opened(tmp_path / "merged")
    assert merged.keys() == expected.keys()
    assert all(torch.allclose(value, expected[name], rtol=1e-4, atol=1e-5) for name, value in merged.items())


def test_a_corrupt_configuration_is_found(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path / "run", "s", make_peft("lora"))
    for name in ("adapter_config.json", "base/config.json"):
        file = tmp_path / "run/s/adapter" / name
        right = file.read_bytes()
        file.write_bytes(right.replace(b"4", b"8", 1))
        with pytest.raises(CorruptCheckpointError, match=name):
            rankless.merge_adapters(tmp_path / "run/s", tmp_path / "merged")
        file.write_bytes(right)


def test_adapters_that_transformers_put_in_are_not_merged(tmp_path: Path) -> None:
    model = make_base()
    model.add_adapter(lora(init_lora_weights=False))
    rankless.save_checkpoint(tmp_path / "run", "s", model)
    with pytest.raises(InvalidArgumentError, match=r"by transformers.*merge"):
        rankless.merge_adapters(tmp_path / "run", tmp_path / "merged")
