"""Tests that the output of ``rankless diff`` agrees with a comparison of the tensors in plain Python."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import rankless
from rankless.cli.main import app
from rankless.inspection import read_elements
from rankless.inspection import tensor_differences as abreast
from rankless.inspection.element_differences import measure_change
from rankless.state.tensor_views import DTYPES
from tests.helpers.corruption import flip_tensor_bit
from tests.helpers.examples import examples
from tests.helpers.pool import Ranks
from tests.helpers.training import train_run
from tests.helpers.user_content import USER_CONTENT


def call(*args: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["diff", *map(str, args)])
    assert result.exit_code == code, result.output
    return result


def call_json(*args: object, code: int = 0) -> Any:
    return json.loads(call(*args, "--json", code=code).stdout)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of one state, and one a step later."""
    path = tmp_path_factory.mktemp("diff")
    run = train_run("plain")
    for tag in ("a", "same"):
        rankless.save_checkpoint(path, tag, run.model, run.optimizer, run.scheduler, USER_CONTENT, step=3)
    run.step(3)
    rankless.save_checkpoint(path, "later", run.model, run.optimizer, run.scheduler, {**USER_CONTENT, "total_steps": 4})
    return path


def by_hand(left: torch.Tensor, right: torch.Tensor) -> tuple[int, float, float]:
    """How many elements differ, and the largest differences, in Python's own numbers."""
    differing, absolute, relative = 0, 0.0, 0.0
    bits = left.dtype == right.dtype
    raw = [t.reshape(-1).view(torch.uint8).reshape(t.numel(), t.element_size()).tolist() for t in (left, right)]
    for n, (a, b) in enumerate(zip(left.reshape(-1).tolist(), right.reshape(-1).tolist(), strict=True)):
        if raw[0][n] == raw[1][n] if bits else a == b or (a != a and b != b):  # noqa: PLR0124 - nan
            continue
        differing += 1
        if a != a and b != b:  # noqa: PLR0124 - nan
            continue
        apart = abs(a - b)
        if not math.isfinite(apart):
            absolute = relative = math.inf
        elif apart:
            absolute, relative = max(absolute, apart), max(relative, apart / max(abs(a), abs(b)))
    return differing, float(absolute), float(relative)


_SPECIAL = [0.0, -0.0, 1.0, -1.0, 3.5, -1e-3, math.nan, math.inf, -math.inf]


@st.composite
def both(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors of one shape: raw bits of any dtype, or numbers; alike or not."""
    names = st.sampled_from(sorted(set(DTYPES) - {"BOOL", "C64", "F4", "F8_E8M0"}))
    first = draw(names)
    second = draw(st.sampled_from([first, first, draw(names)]))
    size = draw(st.integers(1, 9))
    if draw(st.booleans()) and first == second:
        width = DTYPES[first].itemsize
        raw = [draw(st.binary(min_size=size * width, max_size=size * width)) for _ in range(2)]
        made = [torch.frombuffer(bytearray(byte), dtype=torch.uint8).view(DTYPES[first]) for byte in raw]
    else:
        numbers = [draw(st.lists(st.sampled_from(_SPECIAL), min_size=size, max_size=size)) for _ in range(2)]
        kinds = [DTYPES[name] for name in (first, second)]
        whole = any(not kind.is_floating_point for kind in kinds)
        made = [
            torch.tensor([abs(n) if math.isfinite(n) and whole else 2.0 if whole else n for n in item]).to(kind)
            for item, kind in zip(numbers, kinds, strict=True)
        ]
    return made[0], made[0].clone() if draw(st.integers(0, 4)) == 0 else made[1]


class TestAmounts:
    @given(st.lists(both(), min_size=1, max_size=4))
    @settings(max_examples=examples(150))
    def test_of_many_tensors_at_once_are_those_of_each(self, found: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """All tensors of the dtypes of the first, one after the other."""
        dtypes = found[0][0].dtype, found[0][1].dtype
        alike = [item for item in found if (item[0].dtype, item[1].dtype) == dtypes]
        sides = [torch.cat([item[n].view(torch.uint8) for item in alike]).numpy() for n in range(2)]
        names = {dtype: name for name, dtype in DTYPES.items()}
        sizes = [item[0].numel() for item in alike]
        starts = torch.tensor([0, *sizes[:-1]]).cumsum(0).numpy()
        bits = [side.view(f"u{dtype.itemsize}") for side, dtype in zip(sides, dtypes, strict=True)]
        seen = measure_change(bits[0], bits[1], (names[dtypes[0]], names[dtypes[1]]), starts)
        for n, (left, right) in enumerate(alike):
            differing, absolute, relative = by_hand(left, right)
            assert seen.differing[n] == differing
            assert seen.absolute[n] == pytest.approx(absolute, rel=1e-15)
            assert seen.relative[n] == pytest.approx(relative, rel=1e-15)

    def test_large_integers_next_to_each_other_are_one_apart(self, tmp_path: Path) -> None:
        """As 64-bit floats they would be the same."""
        tensors = {"a": torch.tensor([2**62]), "b": torch.tensor([-(2**63)])}
        rankless.save_checkpoint(tmp_path, "a", tensors)
        rankless.save_checkpoint(tmp_path, "b", {"a": torch.tensor([2**62 + 1]), "b": torch.tensor([2**63 - 1])})
        left, other = call_json(tmp_path / "a", tmp_path / "b", code=1)["tensors"]
        assert (left["differing"], left["max_abs"]) == (1, 1.0)
        assert other["max_abs"] == float(2**64 - 1)

    def test_booleans_and_complex_numbers(self, tmp_path: Path) -> None:
        rankless.save_checkpoint(tmp_path, "a", {"b": torch.tensor([True, False]), "c": torch.tensor([3 + 4j, 1j])})
        rankless.save_checkpoint(tmp_path, "b", {"b": torch.tensor([True, True]), "c": torch.tensor([0j, 1j])})
        actual = {entry["name"]: entry for entry in call_json(tmp_path / "a", tmp_path / "b", code=1)["tensors"]}
        assert [actual["model/b"][key] for key in ("differing", "max_abs", "max_rel")] == [1, 1.0, 1.0]
        assert [actual["model/c"][key] for key in ("differing", "max_abs", "max_rel")] == [1, 5.0, 1.0]


class TestTensors:
    def test_what_is_alike_is_not_even_read(self, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(abreast, "compare_tensors", None)
        report = call_json(made / "a", made / "same")
        assert report["equal"] is True
        assert report["compared"] == report["equal_by_checksum"] > 30
        assert "no difference" in call(made / "a", made / "same").stdout

    @pytest.mark.parametrize("slices", [(2**19, 8), (5, 2)], ids=["at once", "in many slices"])
    def test_each_that_differs_is_named_with_how_much(
        self, made: Path, monkeypatch: pytest.MonkeyPatch, slices: tuple[int, int]
    ) -> None:
        monkeypatch.setattr(read_elements, "SLICE", slices[0])
        monkeypatch.setattr(abreast, "_SLICES", slices[1])
        left, right = rankless.open(made / "a"), rankless.open(made / "later")
        expected = {name: by_hand(left[name], right[name]) for name in left}
        report = call_json(made / "a", made / "later", code=1)
        seen = {entry["name"]: (entry["differing"], entry["max_abs"], entry["max_rel"]) for entry in report["tensors"]}
        inside = seen.pop("ranks[0].rng.torch")
        assert inside[0] > 0
        assert seen == {name: pytest.approx(value, rel=1e-12) for name, value in expected.items() if value[0]}

    def test_those_of_one_side_and_of_other_shapes(self, tmp_path: Path) -> None:
        rankless.save_checkpoint(
            tmp_path, "a", {"x": torch.zeros(2), "y": torch.zeros(2, 3), "z": torch.zeros(0)}, rng=False
        )
        rankless.save_checkpoint(
            tmp_path, "b", {"w": torch.zeros(2), "y": torch.zeros(6), "z": torch.zeros(0)}, rng=False
        )
        report = call_json(tmp_path / "a", tmp_path / "b", code=1)
        assert report["tensors"] == [
            {"name": "model/x", "a": {"dtype": "F32", "shape": [2]}},
            {"name": "model/y", "a": {"dtype": "F32", "shape": [2, 3]}, "b": {"dtype": "F32", "shape": [6]}},
            {"name": "model/w", "b": {"dtype": "F32", "shape": [2]}},
        ]
        text = call(tmp_path / "a", tmp_path / "b", code=1).stdout
        assert "model/x  F32 [2]     absent\n" in text
        assert "3 of 4 tensors differ" in text

    def test_the_largest_change_is_first(self, tmp_path: Path) -> None:
        changes = {"a": 0.1, "b": 3.0, "c": 0.0, "d": 0.5}
        for step, scale in ((1, 0.0), (2, 1.0)):
            model = {name: torch.tensor([1.0 + scale * change]) for name, change in changes.items()}
            rankless.save_checkpoint(tmp_path, f"s{step}", model, step=step, rng=False)
        lines = call(tmp_path / "s1", tmp_path / "s2", code=1).stdout.splitlines()
        assert lines[0] == "3 of 4 tensors differ: model by at most 3; step 1 to 2"
        assert [line.split()[0] for line in lines[2:5]] == ["model/b", "model/d", "model/a"]
        assert lines[-1] == "4 tensors compared, 1 equal by its checksums"

    def test_counts_are_no_change_of_weights(self, tmp_path: Path) -> None:
        for step in (1, 2):
            model = {"averaged": torch.tensor(5 * step), "w": torch.tensor([1.0 + step / 8])}
            rankless.save_checkpoint(tmp_path, f"s{step}", model, rng=False)
        line = call(tmp_path / "s1", tmp_path / "s2", code=1).stdout.splitlines()[0]
        assert line == "2 of 2 tensors differ: model by at most 0.125, integers in model by at most 5"

    def test_steps_are_no_change_of_moments(self, tmp_path: Path) -> None:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(1, 12):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            if step in {1, 11}:
                rankless.save_checkpoint(tmp_path, f"s{step}", model, optimizer, rng=False)
        line = call(tmp_path / "s1", tmp_path / "s11", code=1).stdout.splitlines()[0]
        largest = dict(re.findall(r"(model|optimizer|steps of the optimizer) by at most ([\d.e-]+)", line))
        assert largest.pop("steps of the optimizer") == "10"
        assert max(map(float, largest.values())) < 10

    def test_one_differs_and_several_differ(self, tmp_path: Path) -> None:
        for tag, value, lr in (("a", 1.0, 1), ("b", 2.0, 2), ("c", 1.0, 2)):
            content = {"lr": lr, "batch": lr}
            model = {"w": torch.tensor([value]), "v": torch.tensor([0.0])}
            rankless.save_checkpoint(tmp_path, tag, model, user_content=content, rng=False)
            rankless.save_checkpoint(tmp_path, f"{tag}1", {"w": model["w"]}, user_content={"lr": lr}, rng=False)
        ends = [("a", "b"), ("a1", "b1"), ("a1", "c1")]
        said = [call(tmp_path / left, tmp_path / other, code=1).stdout.splitlines()[0] for left, other in ends]
        assert said == [
            "1 of 2 tensors differs: model by at most 1; 2 values differ",
            "1 of 1 tensor differs: model by at most 1; 1 value differs",
            "1 value differs",
        ]

    def test_another_dtype_is_a_difference_even_of_the_same_numbers(self, tmp_path: Path) -> None:
        rankless.save_checkpoint(tmp_path, "a", {"w": torch.tensor([1.0, 2.0])})
        rankless.save_checkpoint(tmp_path, "b", {"w": torch.tensor([1.0, 2.5]).bfloat16()})
        rankless.save_checkpoint(tmp_path, "c", {"w": torch.tensor([1.0, 2.0]).double()})
        (entry,) = call_json(tmp_path / "a", tmp_path / "b", code=1)["tensors"]
        assert (entry["differing"], entry["max_abs"], entry["max_rel"]) == (1, 0.5, 0.2)
        assert call_json(tmp_path / "a", tmp_path / "c", code=1)["tensors"][0]["differing"] == 0
        assert "F32 BF16" in call(tmp_path / "a", tmp_path / "b", code=1).stdout

    def test_a_tied_name_is_compared_with_the_tensor_of_that_name(self, tmp_path: Path) -> None:
        shared = torch.ones(3)
        rankless.save_checkpoint(tmp_path, "a", {"embed": shared, "head": shared}, rng=False)
        rankless.save_checkpoint(tmp_path, "b", {"embed": torch.ones(3), "head": torch.zeros(3)}, rng=False)
        rankless.save_checkpoint(tmp_path, "c", {"embed": shared, "head": shared}, rng=False)
        assert [entry["name"] for entry in call_json(tmp_path / "a", tmp_path / "b", code=1)["tensors"]] == [
            "model/head"
        ]
        assert call_json(tmp_path / "a", tmp_path / "c")["compared"] == 1

    @pytest.mark.parametrize("to", ["torch", "lightning", "hf", "safetensors", "native"])
    def test_other_formats_are_compared_bit_for_bit(self, made: Path, tmp_path: Path, to: str) -> None:
        other = tmp_path / {"torch": "x.pt", "lightning": "x.ckpt", "safetensors": "x.safetensors"}.get(to, "x")
        rankless.convert(made / "a", other, to=to)
        assert call_json(made / "a", other, "model/*")["equal"] is True
        report = call_json(made / "later", other, "model/*", code=1)["tensors"]
        expected = call_json(made / "later", made / "a", "model/*", code=1)["tensors"]
        assert report == expected

    def test_a_pattern_takes_some(self, made: Path) -> None:
        report = call_json(made / "a", made / "later", "norm", code=1)
        assert {entry["name"].split("/")[1].split(".")[0] for entry in report["tensors"]} == {"norm"}
        assert (report["compared"], report["values"]) == (8, [])
        assert "Without a pattern" in call(made / "a", made / "later", "nothing", code=1).stderr

    def test_damage_is_damage_and_no_difference(self, made: Path, tmp_path: Path) -> None:
        for tag in ("a", "later"):
            shutil.copytree(made / tag, tmp_path / tag)
        flip_tensor_bit(tmp_path / "later/model/model.safetensors", "body.0.weight")
        result = call(tmp_path / "a", tmp_path / "later", code=1)
        assert "'body.0.weight'" in result.stderr
        assert "is corrupt" in result.stderr
        assert result.stdout == ""


class TestValues:
    def test_each_leaf_that_differs_is_named(self, made: Path) -> None:
        actual = {entry["path"]: entry for entry in call_json(made / "a", made / "later", code=1)["values"]}
        assert actual["user_content.total_steps"] == {"path": "user_content.total_steps", "a": 3, "b": 4}
        assert actual["scheduler.state.last_epoch"]["b"] == 4
        assert {"optimizer.groups[0].settings.lr", "optimizer.groups[1].settings.lr"} <= set(actual)
        assert not {path for path in actual if path.startswith(("user_content.best", "user_content.ema"))}

    def test_kinds_of_numbers_zeros_and_lengths_count(self, tmp_path: Path) -> None:
        rankless.save_checkpoint(tmp_path, "a", user_content={"n": 1, "z": 0.0, "l": [1, 2], "t": True, "x": math.nan})
        other = {"n": 1.0, "z": -0.0, "l": [1, 2, 3], "x": math.nan, "new": None}
        rankless.save_checkpoint(tmp_path, "b", user_content=other)
        report = call_json(tmp_path / "a", tmp_path / "b", code=1)["values"]
        assert report == [
            {"path": "user_content.n", "a": 1, "b": 1.0},
            {"path": "user_content.z", "a": 0.0, "b": -0.0},
            {"path": "user_content.l", "a": [1, 2], "b": [1, 2, 3]},
            {"path": "user_content.t", "a": True},
            {"path": "user_content.new", "b": None},
        ]

    def test_tensors_among_values_are_compared_wherever_they_lie(self, tmp_path: Path) -> None:
        model = torch.nn.Linear(2, 2)
        for tag, number in (("a", 0.5), ("b", 0.25)):
            optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(number))
            rankless.save_checkpoint(tmp_path, tag, model, optimizer, user_content={"ema": torch.full((3,), number)})
        actual = {
            entry["name"]: entry["max_abs"] for entry in call_json(tmp_path / "a", tmp_path / "b", code=1)["tensors"]
        }
        assert actual == {"optimizer.groups[0].settings.lr": 0.25, "user_content.ema": 0.25}

    def test_one_state_saved_by_other_ranks_is_the_same(self, ranks: Ranks, tmp_path: Path) -> None:
        for size in (1, 2):
            ranks(size, _save, tmp_path, f"by_{size}")
        report = call_json(tmp_path / "by_1", tmp_path / "by_2")
        assert report["equal"] is True
        assert report["notes"] == ["saved by 1 and by 2 ranks: values of single ranks are not compared"]


def _save(path: Path, tag: str) -> None:
    run = train_run("fsdp")
    rankless.save_checkpoint(path, tag, run.model, run.optimizer, run.scheduler)
