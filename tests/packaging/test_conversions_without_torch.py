"""Tests that conversions in an environment without torch write the bytes that they write with it.

One interpreter without torch runs all conversions of a test.
"""

import inspect
import json
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import rankless
from rankless.formats.native import NativeReader, is_native
from tests.helpers.file_contents import read_state_files
from tests.helpers.torchless import make_environment, run

TESTS = Path(__file__).parents[1]
GOLDEN = TESTS / "golden/v1"

#: The targets without torch, with a cast to each dtype that NumPy lacks, and to one that it has.
TARGETS: dict[str, dict[str, Any]] = {
    "native": {},
    "hf": {},
    "hf-bfloat16": {"dtype": "bfloat16"},
    "safetensors-float8_e4m3fn": {"dtype": "float8_e4m3fn"},
    "safetensors-float8_e8m0fnu": {"dtype": "float8_e8m0fnu"},
    "native-float16": {"dtype": "float16"},
    "peft": {},
}

#: The targets that need torch.
TORCH_TARGETS = [
    "torch",
    "lightning",
    "lightning-folder",
    "dcp",
    "colossalai",
    "deepspeed-universal",
    "megatron",
    "nxd",
]

#: How NxD has divided the parameters of its checkpoints, whose ranks were trained apart and differ in their copies.
LAYOUT = json.dumps(
    {
        "rules": [{"match": "a.*", "dim": 0}, {"match": "b.weight", "dim": 1}, {"match": "*"}],
        "not_trained": ["buf", "frozen"],
    }
)

NXD = {"layout": LAYOUT, "keys": {"copies": "first"}}

#: A source, an output, and the arguments of the conversion.
Job = tuple[str, str, dict[str, Any]]


def convert_here(jobs: dict[str, Job]) -> dict[str, str]:
    """Run conversions, and return the errors."""
    import rankless

    errors = {}
    for name, (source, output, options) in jobs.items():
        try:
            rankless.convert(source, output, **options)
        except Exception as error:  # noqa: BLE001 - any error must be the same
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def convert_without_torch(python: Path, file: Path, jobs: dict[str, Job]) -> dict[str, str]:
    file.write_text(json.dumps(jobs))
    script = f"from __future__ import annotations\nimport json, sys\n{inspect.getsource(convert_here)}"
    done = run(python, "-c", f"{script}\nprint(json.dumps(convert_here(json.load(open(sys.argv[1])))))", file)
    assert done.returncode == 0, done.stderr
    errors: dict[str, str] = json.loads(done.stdout)
    return errors


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("environment"))


def make_adapter(folder: Path) -> Path:
    """A folder of PEFT."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "target_modules": ["q"]}')
    shapes = {"A": (2, 4), "B": (4, 2)}
    tensors = {f"base_model.model.q.lora_{name}.weight": np.ones(shape, "f4") for name, shape in shapes.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def make_written(folder: Path) -> dict[str, Path]:
    """One checkpoint in each format that rankless writes without further arguments, and adapters."""
    names = {"torch": "torch.pt", "lightning": "lightning.ckpt"}
    targets = ["native", "hf", "safetensors", "torch", "lightning", "lightning-folder", "colossalai"]
    written = {to: rankless.convert(GOLDEN / "training", folder / names.get(to, to), to=to) for to in targets}
    written |= {"dcp": rankless.convert(GOLDEN / "training", folder / "dcp", to="dcp", model_only=True)}
    return {**written, "peft": make_adapter(folder / "peft")}


def unpack_foreign(folder: Path) -> dict[str, Path]:
    """The checkpoints that other systems wrote, from the archives of the tests."""
    archives = [*sorted(TESTS.glob("interop/*/*.tar.xz")), TESTS / "helpers/nxd.tar.gz"]
    for path in archives:
        with tarfile.open(path) as archive:
            archive.extractall(folder / path.name.split(".")[0], filter="data")
    saved = {f"{path.parent.parent.name}/{path.parent.name}": path for path in sorted(folder.glob("*/*/ckpt"))}
    saved |= {name: next(path.glob("checkpoint-*"), path) for name, path in saved.items()}
    lightning = {f"lightning/{path.name}": path for path in sorted(folder.glob("lightning/*"))}
    return {**saved, **lightning, **{f"nxd/{path.name}": path for path in sorted(folder.glob("nxd/nxd/*"))}}


def list_jobs(sources: dict[str, Path], targets: list[str], folder: Path) -> dict[str, Job]:
    """Return the conversions of each source: to three targets from what other systems wrote, else to all."""
    return {
        f"{name} to {target}": (
            str(source),
            str(folder / name / target),
            {"to": target.split("-")[0], **(NXD if name.startswith("nxd/") else {}), **TARGETS[target]},
        )
        for number, (name, source) in enumerate(sources.items())
        for target in (take_turns(targets, number) if "/" in name else targets)
    }


def take_turns(targets: list[str], number: int) -> list[str]:
    """Return the first target, and two of the others, which differ from one number to the next."""
    first, *others = targets
    return [first, others[number % len(others)], others[(number + len(others) // 2) % len(others)]]


def read_output(output: Path) -> object:
    """All bytes of an output, but for what a manifest says of the time and the identity of a checkpoint."""
    if output.is_file():
        return output.read_bytes()
    if not is_native(output):
        return read_state_files(output)
    manifest = NativeReader(output).manifest
    ranks = (output / "ranks.json").read_bytes()
    return read_state_files(output), ranks, manifest.files, manifest.step, manifest.metrics, manifest.provenance.torch


def read_results(jobs: dict[str, Job], errors: dict[str, str]) -> dict[str, object]:
    return {name: errors.get(name) or read_output(Path(output)) for name, (_, output, _) in jobs.items()}


@pytest.mark.parametrize(
    ("make_sources", "targets"),
    [
        (make_written, ["native-float16", "hf-bfloat16", "peft"]),
        pytest.param(make_written, [*TARGETS], marks=pytest.mark.full),
        pytest.param(unpack_foreign, [*TARGETS], marks=pytest.mark.full),
    ],
    ids=["some", "written", "foreign"],
)
def test_the_bytes_and_the_errors_are_those_with_torch(
    python: Path, tmp_path: Path, make_sources: Callable[[Path], dict[str, Path]], targets: list[str]
) -> None:
    sources = make_sources(tmp_path / "sources")
    results = []
    for place, convert in (
        ("without", partial(convert_without_torch, python, tmp_path / "jobs.json")),
        ("with", convert_here),
    ):
        jobs = list_jobs(sources, targets, tmp_path / place)
        results.append(read_results(jobs, convert(jobs)))
    without, with_torch = results
    assert not [name for name, result in without.items() if result != with_torch[name]]
    converted = {name for name, result in without.items() if type(result) is not str}
    native = next(target for target in targets if target.startswith("native"))
    assert converted >= {f"{name} to {native}" for name in sources if name != "peft"}
    assert ("peft to peft" in converted) == ("peft" in sources)


def test_another_target_says_that_it_needs_torch_and_writes_nothing(python: Path, tmp_path: Path) -> None:
    jobs: dict[str, Job] = {
        to: (str(GOLDEN / "training"), str(tmp_path / "out" / to), {"to": to}) for to in TORCH_TARGETS
    }
    assert convert_without_torch(python, tmp_path / "jobs.json", jobs) == {
        to: f"TorchMissingError: to={to!r} needs PyTorch, which is not installed: run pip install torch"
        for to in TORCH_TARGETS
    }
    assert not [*(tmp_path / "out").glob("*")]
