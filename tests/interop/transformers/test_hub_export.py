"""Tests exports for the Hugging Face Hub against transformers, PEFT and huggingface_hub, offline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import peft
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models

import holdfast
from holdfast.errors import InvalidArgumentError, NoCheckpointError, TagExistsError
from holdfast.state.model.hf_config import set_config_dtype
from tests.helpers.commands import invoke, run_command
from tests.helpers.pool import Ranks


def build_model() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2
    )
    model = transformers.GPT2LMHeadModel(config)
    model.generation_config.max_new_tokens = 7
    return model


def build_tokenizer() -> Any:
    vocabulary = {f"t{number}": number for number in range(32)}
    unknown = {"unk_token": "t0"}
    model = Tokenizer(models.WordLevel(vocabulary, **unknown))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, **unknown)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2):
        model = build_model()
        model.lm_head.weight.data += step
        holdfast.save_checkpoint(tmp_path / "run", f"step_{step}", model, step=step, metrics={"val_loss": 0.5 * step})
    return tmp_path / "run"


def names(folder: Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


def test_the_folder_has_what_push_to_hub_uploads(run: Path, tmp_path: Path) -> None:
    model, tokenizer = build_model(), build_tokenizer()
    model.save_pretrained(tmp_path / "expected")
    tokenizer.save_pretrained(tmp_path / "expected")
    folder = holdfast.export_model(run, tmp_path / "my-model", tokenizer=tokenizer, license="apache-2.0")
    assert names(folder) == names(tmp_path / "expected") | {"README.md"}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight + 2)
    assert loaded.generation_config.max_new_tokens == 7
    text = "t3 t5 t31"
    assert transformers.AutoTokenizer.from_pretrained(folder)(text) == tokenizer(text)


def test_the_card_names_the_checkpoint(run: Path, tmp_path: Path) -> None:
    folder = holdfast.export_model(run, tmp_path / "my-model", tag=holdfast.best("val_loss"), license="mit")
    card = huggingface_hub.ModelCard.load(folder / "README.md")
    assert card.data.to_dict() == {"library_name": "transformers", "license": "mit"}
    opened = holdfast.open(run, "step_1")
    for expected in ("# my-model", "step_1", "| val_loss | 0.5 |", opened.identity.id, "of F32"):
        assert expected in card.text
    assert str(tmp_path) not in card.content


def test_names_in_a_card_cannot_break_its_table_or_its_head(tmp_path: Path) -> None:
    holdfast.save_checkpoint(tmp_path / "run", "s", build_model(), step=1, metrics={"a|b\n# <script>": 1.0})
    hostile = 'x"\n---\nlicense: mit'
    folder = holdfast.export_model(tmp_path / "run", tmp_path / "out", base_model=hostile)
    card = huggingface_hub.ModelCard.load(folder / "README.md", ignore_metadata_errors=True)
    assert card.data.to_dict().get("license") is None
    assert "| a\\|b # &lt;script> | 1 |" in card.text


@pytest.mark.parametrize("size", [2, 3])
def test_several_ranks_write_the_same_folder(ranks: Ranks, run: Path, tmp_path: Path, size: int) -> None:
    alone = holdfast.export_model(run, tmp_path / "one/model", dtype="bfloat16", max_shard_size="1KB")
    ranks(size, export, str(run), str(tmp_path / "several/model"))
    assert names(alone) == names(tmp_path / "several/model")
    for name in names(alone):
        assert (alone / name).read_bytes() == (tmp_path / "several/model" / name).read_bytes()
    assert transformers.AutoModelForCausalLM.from_pretrained(alone).dtype == torch.bfloat16


def export(run: str, folder: str) -> None:
    holdfast.export_model(run, folder, dtype="bfloat16", max_shard_size="1KB")


@pytest.mark.parametrize("to", ["hf", "native"])
def test_a_cast_model_is_loaded_in_its_dtype(run: Path, tmp_path: Path, to: str) -> None:
    """transformers takes the dtype from the configuration, not from the file."""
    folder = holdfast.convert(run, tmp_path / "out", to=to, dtype="bfloat16")
    folder = folder if to == "hf" else folder / "model"
    assert transformers.AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16


def test_only_dtypes_of_weights_change_in_a_configuration() -> None:
    given = {
        "dtype": "float32",
        "text_config": {"torch_dtype": "float32", "size": 3},
        "quantization_config": {"dtype": "float32"},
        "other": {"dtype": "float32"},
    }
    changed = json.loads(set_config_dtype(json.dumps(given).encode(), "bfloat16"))
    text = {"torch_dtype": "bfloat16", "size": 3}
    assert changed == given | {"dtype": "bfloat16", "text_config": text}
    assert set_config_dtype(b"{", "bfloat16") == b"{"


def test_a_model_of_ones_own_needs_a_configuration(tmp_path: Path) -> None:
    holdfast.save_checkpoint(tmp_path / "run", "s", torch.nn.Linear(2, 2))
    with pytest.warns(UserWarning, match="has no config.json"):
        holdfast.export_model(tmp_path / "run", tmp_path / "without")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "mine"}))
    for number, given in enumerate([config, tmp_path, transformers.GPT2Config()]):
        folder = holdfast.export_model(tmp_path / "run", tmp_path / f"with{number}", config=given)
        assert (folder / "config.json").exists()


def test_a_configuration_that_is_passed_replaces_the_checkpoints(run: Path, tmp_path: Path) -> None:
    config = build_model().config
    config.task_specific_params = {"mine": 1}
    folder = holdfast.export_model(run, tmp_path / "out", config=config)
    assert transformers.AutoConfig.from_pretrained(folder).task_specific_params == {"mine": 1}


def test_of_a_model_with_adapters_the_adapters_are_exported(tmp_path: Path) -> None:
    model = build_model()
    model.name_or_path = model.config._name_or_path = "org/base-model"
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_attn"], init_lora_weights=False))
    holdfast.save_checkpoint(tmp_path / "run", "s", adapted)
    folder = holdfast.export_model(tmp_path / "run", tmp_path / "adapter", tokenizer=build_tokenizer())
    adapted.save_pretrained(tmp_path / "expected")
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md", "tokenizer.json"} <= names(folder)
    data = huggingface_hub.ModelCard.load(folder / "README.md").data.to_dict()
    assert data == {"library_name": "peft", "base_model": "org/base-model"}
    loaded = peft.PeftModel.from_pretrained(build_model(), folder)
    for name, tensor in peft.get_peft_model_state_dict(adapted).items():
        assert torch.equal(peft.get_peft_model_state_dict(loaded)[name], tensor)
    with pytest.raises(InvalidArgumentError, match="dtype"):
        holdfast.export_model(tmp_path / "run", tmp_path / "other", dtype="bfloat16")


def test_wrong_arguments_are_refused_and_leave_nothing(run: Path, tmp_path: Path) -> None:
    wrong: list[dict[str, Any]] = [
        {"tokenizer": 3},
        {"tokenizer": tmp_path / "missing"},
        {"config": 3},
        {"dtype": "int8"},
        {"max_shard_size": "big"},
        {"tag": "../x"},
    ]
    for options in wrong:
        with pytest.raises(InvalidArgumentError):
            holdfast.export_model(run, tmp_path / "out", **options)
    with pytest.raises(NoCheckpointError):
        holdfast.export_model(run, tmp_path / "out", tag="step_9")
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    with pytest.raises(TagExistsError):
        holdfast.export_model(run, tmp_path / "out")


def test_the_command(run: Path, tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    card = tmp_path / "card.md"
    card.write_text("---\nlicense: mit\n---\n# Mine\n")
    arguments = ["--tag", "step_1", "--tokenizer", str(tmp_path / "tokenizer"), "--card", str(card)]
    assert "hub" in invoke("export", run, "--to", tmp_path / "out", *arguments).output
    assert (tmp_path / "out/README.md").read_text() == card.read_text()
    assert "tokenizer.json" in names(tmp_path / "out")


def test_the_command_shows_a_warning_as_one_line(tmp_path: Path) -> None:
    holdfast.save_checkpoint(tmp_path / "run", "s", torch.nn.Linear(2, 2))
    done = run_command("export", str(tmp_path / "run"), "--to", str(tmp_path / "out"))
    assert done.returncode == 0
    assert done.stderr.startswith(f"warning: {tmp_path}/run/s has no config.json")
    assert ".py" not in done.stderr


def test_the_command_takes_an_alias_after_the_path_of_a_run(run: Path, tmp_path: Path) -> None:
    holdfast.set_alias(run, "production", "step_1")
    invoke("export", run / "production", "--to", tmp_path / "out")
    assert "| checkpoint | step_1 |" in (tmp_path / "out/README.md").read_text()
    assert "no difference" in invoke("diff", run / "production", run / "step_1").output
