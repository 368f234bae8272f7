"""Tests that every layout gives the same files and loads them. The oracle lays tensors out with torch alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rankless
from tests.helpers.file_contents import read_state_files
from tests.helpers.layout_checkpoints import assert_same_files, save_layout
from tests.helpers.layouts import CASES, LAYOUTS, blank_run, expected_tensor, fill_run, local_tensor, named_tensors
from tests.helpers.pool import Ranks


def marks_of(layout: str, n: int) -> Any:
    """By day each layout is on its largest number of ranks up to four, and on three: then shards are uneven."""
    _, sizes = LAYOUTS[layout]
    return () if n in {3, max(size for size in sizes if size <= 4)} else pytest.mark.full


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    save_layout(str(path), "plain")
    return path


def test_the_oracle_is_what_lies_on_the_disk(expected: Path) -> None:
    actual = {
        f"{file.parent.name}/{name}": tensor
        for file in (expected / "s").glob("*/*.safetensors")
        for name, tensor in load_file(file).items()
    }
    assert {"model/layers.3.down.weight", "optimizer/embed.weight/exp_avg", "model/frozen"} <= actual.keys()
    for name, tensor in actual.items():
        if not name.endswith("/step"):
            assert torch.equal(tensor, expected_tensor(name, tensor.shape, tensor.dtype)), name


@pytest.mark.parametrize(("layout", "n"), [pytest.param(*case, marks=marks_of(*case)) for case in CASES])
def test_files_do_not_depend_on_the_layout(ranks: Ranks, tmp_path: Path, expected: Path, layout: str, n: int) -> None:
    ranks(n, save_layout, str(tmp_path), layout)
    assert_same_files(layout, tmp_path, expected)


def load(path: str, layout: str, exchange: str) -> list[str]:
    run = blank_run(LAYOUTS[layout][0]())
    restored = rankless.restore(path, model=run.model, optimizer=run.optimizer, share_reads=exchange)
    assert restored.verified
    oracle = dict(named_tensors(fill_run(LAYOUTS[layout][0]())))
    mine = dict(named_tensors(run))
    assert mine.keys() == oracle.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == oracle[name].dtype, name
        assert getattr(tensor, "placements", None) == getattr(oracle[name], "placements", None), name
        assert torch.equal(local_tensor(tensor), local_tensor(oracle[name])), name
    return sorted(mine)


def list_loads() -> Iterator[Any]:
    """Yield each case with and without an exchange of what was read: by day, in turns, with one of the two."""
    for number, case in enumerate(CASES):
        for exchange in ("never", "always"):
            by_day = (exchange == "always") == number % 2
            yield pytest.param(*case, exchange, marks=marks_of(*case) if by_day else pytest.mark.full)


@pytest.mark.parametrize(("layout", "n", "exchange"), list(list_loads()))
def test_every_layout_loads_them(ranks: Ranks, expected: Path, layout: str, n: int, exchange: str) -> None:
    names = {name for own in ranks(n, load, str(expected), layout, exchange) for name in own}
    assert {"model/head.weight", "optimizer/layers.2.up.bias/exp_avg_sq", "model/seen"} <= names


def pipelines(path: str) -> Any:
    run = fill_run(LAYOUTS["pp"][0]())
    rankless.save_checkpoint(path, "s", run.model, run.optimizer)


def test_a_pipeline_gives_the_same_files_on_any_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    for n in (1, 2, 3, 4):
        ranks(n, pipelines, str(tmp_path / str(n)))
        assert read_state_files(tmp_path / str(n) / "s") == read_state_files(tmp_path / "1/s"), n
