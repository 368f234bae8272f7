"""Tests which checkpoint ``rankless.open`` and the commands' ``--tag`` open, and which ones they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import rankless
from rankless.cli.main import app
from rankless.errors import InvalidArgumentError, NoCheckpointError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose checkpoints hold their number."""
    for step in (1, 2, 3):
        rankless.save_checkpoint(tmp_path / "run", f"step_{step}", {"w": torch.tensor(float(step))}, rng=False)
    return tmp_path / "run"


class TestOpen:
    def test_takes_path_and_tag_as_everything_else(self, run: Path) -> None:
        for step in (1, 2, 3):
            opened = rankless.open(run, f"step_{step}")
            assert opened.path == run / f"step_{step}"
            assert opened["model/w"] == step
        assert rankless.open(run, tag="step_1")["model/w"] == 1
        assert rankless.open(run)["model/w"] == 3

    def test_a_stray_model_in_the_run_does_not_stand_in_for_the_tag(self, run: Path) -> None:
        save_file({"w": torch.tensor(9.0)}, run / "model.safetensors")
        assert rankless.open(run, "step_2")["model/w"] == 2

    def test_a_tag_of_a_checkpoint_in_another_format(self, tmp_path: Path) -> None:
        torch.save({"w": torch.tensor(7.0)}, tmp_path / "epoch=0.pt")
        assert rankless.open(tmp_path, "epoch=0.pt")["model/w"] == 7

    def test_a_tag_that_is_not_there_names_those_that_are(self, run: Path) -> None:
        with pytest.raises(NoCheckpointError, match=r"no checkpoint 'step_9' .* there are step_1, step_2, step_3"):
            rankless.open(run, "step_9")

    def test_the_names_of_the_latest_checkpoints_are_said_to_be_some(self, tmp_path: Path) -> None:
        for step in range(1, 8):
            rankless.save_checkpoint(tmp_path / "run", f"step_{step}", {"w": torch.tensor(float(step))})
        with pytest.raises(NoCheckpointError, match=r"there are step_3, step_4, .*, step_7, 2 earlier ones$"):
            rankless.open(tmp_path / "run", "step_9")

    def test_a_tag_of_what_is_no_run_is_refused(self, run: Path, tmp_path: Path) -> None:
        save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
        for path in (run / "step_1", tmp_path / "model.safetensors"):
            for tag in ("step_2", "model"):
                with pytest.raises(InvalidArgumentError, match=f"{path} is a checkpoint itself.*leave out the tag"):
                    rankless.open(path, tag)

    @pytest.mark.parametrize("tag", [{"model": "app.net"}, 3, "", "../run/step_1", ".hidden"])
    def test_what_is_no_tag_is_refused(self, run: Path, tag: Any) -> None:
        with pytest.raises(InvalidArgumentError, match="tag"):
            rankless.open(run, tag)

    def test_keys_are_passed_by_name_and_are_a_table_of_text(self, run: Path, tmp_path: Path) -> None:
        with pytest.raises(TypeError):
            rankless.open(run, "step_1", {"model": "app.net"})  # type: ignore[misc]
        for keys in ("step_1", {"model": 3}, {3: "app"}, ["model"]):
            with pytest.raises(InvalidArgumentError, match="keys must map components"):
                rankless.open(run, keys=keys)  # type: ignore[arg-type]
            with pytest.raises(InvalidArgumentError, match="keys must map components"):
                rankless.convert(run, tmp_path / "out", to="hf", keys=keys)  # type: ignore[arg-type]
        torch.save({"app": {"net": {"w": torch.ones(2)}}}, tmp_path / "x.pt")
        assert rankless.open(tmp_path / "x.pt", keys={"model": "app.net"}).keys() == ["model/w"]


def call(*args: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == code, result.output
    return result


class TestTagsOfCommands:
    def test_each_command_that_reads_one_checkpoint_of_a_run_takes_a_tag(self, run: Path, tmp_path: Path) -> None:
        assert json.loads(call("show", run, "--tag", "step_1", "--json").stdout)["tag"] == "step_1"
        verified = json.loads(call("verify", run, "--tag", "step_2", "--json").stdout)["checkpoints"]
        assert [item["path"] for item in verified] == [str(run / "step_2")]
        call("convert", run, tmp_path / "out", "--to", "hf", "--tag", "step_1")
        assert rankless.open(tmp_path / "out")["model/w"] == 1
        call("consolidate", run, "--tag", "step_2", "--output", tmp_path / "two.safetensors")
        assert rankless.open(tmp_path / "two.safetensors")["model/w"] == 2

    def test_diff_compares_the_same_tag_of_two_runs(self, run: Path, tmp_path: Path) -> None:
        rankless.save_checkpoint(tmp_path / "other", "step_1", {"w": torch.tensor(1.0)}, rng=False)
        rankless.save_checkpoint(tmp_path / "other", "step_2", {"w": torch.tensor(5.0)}, rng=False)
        call("diff", run, tmp_path / "other", "--tag", "step_1")
        call("diff", run, tmp_path / "other", "--tag", "step_2", code=1)

    @pytest.mark.parametrize("command", ["show", "verify"])
    def test_a_tag_that_cannot_be_is_exit_2(self, run: Path, command: str) -> None:
        assert "there are step_1" in call(command, run, "--tag", "step_9", code=2).stderr
        assert "checkpoint itself" in call(command, run / "step_1", "--tag", "step_2", code=2).stderr

    def test_all_of_a_run_and_one_of_it_contradict_each_other(self, run: Path) -> None:
        assert "leave one of them out" in call("verify", run, "--all", "--tag", "step_1", code=2).stderr

    def test_a_tag_in_the_place_of_a_pattern_is_told(self, run: Path) -> None:
        assert "use --tag step_1" in call("show", run, "step_1", code=1).stderr


@pytest.fixture
def two_models(tmp_path: Path) -> Path:
    models = {name: torch.nn.Linear(2, 2, bias=False) for name in ("gen", "ema")}
    torch.nn.init.ones_(models["ema"].weight)
    rankless.save_checkpoint(tmp_path / "run", "s", models, torch.optim.SGD(models["gen"].parameters()), step=1)
    return tmp_path / "run"


@pytest.mark.parametrize("key", ["ema", "model/ema"])
def test_one_of_several_models_is_selected(two_models: Path, tmp_path: Path, key: str) -> None:
    model = torch.nn.Linear(2, 2, bias=False)
    result = rankless.restore(two_models, model=model, keys={"model": key})
    assert torch.equal(model.weight, torch.ones(2, 2))
    assert (result.missing, result.unexpected) == ((), ())
    assert rankless.open(two_models, keys={"model": key}).keys() == ["model/weight"]
    for to, output in (("hf", "out"), ("safetensors", "one.safetensors")):
        rankless.convert(two_models, tmp_path / output, to=to, keys={"model": key})
        assert torch.equal(rankless.open(tmp_path / output)["model/weight"], torch.ones(2, 2))
    with pytest.warns(UserWarning, match="config.json"):
        card = rankless.export_model(two_models, tmp_path / "hub", model=key) / "README.md"
    assert f"| checkpoint | s, model {key} |" in card.read_text()


def test_a_model_that_does_not_exist_is_not_selected(two_models: Path, tmp_path: Path) -> None:
    for call in (
        lambda: rankless.restore(two_models, model=torch.nn.Linear(2, 2), keys={"model": "disc"}),
        lambda: rankless.open(two_models, keys={"model": "disc"}),
        lambda: rankless.convert(two_models, tmp_path / "out", to="hf", keys={"model": "disc"}),
        lambda: rankless.export_model(two_models, tmp_path / "out", model="disc"),
    ):
        with pytest.raises(InvalidArgumentError, match="it has ema, gen"):
            call()


def test_a_checkpoint_with_one_model_needs_no_key(tmp_path: Path) -> None:
    """The same call may begin from another system's checkpoint, whose model has this key."""
    rankless.save_checkpoint(tmp_path, "s", torch.nn.Linear(2, 2))
    rankless.restore(tmp_path, model=torch.nn.Linear(2, 2), keys={"model": "app.net"})
