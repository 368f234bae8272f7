"""Published weights of several ranks: in every layout the same versions, and each rank codes its own bytes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rankless
from rankless.errors import CorruptCheckpointError, StorageError
from rankless.weights import part_writer
from tests.helpers.layouts import LAYOUTS, LayoutRun, fill_run, local_tensor, named_tensors
from tests.helpers.pool import Ranks

_STEPS = 11


def change(run: LayoutRun, step: int) -> None:
    """Change some elements of each tensor, as a function of its name, of the position and of the step."""
    for name, tensor in named_tensors(run):
        local = local_tensor(tensor.detach())
        if local.is_floating_point() and local.numel():
            with torch.no_grad():
                local[local.abs() * 1000 % 7 < 1 + step % 3] *= 1.01
        assert name


def publish_layout(name: str, folder: str, expected: bool) -> list[bool]:
    """Publish some versions, each also by ``save_model``. Return for each whether it is an anchor."""
    run = fill_run(LAYOUTS[name][0]())
    anchors = []
    with rankless.WeightPublisher(Path(folder) / "weights", dtype="bfloat16", keep=None) as publisher:
        for step in range(_STEPS):
            change(run, step)
            handle = publisher.publish(run.model, step=step)
            assert handle is not None
            anchors.append(handle.wait().is_anchor)
            if expected:
                rankless.save_model(run.model, Path(folder) / f"expected_{step}", shard=True, dtype="bfloat16")
    return anchors


def manifests(folder: Path) -> list[Any]:
    """Return what the manifests of all versions say of the model files: headers, with the CRCs of all blocks."""
    versions = rankless.list_weight_versions(folder / "weights")
    return [json.loads(version.path.read_text())["files"] for version in versions]


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Path:
    """The versions that a single process publishes: the oracle of all layouts."""
    folder = tmp_path_factory.mktemp("one")
    (anchors,) = ranks(1, publish_layout, "plain", str(folder), True)
    assert anchors == [True] + [False] * (_STEPS - 1)
    return folder


@pytest.mark.parametrize(
    ("name", "size"),
    [("fsdp", 4), ("tp", 2), ("fsdp_tp", 4), ("ddp", 2), ("pp", 2), ("hsdp", 4), ("fsdp", 3), ("pp_fsdp", 4)],
)
def test_all_layouts_publish_the_same_versions(
    name: str, size: int, ranks: Ranks, of_one_process: Path, tmp_path: Path
) -> None:
    ranks(size, publish_layout, name, str(tmp_path), False)
    assert manifests(tmp_path) == manifests(of_one_process)
    with rankless.WeightFollower(tmp_path / "weights", tmp_path / "followed") as follower:
        follower.update()
        last = of_one_process / f"expected_{_STEPS - 1}"
        for file in last.iterdir():
            assert (tmp_path / "followed/current" / file.name).read_bytes() == file.read_bytes()


def follow_in_layout(name: str, weights: str) -> dict[str, Any]:
    run = fill_run(LAYOUTS[name][0]())
    with rankless.WeightFollower(weights, run.model) as follower:
        version = follower.update()
        assert version is not None
        assert follower.update() is None
    rankless.save_model(run.model, Path(weights).parent / f"of_{name}", shard=True, dtype="bfloat16")
    return {"number": version.number, "read": follower.read_bytes}


@pytest.mark.parametrize(("name", "size"), [("tp", 4), ("fsdp", 2), ("fsdp_tp", 4)])
def test_a_model_in_any_layout_follows(name: str, size: int, ranks: Ranks, of_one_process: Path) -> None:
    outcomes = ranks(size, follow_in_layout, name, str(of_one_process / "weights"))
    assert {outcome["number"] for outcome in outcomes} == {_STEPS}
    assert sum(outcome["read"] > 0 for outcome in outcomes) == 1  # of one host
    expected = of_one_process / f"expected_{_STEPS - 1}/model.safetensors"
    assert (of_one_process / f"of_{name}/model.safetensors").read_bytes() == expected.read_bytes()


def publish_while_one_rank_fails(folder: str, failing: int) -> list[str]:
    run = fill_run(LAYOUTS["fsdp"][0]())
    publisher = rankless.WeightPublisher(Path(folder) / "weights", async_save=False, keep=None)
    publisher.publish(run.model, step=0)
    errors = []
    for step in range(1, 4):
        change(run, step)
        write = part_writer.PartWriter.finish
        if step == 2 and dist.get_rank() == failing:

            def fail(self: object) -> Any:
                raise StorageError(5, f"injected into process {os.getpid()}")

            part_writer.PartWriter.finish = fail  # type: ignore[method-assign, assignment]
        try:
            publisher.publish(run.model, step=step)
        except StorageError as error:
            errors.append(str(error))
        finally:
            part_writer.PartWriter.finish = write  # type: ignore[method-assign]
    rankless.save_model(run.model, Path(folder) / "expected", shard=True)
    return errors


@pytest.mark.parametrize("failing", [0, 2])
def test_a_rank_that_fails_leaves_no_version_and_the_next_is_right(failing: int, ranks: Ranks, tmp_path: Path) -> None:
    """The next version is a delta to the last committed one: no rank has moved on."""
    outcomes = ranks(3, publish_while_one_rank_fails, str(tmp_path), failing)
    assert [len(errors) for errors in outcomes] == [1, 1, 1]
    assert all(f"rank {failing} of 3" in errors[0] or "injected" in errors[0] for errors in outcomes)
    versions = rankless.list_weight_versions(tmp_path / "weights")
    assert [(version.number, version.step, version.is_anchor) for version in versions] == [
        (1, 0, True),
        (2, 1, False),
        (3, 3, False),
    ]
    assert len(list((tmp_path / "weights").glob("delta-*"))) == 2
    with rankless.WeightFollower(tmp_path / "weights", tmp_path / "followed") as follower:
        follower.update()
    for file in (tmp_path / "expected").iterdir():
        assert (tmp_path / "followed/current" / file.name).read_bytes() == file.read_bytes()


def follow_damaged(weights: str) -> str:
    state = {"w": torch.full((1000,), 7.0)}
    follower = rankless.WeightFollower(weights, state)
    try:
        follower.update()
    except CorruptCheckpointError as error:
        assert state["w"].tolist() == [7.0] * 1000
        return str(error)
    finally:
        follower.close()
    return "followed"


def test_damage_is_an_error_on_all_ranks_and_changes_nothing(ranks: Ranks, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    with rankless.WeightPublisher(weights, async_save=False) as publisher:
        publisher.publish({"w": torch.zeros(1000)})
        publisher.publish({"w": torch.ones(1000)})
    (part,) = next(weights.glob("delta-2-*")).iterdir()
    raw = bytearray(part.read_bytes())
    raw[-3] ^= 8
    part.write_bytes(raw)
    outcomes = ranks(2, follow_damaged, str(weights))
    assert all("delta-2" in outcome or "version 2" in outcome for outcome in outcomes), outcomes
