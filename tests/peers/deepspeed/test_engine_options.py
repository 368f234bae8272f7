"""Tests of engines with options that change where parameters are, and of those that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.peers.deepspeed.equality import differing, differing_values
from tests.peers.deepspeed.launch import run_job

CPU = {"device": "cpu"}

#: The stage, dtype and options of engines.
OPTIONS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "round robin": (2, "fp32", {"zero": {"round_robin_gradients": True}}),
    "alignment": (2, "fp32", {"zero": {"parameter_alignment": True}}),
    "sub-groups": (3, "bf16", {"zero": {"sub_group_size": 60}}),
    "fp32 accumulation": (1, "bf16", {"config": {"data_types": {"grad_accum_dtype": "fp32"}}}),
    "small parameters are not divided": (3, "fp32", {"zero": {"stage3_param_persistence_threshold": 50}}),
    "offloaded": (2, "fp32", {"zero": {"offload_optimizer": CPU}, "config": {"zero_force_ds_cpu_optimizer": False}}),
    "offloaded parameters": (
        3,
        "bf16",
        {
            "zero": {"offload_optimizer": CPU, "offload_param": CPU},
            "config": {"zero_force_ds_cpu_optimizer": False},
        },
    ),
}


def test_where_parameters_are_makes_no_difference(tmp_path: Path) -> None:
    """Each engine is saved, loaded into one without the options, saved again, and loaded into one with them."""
    first, second, third = [], [], []
    for number, (stage, dtype, options) in enumerate(OPTIONS.values()):
        save, again = str(tmp_path / f"first{number}"), str(tmp_path / f"second{number}")
        first.append({"stage": stage, "dtype": dtype, "options": options, "steps": [[0, 3]], "rankless_saves": [save]})
        second.append(
            {
                "stage": 3 if stage < 3 else 2,
                "dtype": dtype,
                "seed": 9,
                "rankless_load": save,
                "steps": [[3, 3]],
                "rankless_saves": [again],
            }
        )
        third.append({"stage": stage, "dtype": dtype, "options": options, "seed": 8, "rankless_load": again})
    records = run_job(2, tmp_path / "a", first)
    plain, back = run_job(3, tmp_path / "b", second), run_job(1, tmp_path / "c", third)
    for label, record, between, last in zip(OPTIONS, records, plain, back, strict=True):
        state = record.state("trained0")
        assert differing(state, between.state("loaded")) == [], label
        assert differing(state, last.state("loaded")) == [], label
        assert differing_values(record, last, ("trained0", "loaded")) == {}, label


def test_a_fused_optimizer_of_fp16_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    """DeepSpeed keeps it in FP16_Optimizer, with one flat tensor for each group."""
    save = str(tmp_path / "save")
    spec = {"stage": 0, "dtype": "fp16", "options": {"optimizer": "FusedAdam", "wide": True}}
    (record,) = run_job(2, tmp_path / "a", [{**spec, "steps": [[0, 3], [3, 5]], "rankless_saves": [save]}])
    (resumed,) = run_job(4, tmp_path / "b", [{**spec, "seed": 9, "rankless_load": save, "steps": [[3, 5]]}])
    assert differing(record.state("trained0"), resumed.state("loaded")) == []
    assert differing_values(record, resumed, ("trained0", "loaded")) == {}
    assert differing(record.state("trained1"), resumed.state("trained0")) == []


def test_a_save_in_the_background_has_the_state_of_its_call(tmp_path: Path) -> None:
    """The engine trains on while the files are written."""
    first, second = [], []
    cases = [(stage, dtype) for stage in (0, 1, 2, 3) for dtype in ("fp32", "bf16")]
    for number, (stage, dtype) in enumerate(cases):
        save, engine = str(tmp_path / f"save{number}"), {"stage": stage, "dtype": dtype, "options": {"wide": True}}
        options = {"async_save": True}
        first.append({**engine, "steps": [[0, 3], [3, 5]], "rankless_saves": [save], "save_options": options})
        second.append({**engine, "seed": 9, "rankless_load": save, "steps": [[3, 5]]})
    for case, record, resumed in zip(
        cases, run_job(2, tmp_path / "a", first), run_job(4, tmp_path / "b", second), strict=True
    ):
        assert differing(record.state("trained0"), resumed.state("loaded")) == [], case
        assert differing_values(record, resumed, ("trained0", "loaded")) == {}, case
        assert differing(record.state("trained1"), resumed.state("trained0")) == [], case


@pytest.mark.parametrize("ranks", [2])
def test_what_cannot_be_stored_is_refused_by_its_name_on_all_ranks(tmp_path: Path, ranks: int) -> None:
    specs: list[dict[str, Any]] = [
        {
            "stage": 2,
            "steps": [[0, 1]],
            "change_weight": "up.weight",
            "save_error": ["StateError", "the weights of 'up.weight' were changed, but not its master weights"],
        },
        {
            "stage": 3,
            "steps": [[0, 1]],
            "client_state": {"global_steps": 1},
            "save_error": ["InvalidArgumentError", "client_state has 'global_steps'"],
        },
        {
            "stage": 1,
            "client_state": [3],
            "save_error": ["InvalidArgumentError", "client_state must be a dict, such as {'epoch': 3}; got [3]"],
        },
        {
            "stage": 1,
            "pass_module": True,
            "save_error": ["InvalidArgumentError", "pass the engine that deepspeed.initialize returned; got Net"],
        },
        {
            "stage": 2,
            "options": {"config": {"gradient_accumulation_steps": 2}},
            "steps": [[0, 3]],
            "save_error": ["StateError", "accumulated the gradients of 1 micro-steps"],
        },
        {
            "stage": 2,
            "save_options": {"async_save": True, "staging": "overlapped"},
            "save_error": ["InvalidArgumentError", "an engine cannot be saved with staging='overlapped'"],
        },
    ]
    for record in run_job(ranks, tmp_path, [{**spec, "refused_save": str(tmp_path / "run")} for spec in specs]):
        assert record.values["refused"] is True
    assert not list((tmp_path / "run").glob("global_step*"))


def test_what_may_be_missing_is_what_the_caller_says(tmp_path: Path) -> None:
    """The checkpoint has no state of the counter that the load passes."""
    save = str(tmp_path / "save")
    (record,) = run_job(2, tmp_path / "a", [{"stage": 2, "steps": [[0, 3]], "rankless_saves": [save]}])
    load = {"rankless_load": save, "load_counter": True, "load_options": {"allow_missing": ["stateful"]}}
    (loaded,) = run_job(2, tmp_path / "b", [{"stage": 2, "seed": 9, **load}])
    assert differing(record.state("trained0"), loaded.state("loaded")) == []
