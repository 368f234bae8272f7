"""A reader of a folder whose components have different formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.formats.reader import CheckpointValues, FileExtent, Reader, UnreadTensorNote
from holdfast.ondisk.files import TensorInfo
from holdfast.ondisk.values import ArrayCodec


class CompositeReader:
    """A reader that combines several readers of one folder; no group is in two of them.

    See :class:`holdfast.formats.reader.Reader`.
    """

    def __init__(self, path: Path, readers: Sequence[Reader]) -> None:
        self.path, self.readers = path, readers
        self._reader_by_group = {group: reader for reader in readers for group in reader.groups}
        self.format = "+".join(sorted({reader.format for reader in readers}))
        self.fingerprint = "-".join(reader.fingerprint for reader in readers)
        self.groups: Mapping[str, Mapping[str, TensorInfo]] = {
            group: reader.groups[group] for group, reader in self._reader_by_group.items()
        }
        self.tied: Mapping[str, Mapping[str, str]] = {
            group: names for reader in readers for group, names in reader.tied.items()
        }
        self.unread: Sequence[UnreadTensorNote] = [note for reader in readers for note in reader.unread]
        self.files: Sequence[Path] = [file for reader in readers for file in reader.files]

    def find_extents(self, group: str, name: str, start: int, stop: int) -> Sequence[FileExtent]:
        """See :class:`holdfast.formats.reader.Reader`."""
        return self._reader_by_group[group].find_extents(group, name, start, stop)

    def block_crcs(self, group: str, name: str) -> Sequence[int] | None:
        """See :class:`holdfast.formats.reader.Reader`."""
        return self._reader_by_group[group].block_crcs(group, name)

    def read_values(self, rank: int, shared_codec: ArrayCodec, rank_codec: ArrayCodec) -> CheckpointValues:
        """Return the shared values of all readers, and the values of ranks; at most one reader has any."""
        values = [reader.read_values(rank, shared_codec, rank_codec) for reader in self.readers]
        shared = {name: value for part in values for name, value in part.shared.items()}
        of_ranks = next((part for part in values if part.world_size), CheckpointValues(shared))
        return CheckpointValues(shared, of_ranks.rank_values, of_ranks.world_size, of_ranks.ranks)

    def check_files(self) -> None:
        """See :class:`holdfast.formats.reader.Reader`."""
        for reader in self.readers:
            reader.check_files()

    def is_current(self) -> bool:
        """Return whether every reader's checkpoint is current."""
        return all(reader.is_current() for reader in self.readers)
