"""What the campaign has made so far, in a file, so that it can go on after an interruption."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from campaigns.run_histories.batches import BatchResult
from campaigns.run_histories.state import Counts


@dataclass
class Record:
    """The batches that were made, by the kind of place and the first seed, and the sum of their results."""

    batches: set[tuple[str, int]] = field(default_factory=set)
    histories: dict[str, int] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    violations: list[str] = field(default_factory=list)

    def add(self, kind: str, seed: int, batch: BatchResult) -> None:
        """Add a batch that begins with ``seed``."""
        self.batches.add((kind, seed))
        self.histories[kind] = self.histories.get(kind, 0) + batch.histories
        self.counts.add(batch.counts)
        self.violations += batch.violations


def load_record(path: Path | None) -> Record:
    """Return the record in a file; an empty one if there is no file."""
    if path is None or not path.exists():
        return Record()
    return msgspec.msgpack.decode(path.read_bytes(), type=Record)


def save_record(path: Path | None, record: Record) -> None:
    """Write a record, if there is a path for it."""
    if path is not None:
        draft = path.with_suffix(".new")
        draft.write_bytes(msgspec.msgpack.encode(record))
        draft.replace(path)
