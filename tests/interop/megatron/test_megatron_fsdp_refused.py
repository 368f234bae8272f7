"""Tests that folders of Megatron-FSDP with other contents than megatron-core writes are refused, and nothing is run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import rankless
from rankless.errors import CorruptCheckpointError, FormatError, RanklessError
from tests.helpers.megatron_folders import MASTERS, build_fsdp_tree, save_bridge
from tests.helpers.unsafe_pickles import MARK_FILE, UNSAFE_OBJECTS

pytestmark = pytest.mark.filterwarnings("ignore")

Tree = dict[str, Any]

NORM = "module.module.module.decoder.final_layernorm.weight"
GATE = "module.decoder.layers.0.mlp.linear_fc1.weight"

#: Changes of the model, which no key makes readable.
OF_MODEL: dict[str, tuple[Callable[[Tree], object], str]] = {
    "a half is missing": (lambda tree: tree["model"].pop(f"{GATE}_v"), "must have two halves"),
    "another half": (lambda tree: tree["model"].update({f"{GATE}_v": torch.ones(3, 32)}), "of the same shape"),
    "whole and halves": (lambda tree: tree["model"].update({GATE: torch.ones(3)}), "as a whole and in halves"),
    "one name twice": (
        lambda tree: tree["model"].update({"module.module.output_layer.weight": torch.ones(3)}),
        "two tensors have the same name",
    ),
    "a value": (lambda tree: tree["model"].update({"module.x": 3}), r"has 'module\.x', int"),
    "a virtual pipeline": (
        lambda tree: tree.update(model0=tree.pop("model"), model1={"module.x": torch.ones(2)}),
        "model0, model1 in place of a model, as a virtual pipeline",
    ),
}

#: Changes of the optimizer, without which the model is readable.
OF_OPTIMIZER: dict[str, tuple[Callable[[Tree], object], str]] = {
    "no settings": (lambda tree: tree.pop("param_to_group_meta"), "has no param_to_group_meta"),
    "groups of torch": (lambda tree: tree.update(param_groups=[{"lr": 1.0}]), "has param_groups, which is not what"),
    "a foreign parameter": (
        lambda tree: tree["state"].update({"module.x": {**tree["state"][NORM]}}),
        r"states of 'module\.x', which the model lacks",
    ),
    "a foreign state": (
        lambda tree: [states.update(scale=torch.ones(2)) for states in tree["state"].values()],
        "has the state 'scale', whose meaning is unknown",
    ),
    "another shape": (lambda tree: tree["state"][NORM].update(exp_avg=torch.ones(2)), "lacks in that shape"),
    "a moment is missing": (lambda tree: tree["state"][NORM].pop("exp_avg"), "that others lack"),
    "a step is missing": (lambda tree: tree["state"][NORM].pop("step"), "that others lack"),
    "a step of three": (lambda tree: tree["state"][NORM].update(step=torch.ones(3)), "is a tensor of several numbers"),
    "a step of text": (lambda tree: tree["state"][NORM].update(step="x"), "is 'x', not a number"),
    "settings are missing": (lambda tree: tree["param_to_group_meta"].pop(NORM), "no settings of its group"),
}


def save_tree(folder: Path, tree: Tree) -> Path:
    dcp.save(tree, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("change", OF_MODEL)
def test_models(tmp_path: Path, change: str) -> None:
    apply, message = OF_MODEL[change]
    tree = build_fsdp_tree()
    apply(tree)
    path = save_tree(tmp_path / "iter_0000007", tree)
    for keys in ({}, {"optimizer": "skip"}):
        with pytest.raises((FormatError, CorruptCheckpointError), match=message):
            rankless.open(path, keys=keys)


@pytest.mark.parametrize("change", OF_OPTIMIZER)
def test_optimizers(tmp_path: Path, change: str) -> None:
    apply, message = OF_OPTIMIZER[change]
    tree = build_fsdp_tree()
    apply(tree["optimizer"])
    path = save_tree(tmp_path / "iter_0000007", tree)
    with pytest.raises((FormatError, CorruptCheckpointError), match=message):
        rankless.open(path)
    assert len(rankless.open(path, keys={"optimizer": "skip"}).keys()) == len(MASTERS)


def test_before_the_first_step_and_without_an_optimizer(tmp_path: Path) -> None:
    tree = build_fsdp_tree()
    tree["optimizer"]["state"] = {}
    first = save_tree(tmp_path / "iter_0000000", tree)
    tree.pop("optimizer")
    for path in (first, save_tree(tmp_path / "iter_0000007", tree)):
        assert len(rankless.open(path).keys()) == len(MASTERS)


def test_unsafe_arguments_are_not_run(tmp_path: Path) -> None:
    path = save_tree(tmp_path / "iter_0000007", {**build_fsdp_tree(), "args": UNSAFE_OBJECTS["a shell"]})
    opened = rankless.open(path)
    with pytest.raises(RanklessError, match="args"):
        opened.values  # noqa: B018 - reading the values fails
    assert not os.path.exists(MARK_FILE)  # noqa: PTH110 - the file may be named by a text


@pytest.mark.parametrize("name", ["iter_0000007/common.pt", "iter_0000007/train_state.pt", "latest_train_state.pt"])
def test_unsafe_files_of_a_run(tmp_path: Path, name: str) -> None:
    run = save_bridge(tmp_path / "run")
    torch.save({"step": UNSAFE_OBJECTS["a shell"]}, run / name)
    with pytest.raises(RanklessError, match=r"which rankless does not run"):
        rankless.open(run)
    assert not os.path.exists(MARK_FILE)  # noqa: PTH110 - the file may be named by a text


DESCRIPTIONS = {
    '{"sharded_backend": "torch_dist", "sharded_backend_version": 99}': "sharded_backend_version 99",
    '{"sharded_backend": "torch_dist", "common_backend": "other"}': "common_backend 'other'",
    '{"sharded_backend": "torch_dist", "common_backend_version": "1"}': "common_backend_version '1'",
    '{"sharded_backend": 3}': r"metadata\.json names no format",
    "[]": r"metadata\.json names no format",
    '{"sharded': r"metadata\.json names no format",
    "": r"metadata\.json names no format",
}


@pytest.mark.parametrize("text", DESCRIPTIONS)
def test_descriptions_of_other_versions(tmp_path: Path, text: str) -> None:
    run = save_bridge(tmp_path / "run")
    (run / "iter_0000007/metadata.json").write_text(text)
    for path in (run, run / "iter_0000007"):
        with pytest.raises((FormatError, CorruptCheckpointError), match=DESCRIPTIONS[text]):
            rankless.open(path)
