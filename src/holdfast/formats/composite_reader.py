"""Parts of a checkpoint that lie in one folder in formats of their own, read as one checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.formats.reader import CheckpointValues, FileExtent, Reader, UnreadTensorNote
from holdfast.ondisk.files import TensorInfo
from holdfast.ondisk.values import ArrayCodec


class CompositeReader:
    """Several readers of one folder, each with groups of its own. See :class:`holdfast.formats.reader.Reader`."""

    def __init__(self, path: Path, readers: Sequence[Reader]) -> None:
        self.path, self._readers = path, readers
        self._home = {group: reader for reader in readers for group in reader.groups}
        self.format = "+".join(sorted({reader.format for reader in readers}))
        self.fingerprint = "-".join(reader.fingerprint for reader in readers)
        self.groups: Mapping[str, Mapping[str, TensorInfo]] = {
            group: reader.groups[group] for group, reader in self._home.items()
        }
        self.tied: Mapping[str, Mapping[str, str]] = {
            group: names for reader in readers for group, names in reader.tied.items()
        }
        self.unread: Sequence[UnreadTensorNote] = [one for reader in readers for one in reader.unread]
        self.files: Sequence[Path] = [file for reader in readers for file in reader.files]

    def extents(self, group: str, name: str, start: int, stop: int) -> Sequence[FileExtent]:
        """Where bytes of a tensor lie."""
        return self._home[group].extents(group, name, start, stop)

    def crcs(self, group: str, name: str) -> Sequence[int] | None:
        """The CRCs of a tensor's blocks, where its reader has them."""
        return self._home[group].crcs(group, name)

    def values(self, rank: int, shared: ArrayCodec, own: ArrayCodec) -> CheckpointValues:
        """The values of all."""
        found = [reader.values(rank, shared, own).shared for reader in self._readers]
        return CheckpointValues({name: value for one in found for name, value in one.items()})

    def check_files(self) -> None:
        """As each does."""
        for reader in self._readers:
            reader.check_files()

    def is_current(self) -> bool:
        """Whether each is."""
        return all(reader.is_current() for reader in self._readers)
