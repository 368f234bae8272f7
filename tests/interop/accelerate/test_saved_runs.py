"""Folders of Accelerate and of the ``Trainer`` have what the runs had in memory, bit for bit, on any ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate.data_loader import SeedableRandomSampler
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rankless
from rankless.errors import CorruptCheckpointError, OptimizerMismatchError
from tests.helpers.commands import assert_needs_no_torch
from tests.helpers.equality import equal_bits
from tests.helpers.pool import Ranks
from tests.helpers.processes import run_command
from tests.interop.accelerate.fixtures import (
    CASES,
    RANKS,
    SHARDED,
    STATES,
    TRAINER,
    SavedRun,
    make_scheduler,
    restore_generators,
    unpack_fixtures,
)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_fixtures(tmp_path_factory.mktemp("accelerate"))


@pytest.fixture(params=CASES)
def run(folder: Path, request: pytest.FixtureRequest) -> SavedRun:
    return SavedRun(folder, request.param)


def key_of(run: SavedRun, name: str) -> str:
    """The name of a parameter of the optimizer in the checkpoint: its number, in a checkpoint of whole tensors."""
    return name if run.case in SHARDED else str(run.params.index(name))


def assert_equal_to(run: SavedRun, checkpoint: rankless.Checkpoint) -> None:
    weights = {f"model/{name}": value for name, value in run.weights.items()}
    moments = {
        f"optimizer/{key_of(run, name)}/{state}": states[state]
        for name, states in run.states.items()
        for state in STATES
    }
    expected = weights | moments
    assert sorted(expected) == sorted(checkpoint)
    assert all(equal_bits(checkpoint[name], value) for name, value in expected.items())
    groups = checkpoint.values["optimizer"]["groups"]
    assert [group["params"] for group in groups] == [
        [key_of(run, name) for name in group["params"]] for group in run.groups
    ]
    for group, expected_group in zip(groups, run.groups, strict=True):
        settings = {key: list(value) if key == "betas" else value for key, value in group["settings"].items()}
        assert settings == {key: value for key, value in expected_group.items() if key != "params"}
    assert checkpoint.values["scheduler"]["state"] == run.scheduler


def test_the_tensors_and_settings_are_those_of_the_run(run: SavedRun) -> None:
    checkpoint = rankless.open(run.folder)
    assert checkpoint.format == ("trainer" if run.case in TRAINER else "accelerate")
    assert_equal_to(run, checkpoint)
    results = [*checkpoint.verify()]
    assert results
    assert not any(result.problem for result in results)


def test_values_have_the_form_of_those_of_our_own_trainer_and_accelerator(run: SavedRun) -> None:
    values = rankless.open(run.folder).values
    if run.case in TRAINER:
        assert values["user_content"]["trainer_state"]["global_step"] == 3
        assert values["user_content"]["trainer_state"]["log_history"][-1]["step"] == 3
    else:
        assert values["user_content"] == {"accelerate": {"step": 0}}
        assert values["stateful"] == {"custom_0": {"seen": 12, "name": "z"}}


def test_a_plain_training_is_restored_exactly(run: SavedRun) -> None:
    model = run.make_model()
    optimizer = run.make_optimizer(model)
    scheduler = make_scheduler(optimizer)
    result = rankless.restore(run.folder, model=model, optimizer=optimizer, scheduler=scheduler)
    assert result.missing == result.unexpected == ()
    assert result.exact[:3] == ("model", "optimizer", "scheduler")
    assert ("rng" in result.exact) == (RANKS[run.case] == 1)
    assert ("rng" in result.reconstructed) == (RANKS[run.case] > 1)
    assert all(equal_bits(value, run.weights[name]) for name, value in model.state_dict().items())
    for name, parameter in model.named_parameters():
        states = optimizer.state[parameter]
        assert all(equal_bits(states[state], run.states[name][state]) for state in STATES)
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in run.groups]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [g["weight_decay"] for g in run.groups]
    assert scheduler.last_epoch == run.scheduler["last_epoch"]


def test_each_rank_gets_the_states_of_its_generators(ranks: Ranks, run: SavedRun) -> None:
    for rank, states in enumerate(ranks(RANKS[run.case], restore_generators, run.folder)):
        expected = run.generators(rank)
        assert states["python"] == expected["python"]
        assert torch.equal(states["cpu"], expected["cpu"])
        assert all(np.array_equal(*pair) for pair in zip(states["numpy"], expected["numpy"], strict=True))


def restore_sharded(folder: Path, case: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    run = SavedRun(folder, case)
    model = run.make_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = run.make_optimizer(model)
    rankless.restore(run.folder, model=model, optimizer=optimizer)
    options = StateDictOptions(full_state_dict=True)
    states = get_optimizer_state_dict(model, optimizer, options=options)["state"]
    return get_model_state_dict(model, options=options), states


@pytest.mark.parametrize("size", [2, 3])
def test_sharded_models_are_restored_on_any_number_of_ranks(ranks: Ranks, run: SavedRun, size: int) -> None:
    weights, states = ranks(size, restore_sharded, run.folder.parent.parent, run.case)[0]
    assert all(equal_bits(value, run.weights[name]) for name, value in weights.items())
    for name, expected in run.states.items():
        assert all(equal_bits(states[name][state], expected[state]) for state in STATES)


@pytest.mark.parametrize("target", ["native", "torch", "dcp"])
def test_conversions_keep_everything(run: SavedRun, tmp_path: Path, target: str) -> None:
    rankless.convert(run.folder, tmp_path / "converted", to=target)
    model = run.make_model()
    optimizer = run.make_optimizer(model)
    # DCP does not store empty dicts, which the state of the Trainer's scheduler has.
    scheduler = None if target == "dcp" and run.case in TRAINER else make_scheduler(optimizer)
    result = rankless.restore(tmp_path / "converted", model=model, optimizer=optimizer, scheduler=scheduler)
    assert {"model", "optimizer", *(["scheduler"] if scheduler else [])} <= {*result.exact}
    assert all(equal_bits(value, run.weights[name]) for name, value in model.state_dict().items())
    for name, parameter in model.named_parameters():
        assert all(equal_bits(optimizer.state[parameter][state], run.states[name][state]) for state in STATES)
    if target == "native":
        assert_equal_to(run, rankless.open(tmp_path / "converted"))
        assert not rankless.diff(run.folder, tmp_path / "converted")


def test_native_checkpoints_have_the_generators_of_each_rank(ranks: Ranks, run: SavedRun, tmp_path: Path) -> None:
    rankless.convert(run.folder, tmp_path / "native", to="native")
    states = ranks(RANKS[run.case], restore_generators, tmp_path / "native")
    assert states[-1]["python"] == run.generators(RANKS[run.case] - 1)["python"]


def test_a_hugging_face_folder_has_the_weights(run: SavedRun, tmp_path: Path) -> None:
    rankless.convert(run.folder, tmp_path / "hf", to="hf")
    weights = load_file(tmp_path / "hf/model.safetensors")
    assert weights.keys() == run.weights.keys()
    assert all(equal_bits(value, run.weights[name]) for name, value in weights.items())
    assert (tmp_path / "hf/config.json").exists() == (run.folder / "config.json").exists()


def test_an_optimizer_with_its_parameters_in_another_order_is_refused(folder: Path) -> None:
    run = SavedRun(folder, "trainer_plain_w1")
    model = run.make_model()
    with pytest.raises(OptimizerMismatchError, match="in the order in which it was saved"):
        rankless.restore(run.folder, model=model, optimizer=torch.optim.AdamW(model.parameters()))
    assert all((value == 7).all() for value in model.state_dict().values())


def test_training_arguments_are_not_read(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "trainer_plain_w1/ckpt", tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-3/training_args.bin").write_bytes(b"anything")
    assert_equal_to(SavedRun(folder, "trainer_plain_w1"), rankless.open(tmp_path / "checkpoint-3"))


def test_commands_show_and_compare_them_without_torch(run: SavedRun) -> None:
    shown = run_command("show", str(run.folder))
    assert "optimizer" in shown.stdout
    assert run_command("verify", str(run.folder)).returncode == 0
    assert run_command("diff", str(run.folder), str(run.folder)).returncode == 0
    assert_needs_no_torch("show", str(run.folder))


def test_a_model_in_several_files_is_read_by_its_index(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "trainer_plain_w1", tmp_path / "several")
    run = SavedRun(tmp_path, "several")
    weights = load_file(run.folder / "model.safetensors")
    (run.folder / "model.safetensors").unlink()
    files = {name: f"model-{1 + number % 2:05}-of-00002.safetensors" for number, name in enumerate(weights)}
    for file in sorted(set(files.values())):
        save_file({name: weights[name] for name in weights if files[name] == file}, run.folder / file)
    (run.folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert_equal_to(run, rankless.open(run.folder))
    (run.folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        rankless.open(run.folder)


def test_states_of_scalers_and_data_loaders(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(folder / "acc_plain_w1/ckpt", tmp_path / "state")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    torch.save(scaler.state_dict(), tmp_path / "state/scaler.pt")
    torch.save({"position": 3}, tmp_path / "state/dl_state_dict.bin")
    torch.save({"position": 4}, tmp_path / "state/dl_state_dict_1.bin")
    sampler = SeedableRandomSampler(range(8), data_seed=5)
    torch.save(sampler, tmp_path / "state/sampler.bin")
    restored = torch.amp.GradScaler("cpu")
    result = rankless.restore(tmp_path / "state", stateful={"scaler": restored})
    assert "stateful" in result.exact
    assert restored.state_dict()["scale"] == 8.0
    assert result.user_content["dl_state_dict"] == {"position": 3}
    assert result.user_content["dl_state_dict_1"] == {"position": 4}
    assert "user_content value sampler is not read" in caplog.text
