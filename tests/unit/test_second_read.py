"""Tests second reads: what was read wrongly is reported, and what another job has changed meanwhile is not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from rankless.errors import CorruptCheckpointError
from rankless.storage.second_read import read_twice_if_wrong


def read_after(change: Callable[[], object], path: Path) -> str:
    """Read a file whose first read is wrong. The change happens just after that."""
    reads = 0

    def read() -> str:
        nonlocal reads
        reads += 1
        if reads == 1:
            change()
            raise CorruptCheckpointError("its CRC is wrong")
        return path.read_text()

    return read_twice_if_wrong(path, read)


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_text("right")
    other.rename(path)


def test_a_wrong_first_read_of_a_file_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "ranks.json"
    path.write_text("right")
    with caplog.at_level(logging.WARNING, "rankless"):
        assert read_after(lambda: None, path) == "right"
    assert "a first read of" in caplog.text


@pytest.mark.parametrize("is_there_before", [False, True])
def test_a_file_that_another_job_replaces_was_not_read_wrongly(
    is_there_before: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "ranks.json"
    if is_there_before:
        path.write_text("of an earlier checkpoint")
    with caplog.at_level(logging.WARNING, "rankless"):
        assert read_after(lambda: replace(path), path) == "right"
    assert not caplog.text
