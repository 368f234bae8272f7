"""Tests that checkpoints of any format convert to what ColossalAI's Booster loads; torch reads every file.

The tests that the real package loads them are in tests/interop/colossalai.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankless
from rankless.colossalai import Booster
from rankless.errors import InvalidArgumentError
from tests.helpers.commands import invoke
from tests.helpers.conversions import save_training, tensors_to_lists
from tests.helpers.training import Run, assert_equal, gather_run, start_run, train_run


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_training(tmp_path)


def loaded(folder: Path) -> Run:
    """By our Booster, into a run that was started otherwise."""
    run, booster = start_run("plain", seed=1), Booster()
    booster.boost(run.model, run.optimizer, lr_scheduler=run.scheduler)
    booster.load_model(run.model, folder / "modeling")
    booster.load_optimizer(run.optimizer, folder / "optimizer")
    booster.load_lr_scheduler(run.scheduler, folder / "lr_scheduler")
    return run


def shards(folder: Path) -> tuple[dict[str, Any], list[Any]]:
    """The one index of a folder, and each file that its weight map names, as torch loads it."""
    (path,) = folder.glob("*.index.json")
    index = json.loads(path.read_text())
    names = dict.fromkeys(index["weight_map"].values())
    return index, [torch.load(folder / name, weights_only=True) for name in names]


def test_torch_finds_a_state_dict_in_the_files_of_the_model(saved: Path, tmp_path: Path) -> None:
    rankless.convert(saved, tmp_path / "out", to="colossalai", max_shard_size=300)
    expected = train_run("plain").model.state_dict()
    index, files = shards(tmp_path / "out/modeling")
    actual = {name: tensor for file in files for name, tensor in file.items()}
    assert len(files) > 2
    assert_equal(actual, dict(expected))
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values()) / 2**20
    tied = next(file for file in files if "head.weight" in file)
    assert tied["head.weight"].data_ptr() == tied["embed.weight"].data_ptr()


def test_torch_finds_an_optimizers_state_in_its_files(saved: Path, tmp_path: Path) -> None:
    rankless.convert(saved, tmp_path / "out", to="colossalai", max_shard_size=300)
    expected = train_run("plain")
    index, files = shards(tmp_path / "out/optimizer")
    states = {number: own for file in files for number, own in file.items()}
    groups = torch.load(tmp_path / "out/optimizer" / index["metadata"]["param_groups"], weights_only=True)
    assert len(files) > 2
    assert index["weight_map"].keys() == {str(number) for number in states}
    run = start_run("plain", seed=1)
    run.optimizer.load_state_dict({"state": states, "param_groups": groups})
    run.model.load_state_dict(expected.model.state_dict())
    assert_equal(gather_run(run), gather_run(expected))
    schedule = torch.load(tmp_path / "out/lr_scheduler", weights_only=True)
    assert schedule == expected.scheduler.state_dict()


def test_the_files_are_those_that_our_booster_writes_and_the_real_one_loads(saved: Path, tmp_path: Path) -> None:
    rankless.convert(saved, tmp_path / "out", to="colossalai")
    run, booster = train_run("plain"), Booster()
    booster.save_model(run.model, tmp_path / "other/modeling", shard=True)
    booster.save_optimizer(run.optimizer, tmp_path / "other/optimizer", shard=True)
    booster.save_lr_scheduler(run.scheduler, tmp_path / "other/lr_scheduler")
    files = [path.relative_to(tmp_path / "other") for path in (tmp_path / "other").rglob("*") if path.is_file()]
    assert len(files) == 6
    for file in files:
        mine, theirs = tmp_path / "out" / file, tmp_path / "other" / file
        if file.suffix == ".json":
            assert json.loads(mine.read_text()) == json.loads(theirs.read_text()), file
        else:
            assert tensors_to_lists(unnamed(torch.load(mine))) == tensors_to_lists(unnamed(torch.load(theirs))), file


def unnamed(tree: Any) -> Any:
    """Groups of an optimizer without the names of parameters, which ours keep where they are known."""
    if isinstance(tree, list):
        return [{key: value for key, value in group.items() if key != "param_names"} for group in tree]
    return tree


@pytest.mark.parametrize("way", [[], ["torch"], ["dcp"], ["lightning-folder"]])
def test_from_any_format_a_run_goes_on_as_before(saved: Path, tmp_path: Path, way: list[str]) -> None:
    at = saved
    for number, to in enumerate([*way, "colossalai"]):
        at = rankless.convert(at, tmp_path / f"{number}", to=to)
    run, expected = loaded(at), train_run("plain")
    assert_equal(gather_run(run), gather_run(expected))
    for number in (3, 4):
        torch.manual_seed(number)
        loss = run.step(number)
        torch.manual_seed(number)
        assert loss == expected.step(number)


def test_there_and_back_nothing_is_lost(saved: Path, tmp_path: Path) -> None:
    rankless.convert(saved, tmp_path / "there", to="colossalai")
    rankless.convert(tmp_path / "there", tmp_path / "back", to="native")
    run, expected = start_run("plain", seed=1), train_run("plain")
    result = rankless.restore(tmp_path / "back", model=run.model, optimizer=run.optimizer, scheduler=run.scheduler)
    assert_equal(gather_run(run), gather_run(expected))
    assert run.scheduler.state_dict() == expected.scheduler.state_dict()
    assert result.user_content["step"] == 3
    assert torch.equal(result.user_content["table"], torch.arange(40_000.0))
    names = [group["params"] for group in rankless.open(tmp_path / "back").values["optimizer"]["groups"]]
    assert names == [group["params"] for group in rankless.open(saved).values["optimizer"]["groups"]]


def test_extra_state_and_a_models_configuration_come_along(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"seen": 7, "table": torch.arange(3)}

        def set_extra_state(self, state: Any) -> None:
            self.found = state

    class Configuration:
        def to_json_string(self) -> str:
            return "{}"

    model = Counting(2, 2)
    model.config = Configuration()  # type: ignore[assignment]
    rankless.save_checkpoint(tmp_path, "s", model)
    rankless.convert(tmp_path / "s", tmp_path / "out", to="colossalai", max_shard_size=8)
    other = Counting(2, 2)
    Booster().load_model(other, tmp_path / "out/modeling")
    assert torch.equal(other.weight, model.weight)
    assert other.found["seen"] == 7
    assert other.found["table"].tolist() == [0, 1, 2]
    assert (tmp_path / "out/modeling/config.json").read_text() == "{}"


def test_the_commands_read_what_they_wrote(saved: Path, tmp_path: Path) -> None:
    invoke("convert", saved, tmp_path / "out", "--to", "colossalai", "--max-shard-size", "300")
    assert "optimizer" in invoke("show", tmp_path / "out").stdout
    invoke("verify", tmp_path / "out")
    (tmp_path / "out/optimizer/pytorch_optim-00002.bin").unlink()
    assert "pytorch_optim-00002.bin is missing" in invoke("verify", tmp_path / "out", code=1).output


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("name", ["model", "modeling"])
def test_what_its_training_scripts_save_is_one_checkpoint(tmp_path: Path, name: str, *, safe: bool) -> None:
    run, booster, folder = train_run("plain"), Booster(), tmp_path / "epoch-0_step-3"
    booster.save_model(run.model, folder / name, shard=True, use_safetensors=safe)
    booster.save_optimizer(run.optimizer, folder / "optimizer", shard=True)
    booster.save_lr_scheduler(run.scheduler, folder / "lr_scheduler")
    other = start_run("plain", seed=1)
    rankless.load_checkpoint(folder, model=other.model, optimizer=other.optimizer, scheduler=other.scheduler)
    assert_equal(gather_run(other), gather_run(run))
    assert other.scheduler.state_dict() == run.scheduler.state_dict()


def test_what_a_booster_does_not_have_is_refused(tmp_path: Path) -> None:
    models = {"gen": nn.Linear(2, 2), "dis": nn.Linear(2, 2)}
    rankless.save_checkpoint(tmp_path / "run", "two", models)
    with pytest.raises(InvalidArgumentError, match="model/dis, model/gen"):
        rankless.convert(tmp_path / "run/two", tmp_path / "out", to="colossalai")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
