"""Tests that folders of DeepSpeed that are corrupt, unfinished or of an unread kind are refused with a typed error.

An error names the file and the reason. No folder opens as a model of other values, or of none.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rankless
from rankless.errors import (
    CorruptCheckpointError,
    FormatError,
    InvalidArgumentError,
    NoCheckpointError,
    RanklessError,
    UnsafeNameError,
    UnsafePickleError,
)
from tests.helpers.bounded_reads import limit_memory, read_checkpoint
from tests.helpers.deepspeed_files import deepspeed_modules, random_save, write_zero
from tests.helpers.unsafe_pickles import UNSAFE_OBJECTS

SHAPES = {"a.weight": (5, 3), "a.bias": (5,), "b.weight": (7, 5)}
GROUPS = [["a.weight", "b.weight"], ["a.bias"]]

MODEL, DIVIDED_MODEL = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_model_states.pt"
OPTIMIZER = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"

Edit = Callable[[Any], Any]


def write(path: Path, stage: int = 1, **options: Any) -> Path:
    return write_zero(path, random_save(SHAPES, GROUPS, ("exp_avg", "exp_avg_sq"), stage=stage, **options))


def edit(path: Path, change: Edit) -> None:
    """Change the tree in a file."""
    with deepspeed_modules():
        tree = torch.load(path, weights_only=False)
        change(tree)
        torch.save(tree, path)


def inner(key: str, change: Edit) -> Edit:
    """A change of the optimizer's entry ``key`` in a rank's file."""
    return lambda tree: tree["optimizer_state_dict"].update({key: change(tree["optimizer_state_dict"][key])})


def refuse(path: Path, kind: type[RanklessError], text: str) -> None:
    with limit_memory(), pytest.raises(kind, match=text):
        read_checkpoint(path)


def test_a_latest_tag_that_is_missing_is_named_with_the_tags_that_are_there(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "latest").write_text("global_step9")
    refuse(tmp_path, NoCheckpointError, r"latest names the tag 'global_step9', which has no files.*\(global_step7\)")


@pytest.mark.parametrize("text", ["../other", "/etc", "", ".hidden", "a\nb"])
def test_a_tag_outside_of_the_folder_is_refused(tmp_path: Path, text: str) -> None:
    write(tmp_path)
    (tmp_path / "latest").write_text(text)
    refuse(tmp_path, UnsafeNameError, "latest must hold the name of a folder next to it")


def test_a_file_that_leads_outside_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    (folder / MODEL).rename(tmp_path / "elsewhere.pt")
    (folder / MODEL).symlink_to(tmp_path / "elsewhere.pt")
    refuse(tmp_path / "run", UnsafeNameError, "elsewhere")


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_missing_optimizer_file_is_an_unfinished_save(tmp_path: Path, stage: int, rank: int) -> None:
    folder = write(tmp_path, stage, ranks=3)
    (folder / OPTIMIZER.format(rank)).unlink()
    refuse(tmp_path, CorruptCheckpointError, "missing|did not finish")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_missing_model_file_of_zero_3_is_an_unfinished_save(tmp_path: Path, rank: int) -> None:
    folder = write(tmp_path, 3, ranks=3)
    (folder / DIVIDED_MODEL.format(rank)).unlink()
    refuse(tmp_path, CorruptCheckpointError, "missing|did not finish")


def test_a_folder_without_any_optimizer_file_is_not_a_model_of_16_bits(tmp_path: Path) -> None:
    folder = write(tmp_path, dtype=torch.bfloat16)
    for rank in range(2):
        (folder / OPTIMIZER.format(rank)).unlink()
    refuse(tmp_path, CorruptCheckpointError, "no files of the optimizer.*weights=model")
    model = torch.nn.Module()
    model.a = torch.nn.Linear(3, 5, dtype=torch.bfloat16)
    rankless.restore(folder, model=model, strict=False, keys={"weights": "model", "optimizer": "skip"})
    assert model.a.weight.any()


@pytest.mark.parametrize("stage", [1, 3])
def test_files_of_an_earlier_save_by_more_ranks_are_refused(tmp_path: Path, stage: int) -> None:
    folder = write(tmp_path, stage, ranks=2)
    for name in (OPTIMIZER, *([DIVIDED_MODEL] if stage == 3 else [])):
        shutil.copy(folder / name.format(1), folder / name.format(2))
    refuse(tmp_path, CorruptCheckpointError, "2 ranks share its group 0, and there are files of 3")


@pytest.mark.parametrize("stage", [1, 3])
def test_files_of_two_saves_are_refused(tmp_path: Path, stage: int) -> None:
    folder = write(tmp_path / "a", stage)
    other = write_zero(tmp_path / "b", random_save({**SHAPES, "b.weight": (9, 5)}, GROUPS, ("exp_avg",), stage=stage))
    shutil.copy(other / OPTIMIZER.format(1), folder / OPTIMIZER.format(1))
    refuse(tmp_path / "a", CorruptCheckpointError, "from two saves")


@pytest.mark.parametrize("stage", [1, 3])
def test_files_of_two_steps_are_refused(tmp_path: Path, stage: int) -> None:
    """A save that overwrites a tag and does not finish leaves such files. They are found without reading all bytes."""
    folders = [write(tmp_path / str(step), stage, step=torch.tensor(float(step))) for step in (7, 8)]
    shutil.copy(folders[1] / OPTIMIZER.format(1), folders[0] / OPTIMIZER.format(1))
    with pytest.raises(CorruptCheckpointError, match="the state 'step' of group 0 is not that of the other ranks"):
        rankless.open(tmp_path / "7")


#: Changes of a rank's optimizer file that contradict the rest, by what they change.
CONTRADICTIONS: dict[str, tuple[Edit, str]] = {
    "no param_groups": (inner("base_optimizer_state", lambda base: {"state": base["state"]}), "not the state"),
    "other groups": (inner("partition_count", lambda _: [2]), "entries for"),
    "counts of text": (inner("partition_count", lambda _: ["a", "b"]), "partition_count"),
    "a group too many": (inner("single_partition_of_fp32_groups", lambda groups: [*groups, groups[0]]), "flat tensors"),
    "no tensors": (inner("single_partition_of_fp32_groups", lambda _: [None, None]), "no tensor"),
    "two dimensions": (inner("single_partition_of_fp32_groups", lambda t: [t[0][:, None], t[1]]), "one dimension"),
    "fewer elements": (inner("single_partition_of_fp32_groups", lambda t: [t[0][:-3], t[1]]), "have 47 elements"),
    "another dtype": (
        inner("single_partition_of_fp32_groups", lambda t: [t[0].double(), t[1]]),
        "24 elements of F32, but 24 of F64",
    ),
    "alignment of text": (inner("param_alignment_paddings", lambda _: [["x"], [0]]), "numbers of elements"),
    "more alignment": (inner("param_alignment_paddings", lambda _: [[8, 0], [0]]), "have 50 elements"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_an_optimizer_file_that_contradicts_the_rest_is_refused(tmp_path: Path, case: str) -> None:
    change, text = CONTRADICTIONS[case]
    folder = write(tmp_path)
    for rank in range(2) if "alignment" in case or "counts" in case else range(1):
        edit(folder / OPTIMIZER.format(rank), change)
    refuse(tmp_path, (CorruptCheckpointError, FormatError), text)  # type: ignore[arg-type]


def test_a_state_that_is_not_divided_as_its_parameters_is_named(tmp_path: Path) -> None:
    """Only loads of the optimizer fail."""
    folder = write(tmp_path)

    def add(tree: Any) -> None:
        for states in tree["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            states |= {"factors": torch.ones(3, 2), "worker_error": torch.ones(9)}

    for rank in range(2):
        edit(folder / OPTIMIZER.format(rank), add)
    model = torch.nn.Module()
    model.a = torch.nn.Linear(3, 5)
    rankless.restore(tmp_path, model=model, strict=False)
    with pytest.raises(FormatError, match=r"'a\.weight/factors' is not divided as its parameters are"):
        rankless.restore(tmp_path, optimizer=torch.optim.AdamW(model.parameters()), model=model, strict=False)


def test_an_optimizer_offloaded_to_nvme_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "empty", 3)
    for rank in range(2):
        edit(folder / OPTIMIZER.format(rank), inner("fp32_flat_groups", lambda groups: [group[:0] for group in groups]))
    refuse(tmp_path / "empty", FormatError, "offloaded to NVMe")
    folder = write(tmp_path / "swapped", 3)
    (folder / "offloaded_tensors").mkdir()
    refuse(tmp_path / "swapped", FormatError, "offloaded to NVMe")


def test_an_unknown_form_of_optimizer_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path)
    edit(folder / OPTIMIZER.format(0), lambda tree: tree.update(optimizer_state_dict={"shards": []}))
    refuse(
        tmp_path, FormatError, "DeepSpeed 0.19.8 with an optimizer or a checkpoint engine that rankless does not read"
    )


def test_tensor_parallel_ranks_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path)
    shutil.copy(folder / MODEL, folder / "mp_rank_01_model_states.pt")
    refuse(tmp_path, FormatError, "2 tensor-parallel ranks .*has no affine_map")


def test_auto_ep_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path)
    edit(folder / MODEL, lambda tree: tree.update(ds_autoep_layers=[{"ep_rank": 0}]))
    refuse(tmp_path, FormatError, "AutoEP, which rankless reads neither here nor in universal checkpoints")


def test_frozen_parameters_that_were_left_out_are_named(tmp_path: Path) -> None:
    """``exclude_frozen_parameters`` of ZeRO-3 leaves tensors without elements, which are no model."""
    folder = write(tmp_path, 3)
    for rank in range(2):
        edit(folder / DIVIDED_MODEL.format(rank), lambda tree: tree["module"].update({"base": torch.empty(0)}))
    assert "model/base" not in set(rankless.open(tmp_path))
    model = torch.nn.Module()
    model.base = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(FormatError, match="'base' is divided among ranks, and no file has its parts"):
        rankless.load_checkpoint(tmp_path, model=model)


def test_quantized_frozen_parameters_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, 3, frozen={"base": torch.randn(4)})

    def quantize(tree: Any) -> None:
        tree["frozen_param_fragments"]["base"] = torch.ones(2, dtype=torch.int8)

    for rank in range(2):
        edit(folder / DIVIDED_MODEL.format(rank), quantize)
    refuse(tmp_path, FormatError, "'base' is quantized")


@pytest.mark.parametrize("name", UNSAFE_OBJECTS)
@pytest.mark.parametrize("file", [MODEL, OPTIMIZER.format(1)])
def test_no_code_of_a_file_runs(tmp_path: Path, file: str, name: str) -> None:
    folder = write(tmp_path)
    with deepspeed_modules():
        tree = torch.load(folder / file, weights_only=False)
        torch.save({**tree, "client": UNSAFE_OBJECTS[name]}, folder / file)
    refuse(tmp_path, (UnsafePickleError, CorruptCheckpointError), file)  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", ["masters", "moments", "model"])
def test_a_changed_byte_of_a_tensor_is_found(tmp_path: Path, stage: int, kind: str) -> None:
    """By the CRCs that torch writes; of a model, also by its master weights."""
    save = random_save(SHAPES, GROUPS, ("exp_avg",), stage=stage, frozen={"base": torch.randn(6)})
    folder = write_zero(tmp_path / "c", save)
    tensor = {
        "masters": save.masters["a.bias"],
        "moments": save.states["exp_avg"]["a.bias"],
        "model": save.frozen["base"],
    }[kind]
    first = tensor.numpy().tobytes()[:8]
    (file,) = (
        file for file in folder.iterdir() if first in file.read_bytes() and ("model" in file.name) == (kind == "model")
    )
    raw = bytearray(file.read_bytes())
    raw[raw.index(first)] ^= 1
    file.write_bytes(raw)
    problems = [check.problem for check in rankless.open(tmp_path / "c").verify() if check.problem]
    assert any(file.name in problem for problem in problems)
    with pytest.raises(CorruptCheckpointError):
        rankless.convert(tmp_path / "c", tmp_path / "converted", to="native")
    assert not (tmp_path / "converted").exists()


def test_keys_of_other_formats_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    for keys in ({"layout": "llama"}, {"weights": "x"}, {"model": "module"}):
        with pytest.raises(InvalidArgumentError, match="keys: "):
            rankless.load_checkpoint(tmp_path, model=torch.nn.Linear(1, 1), keys=keys)


def test_a_file_called_latest_is_not_enough(tmp_path: Path) -> None:
    """Other systems have such files, too."""
    (tmp_path / "latest").write_text("x")
    (tmp_path / "x").mkdir()
    with pytest.raises(RanklessError):
        rankless.open(tmp_path)


def test_equal_master_weights_without_zero_have_no_names(tmp_path: Path) -> None:
    """In 16 bits and without ZeRO the files have no names: each master weight must round to one parameter only."""
    weights = {"a": torch.zeros(3), "b": torch.zeros(3)}
    state = {
        "module": {name: tensor.bfloat16() for name, tensor in weights.items()},
        "optimizer": {
            "cur_scale": 1.0,
            "optimizer_state_dict": {"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]},
            "fp32_groups": [list(weights.values())],
        },
    }
    torch.save(state, tmp_path / MODEL)
    refuse(tmp_path, FormatError, "could be any of a, b.*optimizer=skip")
    model = torch.nn.ParameterDict({name: torch.ones(3, dtype=torch.bfloat16) for name in weights})
    rankless.load_checkpoint(tmp_path, model=model, keys={"optimizer": "skip"})
    assert not model["a"].any()


@pytest.mark.parametrize("kind", ["link", "dangling link", "folder"])
def test_what_names_the_newest_tag_must_be_a_file(tmp_path: Path, kind: str) -> None:
    tag = write(tmp_path)
    latest = tmp_path / "latest"
    latest.unlink()
    if kind == "folder":
        latest.mkdir()
    else:
        latest.symlink_to(tag.name if kind == "link" else "missing")
    with pytest.raises(RanklessError, match="latest"):
        rankless.open(tmp_path)
