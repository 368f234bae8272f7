"""Tests of ``rankless.deepspeed``: engines are saved and resumed with other ranks, and another stage of ZeRO.

The oracle is the run that saved: its state as DeepSpeed's functions return it, and what it became two steps later.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rankless
from tests.helpers.equality import equal_bits
from tests.peers.deepspeed.equality import differing, differing_values
from tests.peers.deepspeed.launch import Record, run_job

STAGES, DTYPES = (0, 1, 2, 3), ("fp32", "bf16", "fp16")
CASES = [(stage, dtype) for dtype in DTYPES for stage in STAGES]

#: Where the state goes, from stage to stage.
MOVES = ((0, 3), (3, 0), (1, 2), (2, 1), (2, 3), (3, 2))

#: The ranks that resume, by whether sizes are multiples of 256. The mean of gradients over three ranks is rounded.
RANKS = {True: 4, False: 3}


def spec_of(stage: int, dtype: str, *, wide: bool, **further: Any) -> dict[str, Any]:
    return {"stage": stage, "dtype": dtype, "options": {"wide": wide, **further.pop("options", {})}, **further}


@pytest.fixture(scope="module", params=[True, False], ids=["wide", "odd"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("saved")
    specs = [
        spec_of(
            stage,
            dtype,
            wide=request.param,
            steps=[[0, 3], [3, 5]],
            rankless_saves=[str(folder / f"{stage}{dtype}")],
            client_state={"epoch": 3, "best": torch.tensor(2.5).item()},
        )
        for stage, dtype in CASES
    ]
    return request.param, folder, dict(zip(CASES, run_job(2, folder / "job", specs), strict=True))


def test_another_stage_resumes_on_another_number_of_ranks(saved: Any, tmp_path: Path) -> None:
    wide, folder, records = saved
    ranks = RANKS[wide]
    cases = [(source, dtype, target) for dtype in DTYPES for source, target in MOVES]
    specs = [
        spec_of(target, dtype, wide=wide, seed=9, rankless_load=str(folder / f"{source}{dtype}"), steps=[[3, 5]])
        for source, dtype, target in cases
    ]
    for (source, dtype, target), resumed in zip(cases, run_job(ranks, tmp_path, specs), strict=True):
        record: Record = records[source, dtype]
        label = source, dtype, target, ranks
        assert differing(record.state("trained0"), resumed.state("loaded")) == [], label
        assert differing_values(record, resumed, ("trained0", "loaded")) == {}, label
        assert resumed.values["client_state"] == {"epoch": 3, "best": 2.5}, label
        assert resumed.values["warnings"] == [], label
        assert resumed.values["loaded"]["global_samples"] == record.values["trained0"]["global_samples"], label
        if dtype == "fp16":
            for name in ("scale", "scale_iteration"):
                assert resumed.values["loaded"][name] == record.values["trained0"][name], label
        # DeepSpeed's fp16 without ZeRO divides by the loss scale of the next step.
        if wide and not (dtype == "fp16" and 0 in {source, target}):
            assert differing(record.state("trained1"), resumed.state("trained0")) == [], label
            assert differing_values(record, resumed, ("trained1", "trained0")) == {}, label


def file_bytes(folder: Path) -> dict[str, bytes]:
    """Return the files of the only checkpoint in a run directory, without those that describe the save itself."""
    (checkpoint,) = (path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    files = (path for path in checkpoint.rglob("*") if path.is_file())
    return {
        str(path.relative_to(checkpoint)): path.read_bytes()
        for path in files
        if path.name not in {"manifest.json", "ranks.json"}
    }


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_files_depend_on_the_state_alone(saved: Any, tmp_path: Path, dtype: str) -> None:
    """Not on the number of ranks, nor on the stage of ZeRO: what was loaded is saved again as the same bytes."""
    wide, folder, _ = saved
    origin = folder / f"2{dtype}"
    expected = file_bytes(origin)
    for ranks in (1, 3):
        again = [str(tmp_path / f"{ranks}{stage}") for stage in STAGES]
        specs = [
            spec_of(stage, dtype, wide=wide, seed=9, rankless_load=str(origin), steps=[[3, 3]], rankless_saves=[path])
            | {"client_state": {"epoch": 3, "best": 2.5}}
            for stage, path in zip(STAGES, again, strict=True)
        ]
        run_job(ranks, tmp_path / f"job{ranks}", specs)
        for path in again:
            assert file_bytes(Path(path)) == expected


def test_jobs_without_deepspeed_load_the_model_and_the_optimizer(saved: Any) -> None:
    wide, folder, records = saved
    from tests.peers.deepspeed.engines import make_net

    net = make_net(5, wide=wide)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim > 1]},
        {"params": [parameter for parameter in trained if parameter.ndim <= 1]},
    ]
    optimizer = torch.optim.AdamW(groups)
    content = rankless.load_checkpoint(folder / "3fp32", model=net, optimizer=optimizer, rng=False)
    state = records[3, "fp32"].state("trained0")
    assert content["global_steps"] == 3
    for name, parameter in net.named_parameters():
        expected = state.get(f"master/{name}", state[f"weights/{name}"])
        assert equal_bits(parameter.detach(), expected), name
        if parameter.requires_grad:
            for moment in ("exp_avg", "exp_avg_sq"):
                assert equal_bits(optimizer.state[parameter][moment], state[f"{moment}/{name}"]), (name, moment)
    assert equal_bits(net.seen, state["buffer/seen"])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_a_checkpoint_of_deepspeed_itself_is_loaded_without_a_conversion(saved: Any, tmp_path: Path) -> None:
    wide, *_ = saved
    cases = [(1, "fp32", 3), (3, "fp32", 2), (2, "bf16", 0), (3, "bf16", 1)]
    first = [
        spec_of(source, dtype, wide=wide, steps=[[0, 3]], saves=[str(tmp_path / f"ds{source}{dtype}")])
        | {"client_state": {"epoch": 3}}
        for source, dtype, _ in cases
    ]
    records = run_job(2, tmp_path / "first", first)
    second = [
        spec_of(target, dtype, wide=wide, seed=9, rankless_load=str(tmp_path / f"ds{source}{dtype}"))
        for source, dtype, target in cases
    ]
    for case, record, resumed in zip(cases, records, run_job(3, tmp_path / "second", second), strict=True):
        assert differing(record.state("trained0"), resumed.state("loaded")) == [], case
        assert differing_values(record, resumed, ("trained0", "loaded")) == {}, case
        assert resumed.values["client_state"]["epoch"] == 3, case
