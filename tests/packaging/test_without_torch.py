"""Tests what runs in an environment without torch: all that reads checkpoints, and conversions of their tensors.

The rest says that it needs torch.
"""

import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement

import rankless
from rankless.torch_import import OLDEST
from tests.helpers.torchless import make_environment, run

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden/v1/training"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("environment"))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return one checkpoint in several formats, written with torch."""
    folder = tmp_path_factory.mktemp("formats")
    for target in ("native", "hf", "safetensors", "torch", "dcp"):
        rankless.convert(GOLDEN, folder / f"{target}.out", to=target, model_only=True)
    return {path.stem: path for path in folder.glob("*.out")}


def test_there_is_no_torch(python: Path) -> None:
    assert "No module named 'torch'" in run(python, "-c", "import torch").stderr


@pytest.mark.parametrize("command", ["ls", "show", "verify", "stats", "report -o {out}", "report --stats -o {out}"])
def test_a_command_runs_for_a_checkpoint(python: Path, tmp_path: Path, command: str) -> None:
    verb, *options = command.format(out=tmp_path / "page.html").split()
    done = run(python, "-m", "rankless", verb, GOLDEN, *options)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


@pytest.mark.parametrize("name", ["native", "hf", "safetensors", "torch", "dcp"])
def test_each_format_is_verified_and_equal(python: Path, checkpoints: dict[str, Path], name: str) -> None:
    done = run(python, "-m", "rankless", "verify", checkpoints[name])
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    done = run(python, "-m", "rankless", "diff", checkpoints["native"], checkpoints[name], "model/*")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def test_open_gives_arrays_with_the_values_that_torch_reads(python: Path, tmp_path: Path) -> None:
    script = """
import sys, numpy, rankless
checkpoint = rankless.open(sys.argv[1])
numpy.savez(sys.argv[2], **{name.replace("/", "|"): checkpoint.array(name) for name in checkpoint})
name = next(iter(checkpoint))
assert (checkpoint.read_array(name, 0, 1) == checkpoint.array(name).reshape(-1)[:1]).all()
"""
    done = run(python, "-c", script, GOLDEN, tmp_path / "arrays.npz")
    assert done.returncode == 0, done.stderr
    expected = rankless.open(GOLDEN)
    with np.load(tmp_path / "arrays.npz") as arrays:
        assert {name.replace("|", "/") for name in arrays} == set(expected)
        for name in expected:
            tensor = expected[name]
            array = torch.from_numpy(arrays[name.replace("/", "|")])
            assert torch.equal(array.to(torch.complex128), tensor.to(torch.complex128)) or tensor.isnan().any()


@pytest.mark.parametrize("name", ["save_checkpoint", "Checkpointer", "load_model", "add_metrics", "watch"])
def test_another_public_name_says_that_it_needs_torch(python: Path, name: str) -> None:
    done = run(python, "-c", f"import rankless; rankless.{name}")
    expected = f"TorchMissingError: rankless.{name} needs PyTorch, which is not installed: run pip install torch"
    assert done.stderr.splitlines()[-1].removeprefix("rankless.errors.") == expected


def test_a_tensor_needs_torch_and_is_an_import_error(python: Path) -> None:
    script = f"""
import rankless
checkpoint = rankless.open({str(GOLDEN)!r})
try:
    checkpoint[next(iter(checkpoint))]
except ImportError as error:
    print(type(error).__name__, error.name)
"""
    assert run(python, "-c", script).stdout == "TorchMissingError torch\n"


@pytest.mark.parametrize(
    ("command", "needing"),
    [
        ("convert {run} {out} --to dcp", "to='dcp'"),
        ("consolidate {run} --output {out}.pt", "to='torch'"),
        ("convert {run} {out} --to hf --merge", "this command"),
    ],
)
def test_another_command_says_in_one_line_that_it_needs_torch(
    python: Path, tmp_path: Path, command: str, needing: str
) -> None:
    done = run(python, "-m", "rankless", *command.format(run=GOLDEN, out=tmp_path / "out").split())
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: {needing} needs PyTorch, which is not installed: run pip install torch\n"
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("command", ["convert {run} {out} --to hf --dtype bfloat16", "export {run} --output {out}"])
def test_a_command_converts(python: Path, tmp_path: Path, command: str) -> None:
    done = run(python, "-m", "rankless", *command.format(run=GOLDEN, out=tmp_path / "out").split())
    assert done.returncode == 0, done.stderr
    assert rankless.open(tmp_path / "out").format == "huggingface"


def test_checkpoints_are_listed_and_named(python: Path, tmp_path: Path) -> None:
    script = f"""
import rankless
run = {str(tmp_path)!r}
assert not rankless.has_checkpoint(run)
rankless.convert({str(GOLDEN)!r}, run + "/a", to="native")
assert rankless.has_checkpoint(run)
assert [info.tag for info in rankless.list_checkpoints(run)] == ["a"]
rankless.set_alias(run, "best", "a")
assert list(rankless.list_aliases(run)) == ["best"]
rankless.remove_alias(run, "best")
"""
    done = run(python, "-c", script)
    assert done.returncode == 0, done.stderr


def test_an_old_torch_is_refused_in_one_line(python: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("__version__ = '2.6.0+cpu'\n")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import rankless; rankless.save_checkpoint"
    done = run(python, "-c", script)
    assert done.stderr.splitlines()[-1].endswith(
        "TorchVersionError: rankless needs torch 2.7 or newer; torch 2.6.0+cpu is installed: "
        "run pip install 'torch>=2.7'"
    )


def test_torch_is_no_dependency_and_has_an_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [item for item in project["dependencies"] if Requirement(item).name == "torch"]
    oldest = ".".join(map(str, OLDEST))
    assert project["optional-dependencies"]["torch"] == [f"torch>={oldest}"]
