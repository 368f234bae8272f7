"""Tests models with PEFT adapters: no saved directory makes transformers initialize missing weights."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import rankless
from rankless.errors import InvalidArgumentError
from tests.helpers.pool import Ranks
from tests.helpers.trainer_runs import Numbers, launch
from tests.helpers.trainer_runs import make_model as base_model


def lora(base: nn.Module | None = None) -> nn.Module:
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(2)
    return peft.get_peft_model(base_model() if base is None else base, config)


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
    rankless.save_checkpoint(tmp_path / "run", "s", model)
    rankless.save_model(model, tmp_path / "part", shard=True)
    assert cannot_be_opened(tmp_path / "run/s/model")
    assert cannot_be_opened(tmp_path / "part")
    other = build()
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    rankless.load_checkpoint(tmp_path / "run", model=other)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("build", ADAPTED)
@pytest.mark.parametrize("old", [False, True])
def test_it_is_not_converted_into_a_hugging_face_folder(
    tmp_path: Path, build: Callable[[], nn.Module], old: bool
) -> None:
    """Nor one that was saved with the configuration of the base model beside it."""
    model = build()
    rankless.save_checkpoint(tmp_path / "run", "s", model)
    if old:
        base_model().config.save_pretrained(tmp_path / "run/s/model")
    with pytest.raises(InvalidArgumentError, match="PEFT adapters"):
        rankless.convert(tmp_path / "run", tmp_path / "hf", to="hf")
    assert not (tmp_path / "hf").exists()
    rankless.convert(tmp_path / "run", tmp_path / "again/s", to="native")
    assert cannot_be_opened(tmp_path / "again/s/model")
    file = rankless.convert(tmp_path / "run", tmp_path / "all.safetensors", to="safetensors")
    actual, state = load_file(file), model.state_dict()
    assert {state[name].data_ptr() for name in actual} == {value.data_ptr() for value in state.values()}
    assert all(torch.equal(value, state[name]) for name, value in actual.items())


def trainer(path: Path, steps: int, options: dict[str, Any]) -> Any:
    from rankless.transformers import Trainer

    arguments = transformers.TrainingArguments(
        output_dir=str(path),
        per_device_train_batch_size=4 // dist.get_world_size(),
        max_steps=steps,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        **options.pop("arguments", {}),
    )
    if arguments.fsdp and dist.get_world_size() > 1:
        # Accelerate leaves FSDP to accelerators, and torch has it on CPUs, too.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    base = transformers.AutoModelForCausalLM.from_pretrained(path.parent / "base")
    return Trainer(lora(base), arguments, train_dataset=Numbers(), **options)


def whole_weights(wrapped: nn.Module) -> dict[str, torch.Tensor]:
    """The weights, under FSDP put together by torch."""
    return get_model_state_dict(wrapped, options=StateDictOptions(full_state_dict=True))


def trained(path: Path, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """The losses of all steps and the weights of a run, resumed from the latest checkpoint if there is one."""
    with launch(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for part in ("torch", "transformers", "accelerate", "peft"):
            warnings.filterwarnings("ignore", module=part)
        run = trainer(path, steps, dict(options))
        run.train(resume_from_checkpoint=rankless.has_checkpoint(path))
    return {
        "losses": [entry["loss"] for entry in run.state.log_history if "loss" in entry],
        "weights": {name: value.clone() for name, value in whole_weights(run.model_wrapped).items()},
        "kind": type(run.model_wrapped).__name__,
    }


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())


@pytest.mark.parametrize("adapter_only", [False, True])
def test_what_the_trainer_saves_opens_in_peft_and_in_transformers(
    ranks: Ranks, tmp_path: Path, adapter_only: bool
) -> None:
    base_model().save_pretrained(tmp_path / "base")
    result = ranks(2, trained, tmp_path / "run", 2, {"adapter_only": adapter_only})[0]
    folder = tmp_path / "run/checkpoint-2"
    assert (folder / "model").exists() is not adapter_only
    opened = peft.PeftModel.from_pretrained(base_model(), folder / "adapter")
    assert same(opened.state_dict(), result["weights"])
    by_transformers = transformers.AutoModelForCausalLM.from_pretrained(folder / "adapter")
    weights = {name.removeprefix("base_model.model."): value for name, value in result["weights"].items()}
    assert same(by_transformers.state_dict(), weights)
    if not adapter_only:
        assert cannot_be_opened(folder / "model")


@pytest.mark.parametrize("adapter_only", [False, True])
@pytest.mark.parametrize("async_save", [False, True])
def test_a_run_resumes_as_if_it_had_not_stopped(
    ranks: Ranks, tmp_path: Path, adapter_only: bool, async_save: bool
) -> None:
    base_model().save_pretrained(tmp_path / "base")
    options = {"adapter_only": adapter_only, "async_save": async_save}
    whole = ranks(2, trained, tmp_path / "whole", 4, options)[0]
    ranks(2, trained, tmp_path / "run", 2, options)
    resumed = ranks(2, trained, tmp_path / "run", 4, options)[0]
    assert resumed["losses"] == whole["losses"]
    assert same(resumed["weights"], whole["weights"])


@pytest.mark.parametrize("adapter_only", [False, True])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_resumes_on_another_number_of_ranks(
    ranks: Ranks, tmp_path: Path, adapter_only: bool, before: int, after: int
) -> None:
    base_model().save_pretrained(tmp_path / "base")
    options = {"adapter_only": adapter_only}
    whole = ranks(1, trained, tmp_path / "whole", 4, options)[0]
    ranks(before, trained, tmp_path / "run", 2, options)
    resumed = ranks(after, trained, tmp_path / "run", 4, options)[0]
    assert resumed["losses"] == pytest.approx(whole["losses"], rel=1e-4)
    for name, value in whole["weights"].items():
        torch.testing.assert_close(resumed["weights"][name], value, rtol=1e-3, atol=1e-5)


#: FSDP2 in Accelerate.
FSDP = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "sync_module_states": False, "transformer_layer_cls_to_wrap": ["GPT2Block"]},
}


@pytest.mark.parametrize("adapter_only", [False, True])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_under_fsdp_a_run_resumes_on_another_number_of_ranks(
    ranks: Ranks, tmp_path: Path, adapter_only: bool, before: int, after: int
) -> None:
    base_model().save_pretrained(tmp_path / "base")
    options = {"adapter_only": adapter_only, "arguments": FSDP}
    whole = ranks(1, trained, tmp_path / "whole", 4, {})[0]
    saved = ranks(before, trained, tmp_path / "run", 2, options)[0]
    resumed = ranks(after, trained, tmp_path / "run", 4, options)[0]
    assert "FSDPPeftModelForCausalLM" in {saved["kind"], resumed["kind"]}
    assert resumed["losses"] == pytest.approx(whole["losses"], rel=1e-4)
    opened = peft.PeftModel.from_pretrained(base_model(), tmp_path / "run/checkpoint-4/adapter")
    assert same(opened.state_dict(), resumed["weights"])


def test_the_best_adapter_is_loaded_at_the_end(ranks: Ranks, tmp_path: Path) -> None:
    base_model().save_pretrained(tmp_path / "base")
    arguments = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "greater_is_better": True}
    arguments["metric_for_best_model"] = "eval_loss"  # the highest loss is that of the first evaluation
    options = {"adapter_only": True, "eval_dataset": Numbers(), "arguments": arguments}
    result = ranks(1, trained, tmp_path / "run", 4, options)[0]
    best = peft.PeftModel.from_pretrained(base_model(), tmp_path / "run/checkpoint-2/adapter")
    assert same(best.state_dict(), result["weights"])


def trained_sharing(*arguments: Any) -> dict[str, Any]:
    with mock.patch("rankless.save.folder_output._MIN_SHARED", 0):
        return trained(*arguments)


def test_frozen_parameters_in_files_of_their_own_are_shared(ranks: Ranks, tmp_path: Path) -> None:
    base_model().save_pretrained(tmp_path / "base")
    ranks(1, trained_sharing, tmp_path / "run", 4, {"frozen": "apart"})
    files = list((tmp_path / "run/checkpoint-4/model").glob("*.safetensors"))
    assert sorted(file.stat().st_nlink for file in files) == [1, 2]


def test_a_model_without_adapters_is_not_saved_as_one(tmp_path: Path) -> None:
    from rankless.transformers import Trainer

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True, max_steps=1, save_steps=1
    )
    with pytest.raises(InvalidArgumentError, match="has no PEFT adapters"):
        Trainer(base_model(), arguments, train_dataset=Numbers(), adapter_only=True).train()


def test_output_dir_is_no_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rankless.transformers import Trainer

    monkeypatch.chdir(tmp_path)
    arguments = transformers.TrainingArguments(output_dir="s3://bucket/run", report_to=[], use_cpu=True)
    with pytest.raises(InvalidArgumentError, match="checkpoint_dir"):
        Trainer(model=base_model(), args=arguments, train_dataset=Numbers())
    assert not (tmp_path / "s3:").exists()
