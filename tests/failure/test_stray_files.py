"""Tests that a directory with rankless checkpoints is a run's directory, whatever else is in it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import Result
from safetensors.torch import save_file
from typer.testing import CliRunner

import rankless
from rankless.cli.main import app
from rankless.errors import RanklessError
from tests.helpers.fake_s3 import AWS, FakeS3
from tests.helpers.object_histories import run_path, store_with_two_checkpoints

OLD, NEW = 1.0, 7.0


def put_weights(run: Path) -> None:
    save_file({"w": torch.full((4,), OLD)}, run / "model.safetensors")


def put_torch_weights(run: Path) -> None:
    torch.save({"w": torch.full((4,), OLD)}, run / "pytorch_model.bin")


def put_broken_index(run: Path) -> None:
    (run / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"w": "pytorch_model-00001.bin"}}))


def put_dcp(run: Path) -> None:
    dcp.save({"w": torch.full((4,), OLD)}, checkpoint_id=str(run / "elsewhere"), no_dist=True)
    for file in (run / "elsewhere").iterdir():
        file.rename(run / file.name)
    (run / "elsewhere").rmdir()


def put_half_a_dcp(run: Path) -> None:
    (run / ".metadata").write_bytes(b"not a pickle")


def put_web_manifest(run: Path) -> None:
    (run / "manifest.json").write_text('{"name": "a web page", "icons": []}')


def put_noise(run: Path) -> None:
    (run / "manifest.json").write_bytes(b"\xff\x00")


def put_our_manifest(run: Path) -> None:
    shutil.copy(run / "step_1/manifest.json", run / "manifest.json")


def put_whole_checkpoint(run: Path) -> None:
    shutil.copytree(run / "step_1", run, dirs_exist_ok=True)


STRAYS = [
    put_weights,
    put_torch_weights,
    put_broken_index,
    put_dcp,
    put_half_a_dcp,
    put_web_manifest,
    put_noise,
    put_our_manifest,
    put_whole_checkpoint,
]

Put = Callable[[Path], None]


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step, value in ((1, OLD), (2, NEW)):
        rankless.save_checkpoint(tmp_path / "run", f"step_{step}", {"w": torch.full((4,), value)}, step=step)
    return tmp_path / "run"


@pytest.mark.filterwarnings("ignore:.*next to them is ignored")
@pytest.mark.parametrize("put", STRAYS)
@pytest.mark.parametrize("tag", [None, "step_2"])
def test_the_run_is_loaded_and_not_what_lies_in_it(run: Path, put: Put, tag: str | None) -> None:
    put(run)
    model = {"w": torch.zeros(4)}
    assert rankless.restore(run, tag, model=model).tag == "step_2"
    assert torch.equal(model["w"], torch.full((4,), NEW))
    assert rankless.has_checkpoint(run)


@pytest.mark.filterwarnings("ignore:.*next to them is ignored")
@pytest.mark.parametrize("put", STRAYS)
def test_every_other_way_in_takes_the_run_too(run: Path, tmp_path: Path, put: Put) -> None:
    put(run)
    assert torch.equal(rankless.open(run)["model/w"], torch.full((4,), NEW))
    assert json.loads(command("show", run, "--json").stdout)["tag"] == "step_2"
    assert command("diff", run, run / "step_2").exit_code == 0
    verified = json.loads(command("verify", "--all", run, "--json").stdout)
    assert [(Path(entry["path"]).name, entry["status"]) for entry in verified["checkpoints"]] == [
        ("step_1", "verified"),
        ("step_2", "verified"),
    ]
    rankless.convert(run, tmp_path / "out.pt", to="torch")
    assert torch.equal(torch.load(tmp_path / "out.pt")["w"], torch.full((4,), NEW))
    rankless.convert(run, run / "exported", to="hf")


@pytest.mark.parametrize("put", STRAYS)
def test_a_run_whose_checkpoints_are_all_corrupt_is_not_taken_for_the_stray_one(run: Path, put: Put) -> None:
    put(run)
    for step in (1, 2):
        file = run / f"step_{step}/manifest.json"
        file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(RanklessError, match="step_"):
        rankless.load_checkpoint(run, model={"w": torch.zeros(4)})
    with pytest.raises(RanklessError, match="step_"):
        rankless.open(run)


@pytest.mark.parametrize("put", [put_weights, put_torch_weights])
def test_a_file_that_could_be_meant_is_named(run: Path, put: Put) -> None:
    put(run)
    name = "model.safetensors" if put is put_weights else "pytorch_model.bin"
    with pytest.warns(UserWarning, match=f"{name} next to them is ignored; to read it, pass its path"):
        rankless.load_checkpoint(run, model={"w": torch.zeros(4)})
    with pytest.warns(UserWarning, match=name):
        rankless.open(run)
    assert name in command("show", run).stdout
    assert torch.equal(rankless.open(run / name)["model/w"], torch.full((4,), OLD))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("put", [put_half_a_dcp, put_web_manifest, put_noise, put_our_manifest])
def test_nothing_is_said_of_what_nobody_could_mean(run: Path, put: Put) -> None:
    put(run)
    rankless.load_checkpoint(run, model={"w": torch.zeros(4)})
    rankless.open(run)


def test_a_foreign_checkpoint_with_foreign_manifests_below_it_is_no_run(tmp_path: Path) -> None:
    put_weights(tmp_path)
    for name, text in (("onnx", '{"name": "a web page"}'), ("broken", "{")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(text)
    model = {"w": torch.zeros(4)}
    rankless.load_checkpoint(tmp_path, model=model)
    assert torch.equal(model["w"], torch.full((4,), OLD))
    assert torch.equal(rankless.open(tmp_path)["model/w"], torch.full((4,), OLD))


def test_a_newer_format_is_ours_too(run: Path) -> None:
    """Its weights must not be taken for an older export."""
    put_weights(run)
    for step in (1, 2):
        (run / f"step_{step}/manifest.json").write_text('{"format": "rankless", "version": 2}')
        (run / f"step_{step}/state.json").unlink()
    with pytest.raises(RanklessError, match="version 2"):
        rankless.load_checkpoint(run, model={"w": torch.zeros(4)})


@pytest.mark.full
def test_transformers_trainer_goes_on_from_the_run(run: Path) -> None:
    """What it asks is where the latest one is."""
    pytest.importorskip("transformers")
    put_our_manifest(run)
    code = (
        "import sys; from pathlib import Path; from types import SimpleNamespace as N\n"
        "from rankless.transformers import CheckpointMixin\n"
        "run = Path(sys.argv[1])\n"
        "print(CheckpointMixin._find_checkpoint(N(args=N(output_dir=run), _checkpoint_dir=None), True)[0])"
    )
    rankless.save_checkpoint(run, "checkpoint-3", user_content={"trainer_state": {}}, step=3)
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(run / "checkpoint-3")


def test_a_folder_of_checkpoints_of_another_system_is_no_run_and_the_newest_is_named(tmp_path: Path) -> None:
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        put_weights(tmp_path / f"checkpoint-{step}")
    calls: list[Callable[[Path], object]] = [rankless.open, partial(rankless.restore, model={"w": torch.zeros(4)})]
    for call in calls:
        with pytest.raises(rankless.EmptyRunError, match="checkpoint-10 is one: pass its path"):
            call(tmp_path)
    assert torch.equal(rankless.open(tmp_path / "checkpoint-10")["model/w"], torch.full((4,), OLD))


def test_what_an_interrupted_save_has_uploaded_is_not_named() -> None:
    with store_with_two_checkpoints(FakeS3(AWS)) as fake:
        for key in [key for key in fake.objects if "/.tags/" in key or key.endswith("/manifest.json")]:
            del fake.objects[key]  # the manifest is written last
        with pytest.raises(rankless.EmptyRunError) as caught:
            rankless.open(run_path())
    assert "is one" not in str(caught.value)
