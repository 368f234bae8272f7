"""Tests that a crash leaves the old or the new checkpoint: the short form of ``python -m campaigns.crash``."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from campaigns.crash.disk import Disk, replay_history
from campaigns.crash.image import WHOLE, SurvivingPart, Tree
from campaigns.crash.operations import (
    ROOT,
    Create,
    Exchange,
    History,
    Operation,
    Remove,
    Rename,
    Resize,
    Sync,
    Write,
    merge_logs,
)
from campaigns.crash.recorder import Recorder
from campaigns.crash.recording import record_scenario
from campaigns.crash.scenarios import SCENARIOS, Scenario
from campaigns.crash.state_check import check_states
from rankless.storage.posix import make_durable_directory
from tests.helpers.pairwise import first_of
from tests.helpers.pool import Ranks
from tests.helpers.torch_limits import SHARDS_UNEVENLY

MODELS = SCENARIOS[1]


def found(root: Path) -> Tree:
    return {str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in root.rglob("*")}


@first_of(
    3,
    ("scenario", "n"),
    list(zip(SCENARIOS, itertools.cycle((2, 4 if SHARDS_UNEVENLY else 2, 1)), strict=False)),
    ids=lambda value: value.name if isinstance(value, Scenario) else str(value),
)
def test_a_crash_anywhere_leaves_the_old_or_the_new_one(
    ranks: Ranks, tmp_path: Path, scenario: Scenario, n: int
) -> None:
    history = record_scenario(scenario, n, ranks, tmp_path)
    assert replay_history(history) == found(tmp_path)  # nothing was missed
    findings = check_states(scenario, history, 20)
    assert findings.violations == []
    assert findings.checked >= 2


@pytest.fixture(scope="module")
def history(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> History:
    """A first save of two models by two ranks."""
    return record_scenario(MODELS, 2, ranks, tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    "name",
    ["model-00001-of-00004.safetensors", "state.json", "manifest.json", "model", "actor", ".partial", "a", "runs"],
)
def test_one_sync_less_is_found(history: History, name: str) -> None:
    """Of a file's bytes, or of the names in a folder."""
    nodes = {
        operation.node
        for operation in history.operations
        if isinstance(operation, Create) and operation.name.endswith(name)
    }
    less = [
        operation for operation in history.operations if not (isinstance(operation, Sync) and operation.node in nodes)
    ]
    assert len(less) < len(history.operations)
    assert check_states(MODELS, replace(history, operations=tuple(less)), 3).violations


def timed(*operations: Callable[[int, int], Operation]) -> Disk:
    """One after the other."""
    return Disk(History(tuple(make(2 * n, 2 * n + 1) for n, make in enumerate(operations)), (0,), (0,), (0,)))


def make(folder: int, name: str, node: int, *, is_folder: bool = False) -> Callable[[int, int], Operation]:
    return lambda begin, end: Create(begin, end, folder, name, node, is_folder)


def write(node: int, offset: int, data: bytes) -> Callable[[int, int], Operation]:
    return lambda begin, end: Write(begin, end, node, offset, data)


def sync(node: int) -> Callable[[int, int], Operation]:
    return lambda begin, end: Sync(begin, end, node)


def move(name: str, node: int, target: str) -> Callable[[int, int], Operation]:
    return lambda begin, end: Rename(begin, end, ROOT, name, node, ROOT, target)


def test_only_what_is_synced_is_sure_to_be_there() -> None:
    disk = timed(make(ROOT, "a", 1), write(1, 0, b"one"), sync(1), write(1, 3, b"two"), sync(ROOT))
    assert disk.build_tree(1, {}) == {}
    assert disk.build_tree(1, {0: WHOLE}) == {"a": b""}
    assert disk.build_tree(5, {}) == {}  # a file's sync does not keep its name
    assert disk.build_tree(5, {0: WHOLE}) == {"a": b"one"}
    assert disk.list_unsynced(5) == [0]
    assert disk.build_tree(9, {}) == {"a": b"one"}
    assert disk.build_tree(9, {3: WHOLE}) == {"a": b"onetwo"}


def test_what_a_sync_began_before_is_not_kept_by_it() -> None:
    overlapping = History((Create(0, 1, ROOT, "a", 1, is_folder=False), Sync(0, 2, ROOT)), (0,), (0,), (0,))
    assert Disk(overlapping).build_tree(2, {}) == {}


def test_a_name_in_a_folder_that_is_not_there_is_not_there() -> None:
    disk = timed(make(ROOT, "a", 1, is_folder=True), make(1, "b", 2), write(2, 0, b"x"), sync(2), sync(1))
    assert disk.build_tree(9, {}) == {}
    assert disk.build_tree(9, {0: WHOLE}) == {"a": None, "a/b": b"x"}
    assert set(disk.find_prerequisites(2)) == {0, 1}


def test_a_rename_has_the_old_name_or_the_new_one() -> None:
    disk = timed(make(ROOT, "old", 1), sync(ROOT), move("old", 1, "new"), sync(ROOT))
    assert disk.build_tree(5, {}) == {"old": b""}
    assert disk.build_tree(5, {2: WHOLE}) == {"new": b""}
    assert disk.build_tree(7, {}) == {"new": b""}


def test_names_that_depend_on_a_lost_operation_do_not_change() -> None:
    disk = timed(
        make(ROOT, "a", 1),
        make(ROOT, "b", 2),
        sync(ROOT),
        lambda begin, end: Exchange(begin, end, ROOT, "a", 1, ROOT, "b", 2),
        move("a", 2, "c"),
        lambda begin, end: Remove(begin, end, ROOT, "b", 1),
    )
    assert disk.build_tree(11, {}).keys() == {"a", "b"}
    assert disk.build_tree(11, {4: WHOLE, 5: WHOLE}).keys() == {"a", "b"}
    assert disk.build_tree(11, {3: WHOLE, 4: WHOLE}).keys() == {"b", "c"}
    assert disk.build_tree(11, {3: WHOLE, 4: WHOLE, 5: WHOLE}).keys() == {"c"}


@pytest.mark.parametrize(
    ("form", "allowed"),
    [
        (SurvivingPart("zeros"), {b"\0" * 1024}),
        (SurvivingPart("torn", 512), {a + b for a in (b"x" * 512, b"\0" * 512) for b in (b"x" * 512, b"\0" * 512)}),
        (SurvivingPart("cut", 512), {b"", b"x" * 512}),
        (WHOLE, {b"x" * 1024}),
    ],
    ids=lambda value: value.kind if isinstance(value, SurvivingPart) else "",
)
def test_an_unsynced_write_is_there_in_part(form: SurvivingPart, allowed: set[bytes]) -> None:
    disk = timed(make(ROOT, "a", 1), sync(ROOT), write(1, 0, b"x" * 1024))
    assert {disk.build_tree(5, {2: replace(form, seed=seed)})["a"] for seed in range(50)} == allowed


def test_a_size_may_be_there_without_the_bytes() -> None:
    disk = timed(make(ROOT, "a", 1), sync(ROOT), lambda begin, end: Resize(begin, end, 1, 4), write(1, 0, b"full"))
    assert disk.build_tree(7, {2: WHOLE})["a"] == b"\0" * 4


def test_what_the_recorder_does_not_know_it_refuses(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with Recorder(tmp_path):
        for unknown in (
            lambda: (tmp_path / "a").replace(tmp_path / "b"),
            lambda: (tmp_path / "b").symlink_to("a"),
            lambda: (tmp_path / "a").open("ab"),
            lambda: os.truncate(tmp_path / "a", 1),
        ):
            with pytest.raises(NotImplementedError, match="the recorder knows no"):
                unknown()
    assert found(tmp_path) == {"a": b""}


def test_a_durable_folder_is_there_after_a_crash_with_those_above_it(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        recorder.begin_step(0)
        make_durable_directory(tmp_path / "a/b/c")
        recorder.end_step(0)
    history = merge_logs([recorder.log])
    assert Disk(history).build_tree(history.acknowledged[0], {}).keys() == {"a", "a/b", "a/b/c"}
