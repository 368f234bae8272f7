"""Tests the offline converter of ZeRO-1 states against NxD's own files and against plain torch."""

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankless.errors import (
    CorruptCheckpointError,
    FormatError,
    InvalidArgumentError,
    NoCheckpointError,
    RanklessError,
    TagExistsError,
)
from rankless.nxd.offline_zero_conversion import ZeroRequest, convert_zero_checkpoints
from rankless.run.cleanup import clean_up
from rankless.storage import atomic_rename
from tests.helpers.nxd_files import (
    equal_trees,
    extract_golden,
    load_rank_file,
    rank_file_name,
    read_files,
    save_rank_file,
    shard_rows,
    shard_zero_states,
)


def convert(source: Path, final: Path, ranks: int | None) -> Path:
    return convert_zero_checkpoints(ZeroRequest(source, final, ranks))


def write(folder: Path, trees: list[dict[str, Any]], *, tp: int = 0, xser: bool = True) -> Path:
    for rank, tree in enumerate(trees):
        save_rank_file(folder / "optim" / rank_file_name(rank, tp), tree, xser=xser)
    return folder


SHAPES = {0: (5, 4), 1: (5,), 2: (3, 5), 3: (1,), 4: (7, 2, 3)}


def sample(dp: int, *, masters: bool = True, step: float = 3.0) -> list[dict[str, Any]]:
    """AdamW's states with a parameter that has none (4), a scalar that is no tensor, and two groups."""
    torch.manual_seed(0)
    parameters = {pid: torch.randn(shape) for pid, shape in SHAPES.items()}
    states = {
        pid: {
            "step": torch.tensor(step),
            "exp_avg": torch.randn(parameter.shape),
            "exp_avg_sq": torch.rand(parameter.shape),
            "kind": "a",
        }
        for pid, parameter in parameters.items()
        if pid != 4
    }
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 2, 4]}, {"lr": torch.tensor(0.2), "params": [1, 3]}]
    return shard_zero_states(parameters, states, dp, masters=masters, groups=groups)


@pytest.mark.parametrize("kind", ["z1_xser1", "z1_nomaster"])
def test_nxd_files_come_back_byte_for_byte(tmp_path: Path, kind: str) -> None:
    source = extract_golden(tmp_path) / kind
    before = read_files(source)
    at = source
    for step, ranks in enumerate([4, 3, 2]):
        at = convert(at, tmp_path / f"{step}", ranks)
    assert read_files(at) == before
    whole = convert(source, tmp_path / "whole", None)
    assert read_files(convert(whole, tmp_path / "back", 2)) == before
    assert read_files(source) == before


STATES = st.sampled_from(["param", "row", "scalar", "int", "double"])


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3), min_size=1, max_size=3),
    st.lists(st.integers(1, 6), min_size=2, max_size=4),
    st.lists(STATES, max_size=3),
    st.booleans(),
    st.booleans(),
)
def test_any_state_for_any_ranks_is_what_torch_makes_of_it(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[list[int]],
    degrees: list[int],
    kinds: list[str],
    masters: bool,
    xser: bool,
) -> None:
    folder = tmp_path_factory.mktemp("zero")
    parameters = {pid: torch.randn(shape) for pid, shape in enumerate(shapes)}
    made = {
        "param": lambda case: torch.randn(case.shape),
        "row": lambda case: torch.rand(case.shape[:-1]) if case.ndim > 2 else torch.rand(case.shape),
        "scalar": lambda _: torch.tensor(2.5),
        "int": lambda _: 7,
        "double": lambda case: torch.randn(case.shape).double(),
    }
    states = {
        pid: {f"{kind}_row{number}": made[kind](parameter) for number, kind in enumerate(kinds)}
        for pid, parameter in parameters.items()
        if pid != 1
    }
    every = {dp: shard_zero_states(parameters, states, dp, masters=masters) for dp in degrees}
    at = write(folder / "a", every[degrees[0]], xser=xser)
    for step, dp in enumerate(degrees[1:]):
        if step % 2:
            at = convert(at, folder / f"full{step}", None)
        at = convert(at, folder / f"b{step}", dp)
        for rank, tree in enumerate(every[dp]):
            actual = load_rank_file(at / "optim" / rank_file_name(rank))
            tree["param_groups"][0]["betas"] = list(tree["param_groups"][0]["betas"])
            assert equal_trees(actual, tree)


@pytest.mark.parametrize("xser", [True, False])
def test_what_it_writes_is_what_nxd_writes(tmp_path: Path, xser: bool) -> None:
    source = write(tmp_path / "a", sample(2), xser=xser)
    actual = read_files(convert(source, tmp_path / "b", 3))
    assert actual == read_files(write(tmp_path / "c", sample(3), xser=xser))


def test_master_weights_are_converted(tmp_path: Path) -> None:
    source = write(tmp_path / "a", sample(2))
    whole = load_rank_file(convert(source, tmp_path / "b", None) / "optim" / "full_tp_rank_00_pp_rank_00.pt")
    torch.manual_seed(0)
    for pid, shape in SHAPES.items():
        assert torch.equal(whole["sharded_master_weights"][pid], torch.randn(shape))


def test_a_column_factor_is_never_guessed(tmp_path: Path) -> None:
    def trees(columns: list[torch.Tensor]) -> list[dict[str, Any]]:
        actual = shard_zero_states({0: torch.randn(6, 4)}, {0: {}}, 2)
        for tree, column in zip(actual, columns, strict=True):
            tree["base_state"][0] = {"exp_avg_sq_row": torch.ones(3), "exp_avg_sq_col": column}
        return actual

    alike = convert(write(tmp_path / "a", trees([torch.ones(4)] * 2)), tmp_path / "b", 3)
    assert load_rank_file(alike / "optim" / rank_file_name(2))["base_state"][0]["exp_avg_sq_row"].shape == (2,)
    assert load_rank_file(alike / "optim" / rank_file_name(2))["base_state"][0]["exp_avg_sq_col"].shape == (4,)
    with pytest.raises(CorruptCheckpointError, match="exp_avg_sq_col differs"):
        convert(write(tmp_path / "c", trees([torch.ones(4), torch.zeros(4)])), tmp_path / "d", 3)


def test_all_else_in_the_folder_is_taken_along(tmp_path: Path) -> None:
    source = extract_golden(tmp_path) / "z1_xser1"
    made = convert(source, tmp_path / "b", 4)
    rest = {file: data for file, data in read_files(source).items() if not file.startswith("optim/")}
    assert {file: data for file, data in read_files(made).items() if not file.startswith("optim/")} == rest
    assert "done" in rest


def _remove(folder: Path, name: str) -> None:
    (folder / "optim" / name).unlink()


def _cut(folder: Path) -> None:
    file = folder / "optim" / f"{rank_file_name(1)}.tensors" / "tensor_1.pt"
    file.write_bytes(file.read_bytes()[:-700])


def _replace(folder: Path, rank: int, tree: dict[str, Any]) -> None:
    for file in (folder / "optim").glob(f"{rank_file_name(rank)}*"):
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    save_rank_file(folder / "optim" / rank_file_name(rank), tree)


def _fill(folder: Path) -> None:
    tree = sample(3)[2]
    tree["base_state"][0]["exp_avg"][-1] = 1.0
    _replace(folder, 2, tree)


BROKEN = {
    "a middle rank is missing": (
        lambda at: _remove(at, rank_file_name(1)),
        CorruptCheckpointError,
        r"dp_rank_01.* is missing",
    ),
    "the last rank is missing": (
        lambda at: _remove(at, rank_file_name(2)),
        CorruptCheckpointError,
        "has shape .* files are missing",
    ),
    "a tensor's file is missing": (
        lambda at: (at / "optim" / f"{rank_file_name(1)}.tensors" / "tensor_2.pt").unlink(),
        CorruptCheckpointError,
        r"dp_rank_01.*tensor_2.pt is missing",
    ),
    "a tensor's file is cut short": (_cut, CorruptCheckpointError, r"dp_rank_01.*tensor_1.pt"),
    "a rank is of another step": (
        lambda at: _replace(at, 1, sample(3, step=4.0)[1]),
        CorruptCheckpointError,
        "step differs.*dp_rank_01",
    ),
    "a rank is of another run": (
        lambda at: _replace(at, 1, sample(3, masters=False)[1]),
        CorruptCheckpointError,
        "dp_rank_01",
    ),
    "a rank is of other degrees": (
        lambda at: _replace(at, 2, sample(4)[2]),
        CorruptCheckpointError,
        r"dp_rank_02|has shape",
    ),
    "a stale rank is beside them": (
        lambda at: save_rank_file(at / "optim" / rank_file_name(3), sample(3)[2]),
        CorruptCheckpointError,
        "has shape",
    ),
    "what fills up is not zero": (_fill, CorruptCheckpointError, "padding of the tensor in .*dp_rank_02.*is not zero"),
    "not of a ZeRO-1 optimizer": (lambda at: _replace(at, 0, {"state": {}}), FormatError, "no base_state"),
    "of experts": (lambda at: _replace(at, 0, {**sample(3)[0], "ep_param_id_offset": 1}), FormatError, "experts"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_files_that_do_not_belong_together_are_named_and_nothing_is_written(tmp_path: Path, case: str) -> None:
    damage, error, message = BROKEN[case]
    source = write(tmp_path / "a", sample(3))
    damage(source)
    before = read_files(source)
    with pytest.raises(error, match=message):
        convert(source, tmp_path / "b", 2)
    assert read_files(source) == before
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_what_cannot_be_asked_for(tmp_path: Path) -> None:
    source = write(tmp_path / "a", sample(2))
    before = read_files(source)
    (tmp_path / "there").mkdir()
    asked: list[tuple[Path, Path, int | None, type[RanklessError], str]] = [
        (source, source, 4, InvalidArgumentError, "must not contain each other"),
        (source, source / "optim" / "new", 4, InvalidArgumentError, "must not contain"),
        (source, tmp_path, 4, InvalidArgumentError, "must not contain"),
        (source, tmp_path / "there", 4, TagExistsError, "there exists already"),
        (source, tmp_path / "new", 0, InvalidArgumentError, "--dp_size"),
        (tmp_path / "none", tmp_path / "new", 4, NoCheckpointError, "no folder"),
        (tmp_path / "there", tmp_path / "new", 4, FormatError, "no ranks' files"),
    ]
    for item, final, ranks, error, message in asked:
        with pytest.raises(error, match=message):
            convert(item, final, ranks)
    whole = convert(source, tmp_path / "whole", None)
    with pytest.raises(InvalidArgumentError, match="whole states already"):
        convert(whole, tmp_path / "new", None)
    assert read_files(source) == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "there", "whole"]


def test_a_converter_that_is_killed_leaves_no_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "a", sample(2))
    before = read_files(source)
    monkeypatch.setattr("rankless.nxd.writer.torch_files._verify_range", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert(source, tmp_path / "b", 3)
    assert read_files(source) == before
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_a_draft_is_held_until_it_has_its_name(tmp_path: Path) -> None:
    publish = atomic_rename.rename_noreplace

    def look_and_publish(*paths: Path) -> None:
        assert clean_up(tmp_path) == []
        publish(*paths)

    source = write(tmp_path / "a", sample(2))
    with mock.patch.object(atomic_rename, "rename_noreplace", side_effect=look_and_publish) as published:
        convert(source, tmp_path / "b", 3)
    assert published.call_count == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b"]


def test_the_rows_of_ranks_are_those_of_fsdp() -> None:
    for size in range(1, 12):
        for dp in range(1, 6):
            whole = torch.arange(float(size))
            trimmed = list(torch.chunk(whole, dp))
            own = shard_rows(whole, dp)
            assert torch.equal(torch.cat(own)[:size], whole)
            for part, row in zip(trimmed, own, strict=False):
                assert torch.equal(row[: len(part)], part)
