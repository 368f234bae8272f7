"""Tests that what tensor-parallel ranks have is joined as AutoTP describes it, or refused with a typed error.

The oracle is the tensors that are cut here. DeepSpeed's own AutoTP is in ``tests/peers/deepspeed``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rankless
from rankless.errors import CorruptCheckpointError, FormatError, RanklessError
from rankless.formats.detect import open_reader
from tests.helpers.bounded_reads import limit_memory, read_checkpoint
from tests.helpers.deepspeed_files import ZeroSave, deepspeed_modules
from tests.helpers.deepspeed_tensor_parallel import write_tensor_parallel
from tests.helpers.equality import equal_bits


def check(path: Path, save: ZeroSave) -> None:
    opened = rankless.open(path)
    for name, tensor in save.masters.items():
        assert equal_bits(opened[f"model/{name}"], tensor), name
        for state, tensors in save.states.items():
            assert equal_bits(opened[f"optimizer/{name}/{state}"], tensors[name]), (name, state)
        assert float(opened[f"optimizer/{name}/step"]) == 3
    assert equal_bits(opened["model/table"], torch.arange(3.0))
    assert [result.problem for result in opened.verify() if result.problem] == []


@pytest.mark.parametrize("options", [{}, {"ranks": 3}, {"stage": 2, "dtype": torch.bfloat16}, {"round_robin": True}])
def test_whole_parameters_are_read(tmp_path: Path, options: dict[str, Any]) -> None:
    save = write_tensor_parallel(tmp_path / "tag", tmp_path, **options)
    check(tmp_path / "tag", save)


@pytest.mark.filterwarnings("ignore:DeepSpeed does not restore", "ignore:under ZeRO", "ignore:groups of the")
@pytest.mark.parametrize("to", ["native", "deepspeed-universal"])
def test_a_conversion_has_the_whole_parameters(tmp_path: Path, to: str) -> None:
    save = write_tensor_parallel(tmp_path / "tag", tmp_path)
    rankless.convert(tmp_path / "tag", tmp_path / "out", to=to)
    opened = rankless.open(tmp_path / "out")
    assert all(equal_bits(opened[f"model/{name}"], tensor) for name, tensor in save.masters.items())
    content = opened.values["user_content"]
    assert content["epoch"] == 4
    assert "universal_checkpoint_info" not in content  # it describes parts that the output has not


def test_ranges_of_a_tensor_are_read(tmp_path: Path) -> None:
    save = write_tensor_parallel(tmp_path / "tag", tmp_path)
    model = torch.nn.Module()
    for name, tensor in save.masters.items():
        model.register_parameter(name, torch.nn.Parameter(torch.zeros_like(tensor)))
    model.register_buffer("table", torch.zeros(3))
    rankless.load_checkpoint(tmp_path / "tag", model=model, rng=False)
    assert all(equal_bits(value, save.masters[name]) for name, value in model.named_parameters())


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    with deepspeed_modules():
        tree = torch.load(path, weights_only=False)
        change(tree)
        torch.save(tree, path)


def test_rows_that_ranks_divide_are_read_together(tmp_path: Path) -> None:
    """Else a read would be as short as the part of a row that a rank has."""
    write_tensor_parallel(tmp_path / "tag", tmp_path, ranks=3)
    reader = open_reader(tmp_path / "tag")
    for group, name in (("model", "out"), ("optimizer", "out/exp_avg")):
        assert len(reader.find_extents(group, name, 0, reader.groups[group][name].nbytes)) == 1
    (whole,) = reader.find_extents("model", "table", 0, 12)
    assert isinstance(whole.file, Path)  # each rank has it whole


def edit_map(path: Path, name: str, change: Callable[[Any], Any]) -> None:
    info = "universal_checkpoint_info"
    edit(path, lambda tree: change(tree[info]["affine_map"]["params"][f"^{re.escape(name)}$"]))


def refuse(path: Path, kind: type[RanklessError], text: str) -> None:
    with limit_memory(), pytest.raises(kind, match=text):
        read_checkpoint(path)


class TestRefused:
    @pytest.mark.parametrize("kept", ["00", "01"])
    def test_a_missing_rank(self, tmp_path: Path, kept: str) -> None:
        """One rank's part of a model alone would open as a smaller model."""
        write_tensor_parallel(tmp_path / "tag", tmp_path)
        for file in (tmp_path / "tag").iterdir():
            if f"mp_rank_{kept}" not in file.name:
                file.unlink()
        refuse(tmp_path / "tag", CorruptCheckpointError, "1 of 2 model-parallel ranks|others are missing")

    def test_ranks_that_do_not_say_how_they_divide(self, tmp_path: Path) -> None:
        write_tensor_parallel(tmp_path / "tag", tmp_path)
        edit(tmp_path / "tag/mp_rank_00_model_states.pt", lambda tree: tree.pop("universal_checkpoint_info"))
        refuse(tmp_path / "tag", FormatError, "AutoTP.*has no affine_map.*0.19.8")

    def test_scaled_biases(self, tmp_path: Path) -> None:
        write_tensor_parallel(tmp_path / "tag", tmp_path)
        file = tmp_path / "tag/mp_rank_00_model_states.pt"
        edit_map(file, "norm", lambda entry: entry["ranks"][0]["pieces"][0].update(scale=0.5))
        refuse(tmp_path / "tag", FormatError, "'norm'.*scaled")

    @pytest.mark.parametrize(
        ("name", "change"),
        [
            ("qkv", lambda entry: entry["ranks"][0]["pieces"].pop()),
            ("qkv", lambda entry: entry["ranks"][0]["pieces"][0].update(source=[4, [4, 1]])),
            ("out", lambda entry: entry["ranks"][1]["pieces"][0].update(source=[4, [1, 7]])),
            ("out", lambda entry: entry["ranks"][1]["pieces"][0].update(dest=[1, [3, 1]])),
            ("out", lambda entry: entry["ranks"][1]["pieces"][0].update(dest=[-1, [3, 1]])),
            ("conv", lambda entry: entry.update(logical_shape=[3, 7, 2])),
            ("conv", lambda entry: entry.update(logical_shape=[2**40, 2**40, 2])),
            ("kv", lambda entry: entry["ranks"].pop(1)),
            ("kv", lambda entry: entry["ranks"][1].update(pieces=7)),
            ("norm", lambda entry: entry.update(ranks="x")),
        ],
    )
    def test_a_map_that_does_not_make_up_the_parameter(self, tmp_path: Path, name: str, change: Any) -> None:
        write_tensor_parallel(tmp_path / "tag", tmp_path)
        edit_map(tmp_path / "tag/mp_rank_00_model_states.pt", name, change)
        refuse(tmp_path / "tag", FormatError, f"affine_map of '{name}'")

    def test_a_map_of_other_shapes(self, tmp_path: Path) -> None:
        write_tensor_parallel(tmp_path / "tag", tmp_path)
        edit(tmp_path / "tag/mp_rank_01_model_states.pt", lambda tree: tree["module"].update(emb=torch.zeros(4, 6)))
        refuse(tmp_path / "tag", CorruptCheckpointError, "mp_rank_01_model_states.pt.*emb")

    def test_a_parameter_without_a_map(self, tmp_path: Path) -> None:
        write_tensor_parallel(tmp_path / "tag", tmp_path)
        name, info = f"^{re.escape('out')}$", "universal_checkpoint_info"
        edit(tmp_path / "tag/mp_rank_00_model_states.pt", lambda tree: tree[info]["affine_map"]["params"].pop(name))
        refuse(tmp_path / "tag", FormatError, "does not say how ranks divide 'out'")

    def test_what_ranks_should_have_alike_differs(self, tmp_path: Path) -> None:
        write_tensor_parallel(tmp_path / "tag", tmp_path)
        edit(tmp_path / "tag/mp_rank_01_model_states.pt", lambda tree: tree["module"]["table"].add_(1))
        with pytest.raises(CorruptCheckpointError, match="'table' differs between ranks"):
            rankless.convert(tmp_path / "tag", tmp_path / "out", to="native")

    def test_zero_3(self, tmp_path: Path) -> None:
        write_tensor_parallel(tmp_path / "tag", tmp_path, stage=3)
        refuse(tmp_path / "tag", FormatError, "does not read with ZeRO-3")
