"""Tests exports for the Hugging Face Hub against transformers, PEFT and huggingface_hub, offline."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from tokenizers import Tokenizer, models

import rankless
from rankless.conversion.config_dtype import set_config_dtype
from rankless.errors import (
    CheckpointReplacedError,
    InvalidArgumentError,
    NoCheckpointError,
    RanklessError,
    TagExistsError,
    UnsafeNameError,
)
from tests.helpers.commands import invoke
from tests.helpers.pool import Ranks
from tests.helpers.processes import run_command


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
        rankless.save_checkpoint(tmp_path / "run", f"step_{step}", model, step=step, metrics={"val_loss": 0.5 * step})
    return tmp_path / "run"


def names(folder: Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


def test_the_folder_has_what_push_to_hub_uploads(run: Path, tmp_path: Path) -> None:
    model, tokenizer = build_model(), build_tokenizer()
    model.save_pretrained(tmp_path / "expected")
    tokenizer.save_pretrained(tmp_path / "expected")
    folder = rankless.export_model(run, tmp_path / "my-model", tokenizer=tokenizer, license="apache-2.0")
    assert names(folder) == names(tmp_path / "expected") | {"README.md"}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight + 2)
    assert loaded.generation_config.max_new_tokens == 7
    text = "t3 t5 t31"
    assert transformers.AutoTokenizer.from_pretrained(folder)(text) == tokenizer(text)


def test_the_card_names_the_checkpoint(run: Path, tmp_path: Path) -> None:
    folder = rankless.export_model(run, tmp_path / "my-model", tag=rankless.best("val_loss"), license="mit")
    card = huggingface_hub.ModelCard.load(folder / "README.md")
    assert card.data.to_dict() == {"library_name": "transformers", "license": "mit"}
    opened = rankless.open(run, "step_1")
    for expected in ("# my-model", "step_1", "| val_loss | 0.5 |", opened.identity.id, "of F32"):
        assert expected in card.text
    assert str(tmp_path) not in card.content


def test_names_in_a_card_cannot_break_its_table_or_its_head(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path / "run", "s", build_model(), step=1, metrics={"a|b\n# <script>": 1.0})
    hostile = 'x"\n---\nlicense: mit'
    folder = rankless.export_model(tmp_path / "run", tmp_path / "out", base_model=hostile)
    card = huggingface_hub.ModelCard.load(folder / "README.md", ignore_metadata_errors=True)
    assert card.data.to_dict().get("license") is None
    assert "| a\\|b # &lt;script> | 1 |" in card.text


@pytest.mark.parametrize("size", [2, 3])
def test_several_ranks_write_the_same_folder(ranks: Ranks, run: Path, tmp_path: Path, size: int) -> None:
    alone = rankless.export_model(run, tmp_path / "one/model", dtype="bfloat16", max_shard_size="1KB")
    ranks(size, export, str(run), str(tmp_path / "several/model"))
    assert names(alone) == names(tmp_path / "several/model")
    for name in names(alone):
        assert (alone / name).read_bytes() == (tmp_path / "several/model" / name).read_bytes()
    assert transformers.AutoModelForCausalLM.from_pretrained(alone).dtype == torch.bfloat16


def export(run: str, folder: str) -> None:
    rankless.export_model(run, folder, dtype="bfloat16", max_shard_size="1KB")


@pytest.mark.parametrize("to", ["hf", "native"])
def test_a_cast_model_is_loaded_in_its_dtype(run: Path, tmp_path: Path, to: str) -> None:
    """transformers takes the dtype from the configuration, not from the file."""
    folder = rankless.convert(run, tmp_path / "out", to=to, dtype="bfloat16")
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
    rankless.save_checkpoint(tmp_path / "run", "s", torch.nn.Linear(2, 2))
    with pytest.warns(UserWarning, match="has no config.json"):
        rankless.export_model(tmp_path / "run", tmp_path / "without")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "mine"}))
    for number, given in enumerate([config, tmp_path, transformers.GPT2Config()]):
        folder = rankless.export_model(tmp_path / "run", tmp_path / f"with{number}", config=given)
        assert (folder / "config.json").exists()


def test_a_configuration_that_is_passed_replaces_the_checkpoints(run: Path, tmp_path: Path) -> None:
    config = build_model().config
    config.task_specific_params = {"mine": 1}
    folder = rankless.export_model(run, tmp_path / "out", config=config)
    assert transformers.AutoConfig.from_pretrained(folder).task_specific_params == {"mine": 1}


def test_of_a_model_with_adapters_the_adapters_are_exported(tmp_path: Path) -> None:
    model = build_model()
    model.name_or_path = model.config._name_or_path = "org/base-model"
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_attn"], init_lora_weights=False))
    rankless.save_checkpoint(tmp_path / "run", "s", adapted)
    folder = rankless.export_model(tmp_path / "run", tmp_path / "adapter", tokenizer=build_tokenizer())
    adapted.save_pretrained(tmp_path / "expected")
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md", "tokenizer.json"} <= names(folder)
    data = huggingface_hub.ModelCard.load(folder / "README.md").data.to_dict()
    assert data == {"library_name": "peft", "base_model": "org/base-model"}
    loaded = peft.PeftModel.from_pretrained(build_model(), folder)
    for name, tensor in peft.get_peft_model_state_dict(adapted).items():
        assert torch.equal(peft.get_peft_model_state_dict(loaded)[name], tensor)
    with pytest.raises(InvalidArgumentError, match="dtype"):
        rankless.export_model(tmp_path / "run", tmp_path / "other", dtype="bfloat16")


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
            rankless.export_model(run, tmp_path / "out", **options)
    with pytest.raises(NoCheckpointError):
        rankless.export_model(run, tmp_path / "out", tag="step_9")
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    with pytest.raises(TagExistsError):
        rankless.export_model(run, tmp_path / "out")


def test_the_command(run: Path, tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    card = tmp_path / "card.md"
    card.write_text("---\nlicense: mit\n---\n# Mine\n")
    arguments = ["--tag", "step_1", "--tokenizer", str(tmp_path / "tokenizer"), "--card", str(card)]
    assert "hub" in invoke("export", run, "--output", tmp_path / "out", *arguments).output
    assert (tmp_path / "out/README.md").read_text() == card.read_text()
    assert "tokenizer.json" in names(tmp_path / "out")


def test_the_command_shows_a_warning_as_one_line(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path / "run", "s", torch.nn.Linear(2, 2))
    done = run_command("export", str(tmp_path / "run"), "--output", str(tmp_path / "out"))
    assert done.returncode == 0
    assert done.stderr.startswith(f"warning: {tmp_path}/run/s has no config.json")
    assert ".py" not in done.stderr


def test_the_command_takes_an_alias_after_the_path_of_a_run(run: Path, tmp_path: Path) -> None:
    rankless.set_alias(run, "production", "step_1")
    invoke("export", run / "production", "--output", tmp_path / "out")
    assert "| checkpoint | step_1 |" in (tmp_path / "out/README.md").read_text()
    assert "no difference" in invoke("diff", run / "production", run / "step_1").output


@pytest.mark.parametrize("name", ["config.json", "vocab.txt", "tokenizer_config.json"])
@pytest.mark.parametrize("export", [rankless.export_model, partial(rankless.convert, to="hf")])
def test_a_link_out_of_the_source_is_refused(tmp_path: Path, export: Any, name: str) -> None:
    build_model().save_pretrained(tmp_path / "source")
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "source" / name).unlink(missing_ok=True)
    (tmp_path / "source" / name).symlink_to(tmp_path / "secret")
    with pytest.raises(UnsafeNameError, match="outside"):
        export(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_that_a_checkpoint_does_not_name_are_not_exported(run: Path, tmp_path: Path) -> None:
    for folder in (run / "step_2", run / "step_2/model"):
        (folder / "tokenizer_config.json").write_text('{"secret": 1}')
    assert "tokenizer_config.json" not in names(rankless.export_model(run, tmp_path / "out"))


def test_of_the_folder_of_a_tokenizer_only_its_files_are_taken(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    build_tokenizer().save_pretrained(folder)
    expected = names(folder)
    build_model().save_pretrained(folder, max_shard_size="1KB")
    for name in (".env", "id_rsa", "adapter_config.json", "pytorch_model.bin.index.json", "vocab/secret.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("secret")
    os.mkfifo(folder / "tokenizer.model")
    out = rankless.export_model(run, tmp_path / "out", tokenizer=folder)
    assert names(out) == expected | {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert transformers.GenerationConfig.from_pretrained(out).max_new_tokens == 7


def test_a_tokenizer_with_several_templates_is_exported_whole(run: Path, tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = {"default": "a", "tool_use": "b"}
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    for number, given in enumerate([tokenizer, tmp_path / "tokenizer"]):
        out = rankless.export_model(run, tmp_path / f"out{number}", tokenizer=given)
        assert transformers.AutoTokenizer.from_pretrained(out).chat_template == {"default": "a", "tool_use": "b"}


def export_differently(run: str, folder: str, argument: str, card: str) -> tuple[str, float]:
    started, is_second = time.monotonic(), dist.get_rank() == 1
    options: dict[str, Any] = {
        "card": {"card": "/missing" if is_second else card},
        "tag": {"tag": "step_1" if is_second else "step_2"},
        "size": {"max_shard_size": "1KB" if is_second else "2KB"},
        "folder": {},
    }[argument]
    if argument == "folder" and is_second:
        folder += "2"
    with pytest.raises(RanklessError) as caught:
        rankless.export_model(run, folder, **options)
    return str(caught.value), time.monotonic() - started


@pytest.mark.parametrize("argument", ["card", "tag", "size", "folder"])
def test_ranks_with_other_arguments_fail_together(ranks: Ranks, run: Path, tmp_path: Path, argument: str) -> None:
    card = tmp_path / "card.md"
    card.write_text("# card")
    for message, seconds in ranks(2, export_differently, str(run), str(tmp_path / "out"), argument, str(card)):
        assert "rank 1" in message
        assert seconds < 60
    assert not (tmp_path / "out").exists()


def test_a_listener_that_raises_changes_nothing(run: Path, tmp_path: Path) -> None:
    def fail(event: object) -> None:
        raise ValueError(event)

    assert rankless.export_model(run, tmp_path / "out", on_event=fail).exists()
    assert rankless.convert(run, tmp_path / "converted", to="native", on_event=fail).exists()


@pytest.mark.usefixtures("without_garbage")
@pytest.mark.parametrize(
    "content", [b"[1]", b"3", b"null", b"{", b"[" * 5000, b"9" * 5000, b"\xff", b'{"a": 1, "a": 2}']
)
def test_a_hostile_adapter_config_is_an_error_of_ours(tmp_path: Path, content: bytes) -> None:
    adapted = peft.get_peft_model(build_model(), peft.LoraConfig(target_modules=["c_attn"]))
    adapted.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter/adapter_config.json").write_bytes(content)
    try:
        rankless.export_model(tmp_path / "adapter", tmp_path / "out")
    except RanklessError:
        assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("without_garbage")
def test_a_configuration_cannot_take_much_more_space_than_it_has() -> None:
    for depth in (480, 900):
        hostile = b"[" * depth + b"0," * 100_000 + b"0" + b"]" * depth
        assert len(set_config_dtype(hostile, "bfloat16")) < 3 * len(hostile)
        nested = b'{"a_config":' * depth + b"0" + b"}" * depth
        assert set_config_dtype(nested, "bfloat16")


def test_a_source_that_is_replaced_meanwhile_is_not_exported_with_the_old_card(run: Path, tmp_path: Path) -> None:
    class Tokenizer:
        def save_pretrained(self, folder: str) -> None:
            Path(folder, "tokenizer.json").write_text("{}")
            rankless.save_checkpoint(run, "step_2", build_model(), step=3, overwrite=True)

    with pytest.raises(CheckpointReplacedError):
        rankless.export_model(run, tmp_path / "out", tag="step_2", tokenizer=Tokenizer())
    assert not (tmp_path / "out").exists()


def test_a_fifo_is_refused(run: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for argument in ("card", "config"):
        with pytest.raises(InvalidArgumentError, match="is not a file"):
            rankless.export_model(run, tmp_path / "out", **{argument: tmp_path / "fifo"})
