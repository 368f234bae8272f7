"""Uploads in small parts, so that small checkpoints have several, and small ranges are sent from their own memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from rankless.engine.io import part_assembly, received_messages, upload_parts
from rankless.engine.plan.writer_cells import CellGrain


@contextmanager
def small_parts(nbytes: int) -> Iterator[None]:
    """Let saves of this process upload parts of ``nbytes``."""
    with (
        mock.patch.object(upload_parts, "PART_BYTES", nbytes),
        mock.patch.object(upload_parts, "GRAIN", CellGrain(nbytes, is_dealt=True)),
        mock.patch.object(part_assembly, "_MIN_IN_PLACE", nbytes // 8),
        mock.patch.object(received_messages, "_MIN_UNCOPIED", nbytes // 8),
    ):
        yield
