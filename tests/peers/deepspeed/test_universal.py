"""Tests that DeepSpeed loads the universal checkpoints that rankless writes, and trains on as if never interrupted.

The oracle is the run of DeepSpeed that saved: its state, and what it became two steps later.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rankless
from tests.peers.deepspeed.equality import differing, differing_values
from tests.peers.deepspeed.launch import Record, run_job

#: The stage and dtype of each run that saves, and how many groups it has. DeepSpeed 0.19.8 gives all sub-groups of
#: ZeRO-3 one tensor that counts the steps of torch's AdamW, which then counts too many if there are several.
SOURCES = [(1, "fp32", 1), (2, "bf16", 1), (3, "fp32", 1), (3, "bf16", 1), (2, "fp32", 2), (1, "bf16", 2)]

#: The stages that each of them is loaded with.
TARGETS = {1: (1, 2, 3), 2: (1, 2)}


def options_of(groups: int, *, wide: bool) -> dict[str, Any]:
    return {"groups": groups, "wide": wide}


@pytest.fixture(scope="module", params=[True, False], ids=["wide", "odd"])
def sources(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("sources")
    specs = [
        {
            "stage": stage,
            "dtype": dtype,
            "options": options_of(groups, wide=request.param),
            "steps": [[0, 3], [3, 5]],
            "saves": [str(folder / f"ds{number}")],
            "client_state": {"epoch": 3},
        }
        for number, (stage, dtype, groups) in enumerate(SOURCES)
    ]
    records = run_job(2, folder / "job", specs)
    for number in range(len(SOURCES)):
        with pytest.warns(UserWarning, match="does not restore frozen parameters and buffers"):
            rankless.convert(folder / f"ds{number}", folder / f"universal{number}", to="deepspeed-universal")
    return request.param, folder, records


def test_any_stage_loads_it_on_another_number_of_ranks(sources: Any, tmp_path: Path) -> None:
    wide, folder, records = sources
    ranks = 4 if wide else 3
    cases = [(number, stage) for number, source in enumerate(SOURCES) for stage in TARGETS[source[2]]]
    specs = [
        {
            "stage": stage,
            "dtype": SOURCES[number][1],
            "options": options_of(SOURCES[number][2], wide=wide),
            "load": str(folder / f"universal{number}"),
            "universal": True,
            "client_state": {"epoch": None},
            "steps": [[3, 5]],
        }
        for number, stage in cases
    ]
    for (number, stage), record in zip(cases, run_job(ranks, tmp_path, specs), strict=True):
        source: Record = records[number]
        label = SOURCES[number], stage, ranks
        not_restored = {"buffer/seen"}  # by DeepSpeed, from any universal checkpoint
        assert set(differing(source.state("trained0"), record.state("loaded"))) == not_restored, label
        assert differing_values(source, record, ("trained0", "loaded")) == {}, label
        assert record.values["client_state"] == {"epoch": 3}, label
        if wide:  # the mean of gradients over three ranks is rounded
            assert set(differing(source.state("trained1"), record.state("trained0"))) == not_restored, label
            assert differing_values(source, record, ("trained1", "trained0")) == {}, label
