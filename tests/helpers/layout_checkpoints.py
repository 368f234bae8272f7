"""Checkpoints of a model in any layout, compared file by file."""

from __future__ import annotations

from pathlib import Path

import rankless
from tests.helpers.file_contents import read_state_files
from tests.helpers.layouts import LAYOUTS, fill_run


def save_layout(path: str, layout: str) -> None:
    run = fill_run(LAYOUTS[layout][0]())
    rankless.save_checkpoint(path, "s", run.model, run.optimizer, user_content={"a": 1}, max_shard_size=4000)


def assert_same_files(layout: str, made: Path, expected: Path) -> None:
    actual, wanted = read_state_files(made / "s"), read_state_files(expected / "s")
    if layout.startswith("pp"):
        # A pipeline's optimizers are put together in an order of their own.
        assert actual.pop("state.json")
        wanted.pop("state.json")
    assert actual == wanted
