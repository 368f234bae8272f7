"""Tests that runs of TRL's trainers with rankless's checkpoints resume as if they had not stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from rankless.transformers import CheckpointMixin
from tests.helpers.pool import Ranks
from tests.helpers.trainer_runs import launch

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

WORDS = ["<pad>", "<eos>", *(f"w{number}" for number in range(30))]
BATCH, STEPS, SAVED = 4, 6, 4

#: The trainers, and what else their configurations have.
TRAINERS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "sft": (trl.SFTTrainer, trl.SFTConfig, {}),
    "dpo": (trl.DPOTrainer, trl.DPOConfig, {}),
    "reward": (trl.RewardTrainer, trl.RewardConfig, {}),
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig, {"num_generations": 2, "max_completion_length": 6}),
}


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<eos>"}
    words = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, special["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def make_text(seed: int) -> str:
    return " ".join(WORDS[2 + (seed * 7 + place * 3) % 30] for place in range(5))


def make_rows(kind: str) -> Any:
    if kind == "sft":
        rows = [{"text": make_text(seed)} for seed in range(24)]
    elif kind == "grpo":
        rows = [{"prompt": make_text(seed)} for seed in range(24)]
    else:
        rows = [
            {"prompt": make_text(seed), "chosen": " " + make_text(seed + 1), "rejected": " " + make_text(seed + 2)}
            for seed in range(24)
        ]
    return datasets.Dataset.from_list(rows)


def make_base(kind: str, dropout: float = 0.0) -> transformers.PreTrainedModel:
    torch.manual_seed(1)
    config = transformers.Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_dropout=dropout,
        pad_token_id=0,
        eos_token_id=1,
        num_labels=1,
    )
    is_reward = kind == "reward"
    return (transformers.Qwen2ForSequenceClassification if is_reward else transformers.Qwen2ForCausalLM)(config)


def count_words(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion.split()))) for completion in completions]


def make(kind: str, path: Path, lora: bool, mixed_in: dict[str, Any], dropout: float = 0.1, **more: Any) -> Any:
    """A trainer; with dropout the random numbers matter."""
    trainer, config, settings = TRAINERS[kind]
    arguments = config(
        output_dir=str(path),
        per_device_train_batch_size=BATCH // dist.get_world_size(),
        max_steps=STEPS,
        save_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        gradient_checkpointing=False,
        **{**settings, **more},
    )
    options: dict[str, Any] = {"args": arguments, "processing_class": make_tokenizer(), **mixed_in}
    if kind == "grpo":
        options["reward_funcs"] = count_words
    if kind == "dpo" and not lora:
        options["ref_model"] = make_base(kind)
    if lora:
        task = "SEQ_CLS" if kind == "reward" else "CAUSAL_LM"
        options["peft_config"] = peft.LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], lora_dropout=dropout, task_type=task
        )
    mixed = type("Mixed", (CheckpointMixin, trainer), {})
    return mixed(make_base(kind, dropout), train_dataset=make_rows(kind), **options)


def train(
    kind: str, path: Path, resume: Path | None, lora: bool, mixed_in: dict[str, Any], more: dict[str, Any]
) -> dict[str, Any]:
    datasets.disable_progress_bars()
    with launch():
        trainer = make(kind, path, lora, mixed_in, **more)
        trainer.train(resume_from_checkpoint=resume and str(resume))
        return {
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            "weights": {name: value.clone() for name, value in trainer.model.state_dict().items()},
            "card": (path / "README.md").is_file(),
        }


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())


ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 9.0}


@pytest.mark.parametrize(
    ("kind", "lora", "mixed_in", "more"),
    [
        *((kind, False, {}, {}) for kind in TRAINERS),
        *((kind, True, {"adapter_only": only}, {}) for kind in TRAINERS for only in (False, True)),
        ("sft", False, {"async_save": True}, {"packing": True, "max_length": 8}),
        ("grpo", False, {}, {"num_iterations": 2}),
        ("grpo", False, {}, ADAPTIVE),  # TRL writes a file of its own into checkpoints
    ],
)
def test_a_run_resumes_as_if_it_had_not_stopped(
    ranks: Ranks, tmp_path: Path, kind: str, lora: bool, mixed_in: dict[str, Any], more: dict[str, Any]
) -> None:
    """Bit for bit, with dropout and with sampled completions."""
    checkpoint = tmp_path / "whole" / f"checkpoint-{SAVED}"
    whole = ranks(1, train, kind, tmp_path / "whole", None, lora, mixed_in, more)[0]
    resumed = ranks(1, train, kind, tmp_path / "resumed", checkpoint, lora, mixed_in, more)[0]
    assert len(whole["losses"]) == STEPS
    assert resumed["losses"] == whole["losses"]
    assert same(resumed["weights"], whole["weights"])
    assert whole["card"]
    assert {path.name for path in checkpoint.iterdir()} >= ({"adapter"} if lora else {"model"})
    assert (checkpoint / "model").exists() is not mixed_in.get("adapter_only", False)


@pytest.mark.parametrize("only", [False, True])
def test_it_resumes_on_another_number_of_ranks(ranks: Ranks, tmp_path: Path, only: bool) -> None:
    options = (True, {"adapter_only": only}, {"dropout": 0.0})
    whole = ranks(1, train, "sft", tmp_path / "whole", None, *options)[0]
    ranks(2, train, "sft", tmp_path / "run", None, *options)
    resumed = ranks(1, train, "sft", tmp_path / "run", tmp_path / f"run/checkpoint-{SAVED}", *options)[0]
    assert resumed["losses"] == pytest.approx(whole["losses"], rel=1e-4)
    loaded = peft.PeftModel.from_pretrained(make_base("sft"), tmp_path / f"run/checkpoint-{STEPS}/adapter")
    assert same(loaded.state_dict(), resumed["weights"])
