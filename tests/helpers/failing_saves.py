"""Background saves that fail once, as if a disk had failed for a moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from rankless.errors import StorageError
from rankless.save.training_content import TrainingContent


@contextmanager
def one_failing_save(number: int, kind: type[Any] = TrainingContent) -> Iterator[None]:
    """Let one save of this process fail after its call has returned, as if the disk had failed for a moment."""
    write, calls = kind.write_and_commit, iter(range(1, 100))

    def write_and_commit(save: Any) -> Any:
        if next(calls) == number:
            raise StorageError(5, f"{save.path}: an error for a moment")
        return write(save)

    with mock.patch.object(kind, "write_and_commit", write_and_commit):
        yield
