"""A reader of a folder with components in different formats.

:mod:`rankless.formats.detect_foreign` and the readers of pipelines and Accelerate make one, on each rank that opens
such a folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rankless.errors import FormatError
from rankless.formats.reader import CheckpointValues, FileExtent, Reader, UnreadTensorNote, describe_doubts
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.values import ArrayCodec

#: The values that are no component. The values of several readers are joined.
_CONTENT = "user_content"


class CompositeReader:
    """A reader that combines several readers of one folder; no tensor is in two of them.

    See :class:`rankless.formats.reader.Reader`.
    """

    def __init__(self, path: Path, readers: Sequence[Reader]) -> None:
        self.path, self.readers = path, readers
        self._readers_by_group: dict[str, list[Reader]] = {}
        for reader in readers:
            for group in reader.groups:
                self._readers_by_group.setdefault(group, []).append(reader)
        self.format = "+".join(sorted({reader.format for reader in readers}))
        self.fingerprint = "-".join(reader.fingerprint for reader in readers)
        self.groups: Mapping[str, Mapping[str, TensorInfo]] = {
            group: _join_names(path, group, [reader.groups[group] for reader in group_readers])
            for group, group_readers in self._readers_by_group.items()
        }
        self.tied: Mapping[str, Mapping[str, str]] = {
            group: names for reader in readers for group, names in reader.tied.items()
        }
        self.unread: Sequence[UnreadTensorNote] = [note for reader in readers for note in reader.unread]
        self.files: Sequence[Path] = [file for reader in readers for file in reader.files]

    def find_extents(self, group: str, name: str, start: int, stop: int) -> Sequence[FileExtent]:
        """See :class:`rankless.formats.reader.Reader`."""
        return self._reader_of(group, name).find_extents(group, name, start, stop)

    def _reader_of(self, group: str, name: str) -> Reader:
        return next(reader for reader in self._readers_by_group[group] if name in reader.groups[group])

    def block_crcs(self, group: str, name: str) -> Sequence[int] | None:
        """See :class:`rankless.formats.reader.Reader`."""
        return self._reader_of(group, name).block_crcs(group, name)

    def read_values(self, rank: int, shared_codec: ArrayCodec, rank_codec: ArrayCodec) -> CheckpointValues:
        """Return the shared values of all readers, and the values of ranks; at most one reader has any."""
        values = [reader.read_values(rank, shared_codec, rank_codec) for reader in self.readers]
        shared = {name: value for part in values for name, value in part.shared.items()}
        contents = [part.shared[_CONTENT] for part in values if _CONTENT in part.shared]
        if contents and all(isinstance(content, dict) for content in contents):
            shared |= {_CONTENT: {key: value for content in contents for key, value in content.items()}}
        of_ranks = next((part for part in values if part.world_size), CheckpointValues(shared))
        return CheckpointValues(shared, of_ranks.rank_values, of_ranks.world_size, of_ranks.ranks)

    def check_files(self) -> None:
        """See :class:`rankless.formats.reader.Reader`."""
        for reader in self.readers:
            reader.check_files()

    def describe_doubts(self) -> Sequence[str]:
        """Return the doubts of all readers. See :class:`rankless.formats.reader.DoubtfulReader`."""
        return [doubt for reader in self.readers for doubt in describe_doubts(reader)]

    def is_current(self) -> bool:
        """Return whether every reader's checkpoint is current."""
        return all(reader.is_current() for reader in self.readers)


def _join_names(path: Path, group: str, parts: Sequence[Mapping[str, TensorInfo]]) -> dict[str, TensorInfo]:
    """Return the tensors of a group in all readers. Raises ``FormatError`` if two have a tensor of the same name."""
    joined = {name: info for names in parts for name, info in names.items()}
    if len(joined) < sum(map(len, parts)):
        raise FormatError(f"{path}: two of its files contain a tensor of {group} with the same name")
    return joined
