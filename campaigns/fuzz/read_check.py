"""The check of a changed checkpoint: it must be read, or refused with a typed error.

No code from the checkpoint may run, and memory and time are bounded.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

import rankless
from rankless.dcp import FileSystemReader
from rankless.errors import RanklessError
from rankless.formats.registry import LAYOUT, MEGATRON_HF
from rankless.megatron.reader.megatron_directory import is_megatron
from tests.helpers.bounded_reads import limit_memory

#: Audit events of Python that show that external code could run.
_FORBIDDEN_EVENTS = frozenset(
    {"os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pickle.find_class"}
)

#: The CPU seconds that reading a checkpoint of a few kilobytes may take.
_MAX_SECONDS = 5.0


class ReadChecker:
    """The check of all cases, with their counts and an audit hook that detects code execution."""

    def __init__(self) -> None:
        self.read = self.refused = 0
        self._is_reading, self._event = False, ""
        sys.addaudithook(self._note_event)

    def _note_event(self, event: str, _: tuple[Any, ...]) -> None:
        if self._is_reading and event in _FORBIDDEN_EVENTS:
            self._event = event

    def find_problem(self, path: Path) -> str | None:
        """Read a checkpoint. Return the problem with its handling, if any."""
        start, self._event, self._is_reading = time.process_time(), "", True
        try:
            with limit_memory():
                _read_everything(path)
            self.read += 1
        except RanklessError as error:
            self.refused += 1
            if str(path.name) not in str(error) and path.parent.name not in str(error):
                return f"the error does not name the file: {error}"
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            return f"{type(error).__name__}: {error}"
        finally:
            self._is_reading = False
        if self._event:
            return f"code was run: {self._event}"
        taken = time.process_time() - start
        return f"it took {taken:.1f} s" if taken > _MAX_SECONDS else None


def _read_everything(path: Path) -> None:
    """Read everything in a checkpoint, in all ways."""
    opened = rankless.open(path)
    for name in opened:
        opened[name]
    _ = opened.values
    for _ in opened.verify():
        pass
    if (path / ".metadata").exists():
        _read_by_dcp(path)
    if is_megatron(path):
        list(rankless.open(path, keys={LAYOUT: MEGATRON_HF}))


def _read_by_dcp(path: Path) -> None:
    """Read each chunk whole, as ``dcp.load`` does with a storage reader."""
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    items, targets = [], {}
    for index in metadata.storage_data:
        entry = metadata.state_dict_metadata[index.fqn]
        kind, sizes = LoadItemType.BYTE_IO, torch.Size([0])
        if isinstance(entry, TensorStorageMetadata):
            kind = LoadItemType.TENSOR
            sizes = next(chunk.sizes for chunk in entry.chunks if chunk.offsets == index.offset)
            targets[index] = torch.empty(sizes, dtype=entry.properties.dtype)
        start = torch.Size([0] * len(sizes))
        items.append(ReadItem(kind, index, start, index, start, sizes))
    planner = mock.Mock(resolve_tensor=lambda item: targets[item.storage_index])
    reader.read_data(LoadPlan(items), planner)
