"""Tests models with PEFT adapters: no saved directory makes transformers initialize missing weights."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import holdfast
from holdfast.errors import InvalidArgumentError
from tests.helpers.pool import Ranks
from tests.helpers.trainer_runs import Numbers, launch
from tests.helpers.trainer_runs import make_model as base_model


def lora() -> nn.Module:
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(base_model(), config)


def injected() -> nn.Module:
    """transformers' own way: the class stays that of the model."""
    model = base_model()
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False))
    return model


def inner() -> nn.Module:
    """What is inside of peft's wrappers has the adapters, too."""
    return lora().base_model.model


def prompt() -> nn.Module:
    return peft.get_peft_model(base_model(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))


def prefix() -> nn.Module:
    return peft.get_peft_model(base_model(), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))


class Wrapper(nn.Module):
    """Hands on the configuration of what it wraps, as models with value heads do."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = base_model()
        self.config = self.inside.config


ADAPTED = [lora, injected, inner, prompt, prefix]


def cannot_be_opened(folder: Path) -> bool:
    with pytest.raises((OSError, ValueError), match=r"config\.json"):
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    return True


@pytest.mark.parametrize("build", [*ADAPTED, Wrapper])
def test_the_configuration_of_another_model_is_not_written(tmp_path: Path, build: Callable[[], nn.Module]) -> None:
    model = build()
    holdfast.save_checkpoint(tmp_path / "run", "s", model)
    holdfast.save_model(model, tmp_path / "part", shard=True)
    assert cannot_be_opened(tmp_path / "run/s/model")
    assert cannot_be_opened(tmp_path / "part")
    other = build()
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    holdfast.load_checkpoint(tmp_path / "run", model=other)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("build", ADAPTED)
@pytest.mark.parametrize("old", [False, True])
def test_it_is_not_converted_into_a_hugging_face_folder(
    tmp_path: Path, build: Callable[[], nn.Module], old: bool
) -> None:
    """Nor one that was saved with the configuration of the base model beside it."""
    model = build()
    holdfast.save_checkpoint(tmp_path / "run", "s", model)
    if old:
        base_model().config.save_pretrained(tmp_path / "run/s/model")
    with pytest.raises(InvalidArgumentError, match="PEFT adapters"):
        holdfast.convert(tmp_path / "run", tmp_path / "hf", to="hf")
    assert not (tmp_path / "hf").exists()
    holdfast.convert(tmp_path / "run", tmp_path / "again/s", to="native")
    assert cannot_be_opened(tmp_path / "again/s/model")
    file = holdfast.convert(tmp_path / "run", tmp_path / "all.safetensors", to="safetensors")
    actual, state = load_file(file), model.state_dict()
    assert {state[name].data_ptr() for name in actual} == {value.data_ptr() for value in state.values()}
    assert all(torch.equal(value, state[name]) for name, value in actual.items())


def trainer(path: Path, steps: int) -> Any:
    from holdfast.transformers import Trainer

    arguments = transformers.TrainingArguments(
        output_dir=str(path),
        per_device_train_batch_size=2,
        max_steps=steps,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
    )
    return Trainer(lora(), arguments, train_dataset=Numbers())


def trained(path: Path) -> dict[str, Any]:
    with launch(), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run = trainer(path, 4)
        run.train()
        run.save_model(str(path / "adapter"))
    return {
        "warnings": [str(warning.message) for warning in seen if "PEFT adapters" in str(warning.message)],
        "weights": {name: value.clone() for name, value in run.model.state_dict().items()},
    }


def resumed(path: Path) -> dict[str, torch.Tensor]:
    with launch():
        run = trainer(path, 4)
        run.train(resume_from_checkpoint=str(path / "checkpoint-2"))
    return {name: value.clone() for name, value in run.model.state_dict().items()}


@pytest.mark.parametrize("n", [1, 2])
def test_the_trainer_warns_once_and_save_model_writes_the_adapter(ranks: Ranks, tmp_path: Path, n: int) -> None:
    results = ranks(n, trained, tmp_path)
    assert [len(item["warnings"]) for item in results] == [1, 0][:n]
    assert "trainer.save_model()" in results[0]["warnings"][0]
    for step in (2, 4):
        assert cannot_be_opened(tmp_path / f"checkpoint-{step}/model")
    opened = peft.PeftModel.from_pretrained(base_model(), tmp_path / "adapter").state_dict()
    weights = results[0]["weights"]
    assert opened.keys() == weights.keys()
    assert all(torch.equal(opened[name], value) for name, value in weights.items())
    again = ranks(n, resumed, tmp_path)[0]
    assert all(torch.equal(again[name], value) for name, value in weights.items())


@pytest.mark.parametrize("kind", ["output_dir", "resume_from_checkpoint"])
def test_addresses_are_no_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    from holdfast.transformers import Trainer

    monkeypatch.chdir(tmp_path)
    folder = "s3://bucket/run" if kind == "output_dir" else str(tmp_path / "run")
    arguments = transformers.TrainingArguments(output_dir=folder, report_to=[], use_cpu=True, disable_tqdm=True)
    with pytest.raises(InvalidArgumentError, match="object stores are not supported"):
        Trainer(model=base_model(), args=arguments, train_dataset=Numbers()).train("s3://bucket/run")
    assert not (tmp_path / "s3:").exists()
