"""Tests that the tables of the page on scale are those of the stored results, and that these keep the promises made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scale_tables
from benchmarks.scale import RESULTS, SAVES, run_alone, simulate_job


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(RESULTS.read_text("utf-8"))
    return stored


def test_the_tables_are_those_of_the_results(results: dict[str, Any]) -> None:
    page = scale_tables.PAGE.read_text("utf-8")
    assert scale_tables.fill_tables(page, results) == page


def test_few_megabytes_are_set_in_the_store_of_16384_ranks_and_read_from_it(results: dict[str, Any]) -> None:
    for save in results["simulated"]["16384"]["saves"].values():
        _, set_bytes, _, read_bytes = map(sum, zip(*save["traffic"].values(), strict=True))
        assert set_bytes < 200e6
        assert read_bytes < 250e6


def test_simulated_jobs_send_as_many_messages_as_real_processes(results: dict[str, Any]) -> None:
    for ranks, job in results["processes"].items():
        for name in SAVES:
            real, model = job["saves"][name]["traffic"], results["model"][ranks]["saves"][name]["traffic"]
            assert {part: row[::2] for part, row in real.items()} == {part: row[::2] for part, row in model.items()}
            for part, row in real.items():
                assert row[1::2] == pytest.approx(model[part][1::2], rel=0.001)


def test_simulated_hosts_report_to_a_real_rank_0_that_commits(tmp_path: Path) -> None:
    costs = run_alone(simulate_job, 96, 8, "small", tmp_path)
    for name in SAVES:
        stored, stored_bytes, read, read_bytes = costs.saves[name].traffic["CRCs"]
        assert stored == read == 96 // 8
        assert stored_bytes == read_bytes
