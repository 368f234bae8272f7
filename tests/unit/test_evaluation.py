"""Tests of waiting for checkpoints that another job saves."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

import rankless
from rankless import evaluation
from rankless.errors import InvalidArgumentError
from rankless.formats import native
from rankless.storage import filesystem_kind


def save(path: Path, step: int, **options: object) -> None:
    rankless.save_checkpoint(path, f"s{step}", {"w": torch.ones(2)}, step=step, **options)  # type: ignore[arg-type]


def wait(path: Path, after: object = None, timeout: float = 0.0) -> str | None:
    info = rankless.wait_for_new(path, after, timeout=timeout, poll_seconds=0.01)  # type: ignore[arg-type]
    return None if info is None else info.tag


def test_only_newer_checkpoints_are_new(tmp_path: Path) -> None:
    assert wait(tmp_path / "none") is None
    for step in (1, 2):
        save(tmp_path, step)
    assert wait(tmp_path) == wait(tmp_path, "s1") == "s2"
    assert wait(tmp_path, "s2") is wait(tmp_path, rankless.list_checkpoints(tmp_path)[-1]) is None
    assert wait(tmp_path, "removed by retention") == "s2"


def test_an_overwritten_checkpoint_is_new_for_who_has_seen_the_one_before(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (seen,) = rankless.list_checkpoints(tmp_path)
    save(tmp_path, 1, overwrite=True)
    assert wait(tmp_path, seen) == "s1"
    assert wait(tmp_path, "s1") is None


def test_a_run_directory_may_appear_later(tmp_path: Path) -> None:
    training = threading.Timer(0.2, save, (tmp_path / "later", 1))
    training.start()
    assert wait(tmp_path / "later", timeout=60) == "s1"
    training.join()


@pytest.mark.parametrize("options", [{}, {"every": True}], ids=["latest", "every"])
def test_an_iteration_says_why_it_ends(
    tmp_path: Path, options: dict[str, bool], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="rankless")
    with pytest.warns(UserWarning, match=r"no new checkpoint appeared in .*run within 0.1 s"):
        assert not list(rankless.iterate_pinned(tmp_path / "run", timeout=0.1, poll_seconds=0.01, **options))
    save(tmp_path, 1)
    assert len(list(rankless.iterate_pinned(tmp_path, timeout=0.1, poll_seconds=0.01, **options))) == 1
    assert "no checkpoint after 's1' appeared" in caplog.messages[-1]


def test_the_timeout_ends_the_wait_and_the_iteration(tmp_path: Path) -> None:
    save(tmp_path, 1)
    started = time.monotonic()
    seen = []
    for info in rankless.iterate_new(tmp_path, timeout=0.3, poll_seconds=0.01):
        seen.append(info.tag)
        for step in (2, 3) if len(seen) == 1 else ():
            save(tmp_path, step)
    assert seen == ["s1", "s3"]
    assert time.monotonic() - started >= 0.3


@pytest.mark.parametrize("options", [{"timeout": -1}, {"poll_seconds": 0}])
def test_times_are_not_negative(tmp_path: Path, options: dict[str, float]) -> None:
    with pytest.raises(InvalidArgumentError, match="poll_seconds"):
        rankless.wait_for_new(tmp_path, **options)


@pytest.mark.parametrize("is_local", [True, False])
def test_a_client_of_a_file_server_lists_the_directory_before_it_trusts_a_name(tmp_path: Path, is_local: bool) -> None:
    save(tmp_path, 1)
    listed = []
    with (
        mock.patch.object(filesystem_kind, "is_local", return_value=is_local),
        mock.patch.object(filesystem_kind, "list_names", listed.append),
    ):
        assert not native.holds_checkpoint(tmp_path / "s1", "another")
    assert listed == ([] if is_local else [tmp_path])


def test_the_checkpoint_of_an_iteration_is_pinned_until_the_next(tmp_path: Path) -> None:
    save(tmp_path, 1, keep=1)
    seen = []
    for checkpoint in rankless.iterate_pinned(tmp_path, timeout=0.3, poll_seconds=0.01):
        seen.append(checkpoint.tag)
        if len(seen) < 3:
            save(tmp_path, len(seen) + 1, keep=1)
        assert torch.equal(checkpoint["model/w"], torch.ones(2))
    assert seen == ["s1", "s2", "s3"]
    save(tmp_path, 4, keep=1)
    assert [info.tag for info in rankless.list_checkpoints(tmp_path)] == ["s4"]


def test_a_checkpoint_that_retention_has_removed_is_left_out(tmp_path: Path) -> None:
    """Between the look at the directory and the pin."""
    save(tmp_path, 1)
    infos = rankless.list_checkpoints(tmp_path)

    def look(*_: object, **__: object) -> Iterator[rankless.CheckpointInfo]:
        yield from infos
        shutil.rmtree(tmp_path / "s1")
        yield from infos

    with mock.patch.object(evaluation, "iterate_new", look):
        assert [checkpoint.tag for checkpoint in rankless.iterate_pinned(tmp_path)] == ["s1"]


def test_every_checkpoint_can_be_evaluated_though_the_training_is_faster_and_keeps_one(tmp_path: Path) -> None:
    save(tmp_path, 1, keep=1)
    seen = []
    for checkpoint in rankless.iterate_pinned(tmp_path, every=True, timeout=1.0, poll_seconds=0.01):
        seen.append(checkpoint.tag)
        for step in range(2, 6) if len(seen) == 1 else ():
            save(tmp_path, step, keep=1)
            wait_until_pinned(tmp_path, f"s{step}")
        assert torch.equal(checkpoint["model/w"], torch.ones(2))
    assert seen == ["s1", "s2", "s3", "s4", "s5"]
    save(tmp_path, 6, keep=1)
    assert [info.tag for info in rankless.list_checkpoints(tmp_path)] == ["s6"]
    assert not list(tmp_path.glob(".*.pin"))


def test_a_loop_over_every_checkpoint_that_ends_early_leaves_no_pin_and_no_thread(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    checkpoints = rankless.iterate_pinned(tmp_path, every=True, poll_seconds=0.01)
    assert next(checkpoints).tag == "s1"
    wait_until_pinned(tmp_path, "s3")
    checkpoints.close()  # type: ignore[attr-defined]
    assert not list(tmp_path.glob(".*.pin"))
    assert not [thread for thread in threading.enumerate() if thread.name == "rankless-pins"]


def test_an_error_of_the_thread_that_pins_is_raised_in_the_loop(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with (
        mock.patch.object(evaluation, "held_pin", side_effect=rankless.StorageError(5, "denied")),
        pytest.raises(rankless.StorageError, match="denied"),
    ):
        next(rankless.iterate_pinned(tmp_path, every=True, timeout=10))


def wait_until_pinned(path: Path, tag: str) -> None:
    deadline = time.monotonic() + 30
    while not list(path.glob(f".{tag}.*.pin")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
