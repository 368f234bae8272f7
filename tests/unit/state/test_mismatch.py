"""Tests that all mismatches are found before any change, and are reported together."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rankless
from rankless.errors import (
    InvalidArgumentError,
    MismatchError,
    NoCheckpointError,
    OptimizerMismatchError,
    StateError,
    UnsupportedTensorError,
    UnsupportedValueError,
)
from tests.helpers.training import Net, make_optimizer, start_run, train_run


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    run = train_run("plain")
    rankless.save_checkpoint(tmp_path, "s", run.model, run.optimizer, run.scheduler)
    return tmp_path


def test_every_mismatch_is_named_at_once_and_nothing_is_changed(saved: Path) -> None:
    state = {name: torch.full_like(value, 7) for name, value in Net().state_dict().items()}
    del state["scale"]
    del state["head.weight"]  # tied: the checkpoint knows it under its other name
    state["norm.weight"] = torch.full((5,), 7.0)
    state["norm.bias"] = torch.full((6,), 7.0, dtype=torch.float64)
    state["new"] = torch.full((1,), 7.0)
    with pytest.raises(MismatchError) as caught:
        rankless.load_checkpoint(saved, model=state)
    message = str(caught.value)
    assert "missing in the checkpoint: new" in message
    assert "only in the checkpoint: scale" in message
    assert "norm.weight: shape [6] in the checkpoint, [5] here" in message
    assert "norm.bias: dtype F32 in the checkpoint, F64 here" in message
    assert "body.0.weight" not in message
    assert all((value == 7).all() for value in state.values())


def test_not_strict_loads_what_matches_and_reports_the_rest(saved: Path) -> None:
    state = {name: torch.zeros_like(value) for name, value in Net().state_dict().items()}
    del state["scale"]
    state["new"] = torch.full((1,), 7.0)
    result = rankless.restore(saved, model=state, strict=False)
    assert result.missing == ("new",)
    assert result.unexpected == ("scale",)
    assert torch.equal(state["body.0.weight"], train_run("plain").model.body[0].weight)
    assert state["new"] == 7


def test_weights_that_are_tied_in_the_checkpoint_alone_are_both_filled(saved: Path) -> None:
    model = Net()
    model.head.weight = nn.Parameter(torch.zeros(11, 6))
    rankless.load_checkpoint(saved, model=model)
    assert model.head.weight is not model.embed.weight
    assert torch.equal(model.head.weight, train_run("plain").model.embed.weight)
    assert torch.equal(model.embed.weight, train_run("plain").model.embed.weight)


def test_map_dtype_casts_as_copy_does(saved: Path) -> None:
    model = Net().to(torch.bfloat16)
    rankless.load_checkpoint(saved, model=model, cast_dtype=True)
    expected = train_run("plain").model.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name].to(value.dtype)), name


def test_a_model_on_meta_is_loaded_before_its_optimizer_is_made(saved: Path) -> None:
    with torch.device("meta"):
        model = Net()
    with pytest.raises(MismatchError, match="meta device"):
        rankless.load_checkpoint(saved, model=model, optimizer=make_optimizer("adamw", model))
    with pytest.raises(MismatchError, match="meta device"):
        rankless.load_checkpoint(saved, model=model.state_dict())


def test_another_optimizer_class_is_an_error(saved: Path) -> None:
    model = Net()
    optimizer = make_optimizer("sgd", model)
    with pytest.raises(OptimizerMismatchError, match="state of AdamW, the optimizer is SGD"):
        rankless.load_checkpoint(saved, model=model, optimizer=optimizer)


def test_other_groups_are_an_error_that_names_the_parameters(saved: Path) -> None:
    model = Net()
    trainable = [p for p in model.parameters() if p.requires_grad]
    with pytest.raises(OptimizerMismatchError, match=r"group 0 holds 'scale' and .*, which are in different groups"):
        rankless.load_checkpoint(saved, model=model, optimizer=torch.optim.AdamW(trainable))
    shifted = [{"params": trainable[:1]}, {"params": trainable[1:]}]
    with pytest.raises(OptimizerMismatchError, match=r"group 1 holds .*, which are in different groups"):
        rankless.load_checkpoint(saved, model=model, optimizer=torch.optim.AdamW(shifted))


def test_what_was_not_saved_cannot_be_loaded(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", Net())
    run = start_run("plain")
    with pytest.raises(MismatchError, match=r"(?s)missing.*: optimizer.*missing.*: scheduler"):
        rankless.load_checkpoint(tmp_path, model=run.model, optimizer=run.optimizer, scheduler=run.scheduler)


def test_no_checkpoint_is_a_file_not_found_error_that_names_those_there_are(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match="there is no checkpoint in"):
        rankless.load_checkpoint(tmp_path / "nothing", model=Net())
    with pytest.raises(FileNotFoundError, match=r"no checkpoint 'step_9' in .*; there is s"):
        rankless.load_checkpoint(saved, "step_9", model=Net())
    assert not rankless.has_checkpoint(tmp_path / "nothing")
    assert rankless.list_checkpoints(tmp_path / "nothing") == []


@pytest.mark.parametrize("tag", ["", "a/b", "..", ".hidden", "a\\b", "x" * 300, "a\nb", 7, None])
def test_a_tag_that_is_no_folder_name_is_refused(tmp_path: Path, tag: object) -> None:
    with pytest.raises(InvalidArgumentError, match="tag"):
        rankless.save_checkpoint(tmp_path, tag, Net())  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", ["5 parsecs", "", "-1GB", 0, "GB"])
def test_a_size_that_is_no_size_is_refused(tmp_path: Path, size: object) -> None:
    with pytest.raises(InvalidArgumentError, match="size"):
        rankless.save_checkpoint(tmp_path, "s", Net(), max_shard_size=size)  # type: ignore[arg-type]


def test_an_address_of_an_object_store_is_refused_clearly() -> None:
    with pytest.raises(InvalidArgumentError, match="in no store that rankless knows"):
        rankless.save_checkpoint("hdfs://host/run", "s", Net())


def test_values_that_cannot_be_stored_are_all_named_and_nothing_is_left(tmp_path: Path) -> None:
    content = {"ok": 1, "model": Net(), "args": {"callback": print, "items": [1, object()]}}
    with pytest.raises(UnsupportedValueError) as caught:
        rankless.save_checkpoint(tmp_path, "s", Net(), user_content=content)
    assert "user_content.model: tests.helpers.training.Net" in str(caught.value)
    assert "user_content.args.callback: builtins.builtin_function_or_method" in str(caught.value)
    assert "user_content.args.items[1]: builtins.object" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_tensors_that_cannot_be_stored_are_named(tmp_path: Path) -> None:
    for tensor in (torch.zeros(2, dtype=torch.complex128), torch.eye(3).to_sparse(), torch.empty(2, device="meta")):
        with pytest.raises(UnsupportedTensorError, match="model tensor 'odd'"):
            rankless.save_checkpoint(tmp_path, "s", {"odd": tensor})


def test_an_optimizer_of_another_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"parameter 0 of the optimizer's group 0"):
        rankless.save_checkpoint(tmp_path, "s", Net(), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1))


def test_things_that_are_no_training_objects_are_refused(tmp_path: Path) -> None:
    for objects in ({"model": 3}, {"optimizer": 3}, {"scheduler": 3}, {"step": "x"}, {"metrics": {"loss": "low"}}):
        with pytest.raises(InvalidArgumentError):
            rankless.save_checkpoint(tmp_path, "s", **objects)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [True, "7", 10**30, 1j, [1]])
def test_a_step_that_is_no_number_is_refused_before_anything_is_written(tmp_path: Path, step: object) -> None:
    with pytest.raises(InvalidArgumentError, match="step"):
        rankless.save_checkpoint(tmp_path, "s", Net(), step=step)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("metrics", [{"a": 10**400}, {"\ud800": 1.0}, {3: 1.0}, {"step": True}])
def test_metrics_that_cannot_be_noted_are_refused(tmp_path: Path, metrics: dict) -> None:
    with pytest.raises(InvalidArgumentError):
        rankless.save_checkpoint(tmp_path, "s", Net(), metrics=metrics)


def test_numbers_of_numpy_and_metrics_that_are_not_finite_are_noted(tmp_path: Path) -> None:
    metrics = {"loss": np.float32(0.5), "worst": float("inf")}
    info = rankless.save_checkpoint(tmp_path, "s", Net(), step=np.int64(3), metrics=metrics).wait()
    assert (info.step, info.metrics) == (3, {"loss": 0.5, "worst": None})
    assert rankless.list_checkpoints(tmp_path) == [info]


def test_names_and_shapes_beyond_all_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="lone surrogates"):
        rankless.save_checkpoint(tmp_path, "s", {"\ud800": torch.zeros(1)})
    with pytest.raises(UnsupportedTensorError, match="65 dimensions"):
        rankless.save_checkpoint(tmp_path, "s", {"w": torch.zeros((1,) * 65)})


def test_a_tensor_that_a_hook_makes_up_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_state_dict_post_hook(lambda _, state, *__: state.update({"made_up": torch.ones(1)}))
    with pytest.raises(StateError, match="made_up"):
        rankless.save_checkpoint(tmp_path, "s", model)


def test_a_layer_of_another_size_is_blamed_not_its_optimizer_state(tmp_path: Path) -> None:
    def make(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(3, width))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    rankless.save_checkpoint(tmp_path, "s", *make(4))
    model, optimizer = make(5)
    with pytest.raises(MismatchError, match=r"(?s)0\.weight: shape \[4, 3\].*0\.bias: shape \[4\]"):
        rankless.load_checkpoint(tmp_path, model=model, optimizer=optimizer)


def test_another_scheduler_is_found_before_anything_is_changed(tmp_path: Path) -> None:
    schedules = torch.optim.lr_scheduler

    def make(links: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if links == 1:
            return model, optimizer, schedules.StepLR(optimizer, 2)
        chain = [schedules.ConstantLR(optimizer) for _ in range(links)]
        return model, optimizer, schedules.SequentialLR(optimizer, chain, milestones=list(range(1, links)))

    model, optimizer, scheduler = make(3)
    rankless.save_checkpoint(tmp_path, "s", model, optimizer, scheduler)
    misfits = [(2, "a chain of 3 in the checkpoint, of 2 here"), (1, "of SequentialLR, this one is StepLR")]
    for links, words in misfits:
        model, optimizer, scheduler = make(links)
        before = model.weight.clone()
        with pytest.raises(MismatchError, match=words):
            rankless.load_checkpoint(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler)
        assert torch.equal(model.weight, before)
