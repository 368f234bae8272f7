"""Tests ``rankless.nxd``: the guide's samples run as they are written, except for the import."""

import inspect
import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch import nn

import rankless
from rankless import nxd
from rankless.errors import InvalidArgumentError, MismatchError, NoCheckpointError
from tests.helpers.nxd_files import rank_file_name, save_rank_file
from tests.helpers.nxd_training import Net, equal_models, make_training, train_step, write_nxd


def test_the_samples_of_the_guide(tmp_path: Path) -> None:
    args = Namespace(checkpoint_dir=str(tmp_path / "ckpt"), loading_step=2)
    model, optimizer, lr_scheduler = make_training(0)
    for total_steps, batch_idx in ((1, 0), (2, 1)):
        train_step(model, optimizer, total_steps)
        lr_scheduler.step()
        nxd.save_checkpoint(
            args.checkpoint_dir,  # checkpoint path
            tag=f"step_{total_steps}",  # tag, sub-directory under checkpoint path
            model=model,
            optimizer=optimizer,
            scheduler=lr_scheduler,
            user_content={"total_steps": total_steps, "batch_idx": batch_idx, "cli_args": args.__dict__},
            use_xser=True,
            async_save=True,
        )
    nxd.finalize_checkpoint()
    whole = [tensor.clone() for tensor in model.state_dict().values()]
    other, its, scheduler = make_training(1)
    args.loading_step = 2
    user_content = nxd.load_checkpoint(
        args.checkpoint_dir,  # checkpoint path
        tag=f"step_{args.loading_step}",  # tag
        model=other,
        optimizer=its,
        scheduler=scheduler,
    )
    assert user_content == {
        "total_steps": 2,
        "batch_idx": 1,
        "cli_args": {"checkpoint_dir": args.checkpoint_dir, "loading_step": 2},
    }
    assert equal_models(other, model)
    train_step(model, optimizer, 3)
    train_step(other, its, 3)
    assert equal_models(other, model)
    nxd.save_checkpoint(
        args.checkpoint_dir,  # checkpoint path
        tag=f"step_{total_steps + 1}",  # tag, sub-directory under checkpoint path
        model=model,
        use_xser=True,
        async_save=True,
    )
    nxd.finalize_checkpoint()
    third, its, scheduler = make_training(2)
    user_content = nxd.load_checkpoint(
        args.checkpoint_dir,  # checkpoint path
        tag="step_2",
        model=third,
        optimizer=its,
        scheduler=scheduler,
    )
    assert all(torch.equal(left, right) for left, right in zip(third.state_dict().values(), whole, strict=True))
    third, _, _ = make_training(2)
    assert nxd.load_checkpoint(args.checkpoint_dir, model=third) is None
    assert equal_models(third, model)


def test_the_signatures_are_those_of_nxd() -> None:
    """Positional order and defaults, as of 0.18."""
    saved = list(inspect.signature(nxd.save_checkpoint).parameters.values())
    assert [item.name for item in saved[:13]] == [
        *("checkpoint_dir_str", "tag", "model", "optimizer", "scheduler", "user_content", "num_workers", "use_xser"),
        *("num_kept_ckpts", "async_save", "zero1_optimizer", "use_zero1_dcp", "avoid_saving_lower_precision_weights"),
    ]
    assert [item.default for item in saved[2:13]] == [
        None,
        None,
        None,
        None,
        8,
        False,
        None,
        False,
        False,
        False,
        False,
    ]
    loaded = list(inspect.signature(nxd.load_checkpoint).parameters.values())
    assert [item.name for item in loaded[:8]] == [
        *("path", "tag", "model", "optimizer", "scheduler", "num_workers", "strict", "use_zero1_dcp"),
    ]
    assert [item.default for item in loaded[1:8]] == [None, None, None, None, 8, True, False]


def test_everything_that_xla_needed_is_taken_and_changes_nothing(tmp_path: Path) -> None:
    model, _, _ = make_training(0)
    for tag, more in (
        ("a", {}),
        (7, {"num_workers": 1, "zero1_optimizer": True, "use_zero1_dcp": True, "use_xser": True}),
    ):
        nxd.save_checkpoint(
            path=tmp_path, tag=tag, model=model, avoid_saving_lower_precision_weights=bool(more), **more
        )
    other, _, _ = make_training(1)
    nxd.load_checkpoint(checkpoint_dir_str=tmp_path, tag=7, model=other, use_zero1_dcp=True, num_workers=2)
    assert equal_models(other, model)
    with pytest.raises(InvalidArgumentError, match="pass one folder"):
        nxd.save_checkpoint(tag="a", model=model)
    with pytest.raises(InvalidArgumentError, match="needs a tag"):
        nxd.save_checkpoint(tmp_path, model=model)


def test_retention_and_what_is_there(tmp_path: Path) -> None:
    model, _, _ = make_training(0)
    assert not nxd.has_checkpoint(tmp_path)
    for number in range(4):
        nxd.save_checkpoint(tmp_path, f"step_{number}", model, num_kept_ckpts=2)
    assert [info.tag for info in rankless.list_checkpoints(tmp_path)] == ["step_2", "step_3"]
    nxd.save_checkpoint(tmp_path, "step_3", model, num_kept_ckpts=-1)
    nxd.save_checkpoint(tmp_path, "step_4", model, num_kept_ckpts=-1)
    assert len(rankless.list_checkpoints(tmp_path)) == 3
    assert nxd.has_checkpoint(tmp_path)
    with pytest.raises(NoCheckpointError, match="step_9"):
        nxd.load_checkpoint(tmp_path, "step_9", model)


@pytest.mark.parametrize("masters", [False, True])
def test_what_nxd_has_written_is_gone_on_from_and_new_checkpoints_lie_beside(tmp_path: Path, masters: bool) -> None:
    """ZeRO-1 of two ranks, into one plain process; buffers and frozen parameters, too: NxD itself loses them."""
    model, optimizer, _ = make_training(0)
    for number in (1, 2):
        train_step(model, optimizer, number)
    write_nxd(tmp_path / "step_2", model, optimizer, masters=masters)
    assert nxd.has_checkpoint(tmp_path)
    other, its, _ = make_training(1)
    assert nxd.load_checkpoint(tmp_path, model=other, optimizer=its) == {"total_steps": 2}
    assert equal_models(other, model)
    train_step(model, optimizer, 3)
    train_step(other, its, 3)
    assert equal_models(other, model)
    nxd.save_checkpoint(tmp_path, "step_3", other, its)
    third, its, _ = make_training(2)
    nxd.load_checkpoint(tmp_path, model=third, optimizer=its)
    assert equal_models(third, model)
    only, _, _ = make_training(3)
    nxd.load_checkpoint(tmp_path, "step_2", only)
    assert not equal_models(only, model)


def test_a_layout_from_a_live_model(tmp_path: Path) -> None:
    """As NxD's and Megatron's layers note it on their parameters."""
    model, optimizer, _ = make_training(0)
    train_step(model, optimizer, 1)
    for item, dim in ((model.a.weight, 0), (model.a.bias, 0), (model.b.weight, 1)):
        item.tensor_model_parallel, item.partition_dim, item.partition_stride = True, dim, 1
    spec = json.loads(nxd.sharding_of(model, optimizer))
    assert {"b.weight": 1, "a.bias": 0}.items() <= {rule["match"]: rule.get("dim") for rule in spec["rules"]}.items()
    assert spec["not_trained"] == ["buf", "frozen"]
    groups = torch.optim.SGD([{"params": [model.b.bias]}, {"params": [model.a.bias, model.a.weight]}])
    assert json.loads(nxd.sharding_of(model, groups))["groups"] == [["b.bias"], ["a.bias", "a.weight"]]
    for tp in range(5):
        tensors = dict(model.state_dict())
        own = {
            "a.weight": tensors["a.weight"].chunk(5)[tp],
            "a.bias": tensors["a.bias"].chunk(5)[tp],
            "b.weight": tensors["b.weight"].chunk(5, 1)[tp],
        }
        save_rank_file(tmp_path / "s" / "model" / rank_file_name(tp=tp), tensors | own)
    other = Net(5)
    with pytest.raises(InvalidArgumentError, match=r"5 tensor-parallel ranks.*layout"):
        nxd.load_checkpoint(tmp_path, "s", model=other)
    (tmp_path / "layout.json").write_text(nxd.sharding_of(model, optimizer))
    nxd.load_checkpoint(tmp_path, "s", model=other, layout=tmp_path / "layout.json")
    assert equal_models(other, model)


def test_a_model_of_other_shapes_is_refused_before_anything_changes(tmp_path: Path) -> None:
    model, optimizer, _ = make_training(0)
    train_step(model, optimizer, 1)
    write_nxd(tmp_path / "step_1", model, optimizer)
    other = Net(1)
    other.b = nn.Linear(5, 4)
    before = {key: tensor.clone() for key, tensor in other.state_dict().items()}
    with pytest.raises((MismatchError, InvalidArgumentError)):
        nxd.load_checkpoint(tmp_path, model=other)
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in before.items())
