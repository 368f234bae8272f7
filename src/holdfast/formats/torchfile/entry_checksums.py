"""The CRC-32s that zip files of ``torch.save`` have of their entries: of each storage, and of the pickle."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.errors import CorruptCheckpointError, FormatError
from holdfast.formats.torchfile.zip_reader import FileWindow, ZipMember, read_members
from holdfast.ondisk.range_checksums import RangeChecksum


def read_entry_checksums(window: FileWindow) -> Iterator[RangeChecksum | CorruptCheckpointError]:
    """Give the checksums of a zip file, or what is wrong with it.

    An entry without one has the number 0: torch can be told to write none, and so does who fills in storages later.
    """
    try:
        found = read_members(window)
    except CorruptCheckpointError as error:
        yield error
        return
    if sum(entry.size for entry in found.values()) > window.size:
        yield CorruptCheckpointError(
            f"{window.label} is damaged: its entries have more bytes than there are, so they overlap"
        )
        return
    for entry in found.values():
        if entry.crc:
            yield _entry_sum(entry, window)


def _entry_sum(entry: ZipMember, window: FileWindow) -> RangeChecksum | CorruptCheckpointError:
    try:
        start = window.start + entry.data(window)
    except CorruptCheckpointError as error:
        return error
    except FormatError as error:  # it is compressed, as no file of torch.save is
        return CorruptCheckpointError(*error.args)
    return RangeChecksum(window.path, start, start + entry.size, entry.crc, "CRC-32", f"the entry {entry.name!r}")
