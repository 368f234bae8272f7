"""The base class of readers of formats that store a tree of tensors and values.

The readers of most other systems inherit from it. The fingerprint is compared between ranks in the vote "reading the
metadata".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rankless.errors import FormatError
from rankless.formats.reader import CheckpointValues, FileExtent, UnreadTensorNote
from rankless.formats.tree.tree_contents import TreeContents
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.values import ArrayCodec
from rankless.storage.store import list_versions, store_of

#: How many times as many bytes as the files the tensors may have, because they can share storages; and how many more.
_SHARED, _LEAST = 4, 2**20

#: The most files of a file system with versions that are noted: a new checkpoint at the path replaces all of its files.
_NOTED = 64


class TreeReader:
    """A reader of a checkpoint that is a tree of tensors and values. See :class:`rankless.formats.reader.Reader`."""

    def __init__(
        self,
        path: Path,
        kind: str,
        files: Sequence[Path],
        fingerprint: str,
        contents: TreeContents,
        *,
        notes_versions: bool = True,
    ) -> None:
        """Take over the contents. Raises ``FormatError`` if the tensors have many more bytes than the files.

        ``notes_versions``: tensors will be read, so it must be known whether the files are still these.
        """
        _check_total_size(path, files, contents)
        self.path, self.format, self.files, self.fingerprint = path, kind, files, fingerprint
        self._contents = contents
        self._versions = self._look_at_versions() if notes_versions else {}
        self.groups: Mapping[str, Mapping[str, TensorInfo]] = {
            group: {name: stored.info for name, stored in tensors.items()} for group, tensors in contents.groups.items()
        }
        self.tied: Mapping[str, Mapping[str, str]] = contents.tied
        self.unread: Sequence[UnreadTensorNote] = contents.unread

    def find_extents(self, group: str, name: str, start: int, stop: int) -> Sequence[FileExtent]:
        """See :class:`rankless.formats.reader.Reader`."""
        if group not in self._contents.groups:
            raise FormatError(f"{self.path} holds no {group}")
        return self._contents.groups[group][name].find_extents(start, stop)

    def block_crcs(self, group: str, name: str) -> Sequence[int] | None:
        """Return the CRCs of a tensor's blocks, or ``None``: most of these formats have none."""
        return self._contents.groups[group][name].crcs if group in self._contents.groups else None

    def read_values(self, rank: int, shared_codec: ArrayCodec, rank_codec: ArrayCodec) -> CheckpointValues:
        """Return the values. There are none of single ranks."""
        del rank, rank_codec
        return CheckpointValues(self._contents.decode_values(shared_codec))

    def is_current(self) -> bool:
        """Return whether the noted files are still those that were opened, with the same bytes."""
        return not self._versions or self._look_at_versions() == self._versions

    def _look_at_versions(self) -> dict[Path, str]:
        """Return the versions of the noted files. In an object store a list is one request."""
        if store_of(self.path).is_remote:
            listed = list_versions(self.path, _NOTED)
            return {file: listed.get(file, "") for file in self.files}
        return {file: store_of(file).file_version(file) for file in self.files[:_NOTED]}

    def check_files(self) -> None:
        """Do nothing: there are no checksums of the files, and everything else was checked when they were opened."""


def _check_total_size(path: Path, files: Sequence[Path], contents: TreeContents) -> None:
    nbytes = contents.total_nbytes()
    if nbytes <= _LEAST:
        return
    size = sum(store_of(file).file_size(file) for file in files)
    if nbytes > _SHARED * size + _LEAST:
        raise FormatError(
            f"{path} has {size} bytes, but its tensors have {nbytes}: they are views that repeat elements; "
            "call contiguous() on them before they are saved"
        )
