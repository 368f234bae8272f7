"""Writes that take a known time."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock


def slow_down_writes(seconds: float = 0.5) -> Any:
    """Writing takes its time."""
    from rankless.engine.io.write import write_file_ranges

    def write(*arguments: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return write_file_ranges(*arguments, **options)

    return mock.patch("rankless.save.shard_writer.write_file_ranges", write)
