"""Checkpoints of a model in any layout, compared file by file."""

from __future__ import annotations

from pathlib import Path

import holdfast
from tests.helpers.file_contents import contents
from tests.helpers.layouts import LAYOUTS, fill


def save(path: str, layout: str) -> None:
    run = fill(LAYOUTS[layout][0]())
    holdfast.save_checkpoint(path, "s", run.model, run.optimizer, user_content={"a": 1}, max_shard_size=4000)


def assert_same_files(layout: str, made: Path, expected: Path) -> None:
    found, wanted = contents(made / "s"), contents(expected / "s")
    if layout.startswith("pp"):
        # A pipeline's optimizers are put together in an order of their own.
        assert found.pop("state.json")
        wanted.pop("state.json")
    assert found == wanted
