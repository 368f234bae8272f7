"""What the readers of formats that are trees have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.errors import FormatError
from holdfast.formats.reader import CheckpointValues, FileExtent, UnreadTensorNote
from holdfast.formats.tree.contents import TreeContents
from holdfast.ondisk.files import TensorInfo
from holdfast.ondisk.values import ArrayCodec
from holdfast.storage import posix

#: How much more tensors may have than their files have bytes, where they share storages.
_SHARED, _LEAST = 4, 2**20


class TreeReader:
    """A checkpoint that is a tree of tensors and values, arranged. See :class:`holdfast.formats.reader.Reader`."""

    def __init__(self, path: Path, kind: str, files: Sequence[Path], fingerprint: str, contents: TreeContents) -> None:
        """Raises ``FormatError`` where tensors have many more bytes than the files."""
        _check_repeats(path, files, contents)
        self.path, self.format, self.files, self.fingerprint = path, kind, files, fingerprint
        self._contents = contents
        self.groups: Mapping[str, Mapping[str, TensorInfo]] = {
            group: {name: stored.info for name, stored in tensors.items()} for group, tensors in contents.groups.items()
        }
        self.tied: Mapping[str, Mapping[str, str]] = contents.tied
        self.unread: Sequence[UnreadTensorNote] = contents.unread

    def extents(self, group: str, name: str, start: int, stop: int) -> Sequence[FileExtent]:
        """Where bytes of a tensor lie."""
        if group not in self._contents.groups:
            raise FormatError(f"{self.path} holds no {group}")
        return self._contents.groups[group][name].extents(start, stop)

    def crcs(self, group: str, name: str) -> Sequence[int] | None:
        """The CRCs of a tensor's blocks, which most of these formats lack."""
        return self._contents.groups[group][name].crcs if group in self._contents.groups else None

    def values(self, rank: int, shared: ArrayCodec, own: ArrayCodec) -> CheckpointValues:
        """The values. None belong to single ranks."""
        del rank, own
        return CheckpointValues(self._contents.values(shared))

    def is_current(self) -> bool:
        """Nobody can tell: such a checkpoint has no name of its own."""
        return True

    def check_files(self) -> None:
        """All that can be checked was, when it was opened: there are no checksums."""


def _check_repeats(path: Path, files: Sequence[Path], contents: TreeContents) -> None:
    nbytes = contents.nbytes()
    if nbytes <= _LEAST:
        return
    size = sum(posix.size_of(file) for file in files)
    if nbytes > _SHARED * size + _LEAST:
        raise FormatError(
            f"{path} has {size} bytes, and tensors of {nbytes}: they are views that repeat elements; "
            "call contiguous() on them before they are saved"
        )
