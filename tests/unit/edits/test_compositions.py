"""Drawn edits of a training equal the same operations in memory, bit for bit: weights, states and groups."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rankless
from tests.helpers.edit_oracle import Oracle, save_training
from tests.helpers.examples import examples


@pytest.fixture(scope="module", params=["float32", "bfloat16, tied"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three checkpoints."""
    path = tmp_path_factory.mktemp("trained") / "run"
    is_tied = request.param != "float32"
    save_training(path, dtype=torch.bfloat16 if is_tied else torch.float32, tied=is_tied)
    return path


def draw_verb(draw: Any, oracle: Oracle, count: int) -> str:
    """Draw an edit, do it in memory, and return its text. ``count``: the layers."""
    kind = draw(st.sampled_from(["resize", "layers", "rename", "cast", "freeze", "unfreeze"]))
    if kind == "resize":
        size, rule = draw(st.integers(1, 24)), draw(st.sampled_from(["mean", "zeros", "copy:0"]))
        oracle.resize(size, rule)
        return f"resize-vocab {size} rows={rule}"
    if kind == "layers":
        order = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=5))
        oracle.reorder(order)
        return f"layers order={','.join(map(str, order))}"
    if kind == "rename":
        pairs = [(r"^layers\.", "net.layers."), (r"\.norm\.", ".ln."), (r"^net\.", "")]
        pattern, new = draw(
            st.sampled_from([pair for pair in pairs if any(re.search(pair[0], name) for name in oracle.names())])
        )
        oracle.rename(pattern, new)
        return f"rename {pattern}={new}".replace("\\", "\\\\")
    if kind == "cast":
        dtype = draw(st.sampled_from(["bfloat16", "float16", "float32"]))
        oracle.cast(getattr(torch, dtype))
        return f"cast {dtype}"
    trained, frozen = sorted(oracle.states), sorted(oracle.weights.keys() - oracle.states.keys())
    if kind == "unfreeze" and frozen and trained:
        name, like = draw(st.sampled_from(frozen)), draw(st.sampled_from(trained))
        oracle.unfreeze(name, like)
        return f"unfreeze {name} like={like}"
    name = draw(st.sampled_from(oracle.names()))
    oracle.freeze(name)
    return f"freeze {name}"


@settings(max_examples=examples(360))
@given(data=st.data())
def test_compositions(run: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    oracle = Oracle.read(run / "step_3")
    oracle.before = [Oracle.read(run / "step_1"), Oracle.read(run / "step_2")]
    edits, count = [], 3
    if data.draw(st.booleans()):
        last = data.draw(st.integers(2, 3))
        oracle.average(last)
        edits.append(f"average {last}")
    for _ in range(data.draw(st.integers(0 if edits else 1, 4))):
        edits.append(draw_verb(data.draw, oracle, count))
        count = 1 + max(int(part) for name in oracle.weights for part in name.split(".") if part.isdecimal())
    if data.draw(st.booleans()):
        oracle.upcycle(3)
        edits.append("upcycle 3 router=zeros")
    output = tmp_path_factory.mktemp("out") / "edited"
    rankless.edit(run / "step_3", output, edits)
    Oracle.read(output).assert_equals(oracle)
