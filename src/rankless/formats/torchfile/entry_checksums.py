"""The CRC-32 of each entry of a zip file of ``torch.save``: of each storage, and of the pickle.

:mod:`rankless.formats.file_checksums` and the reader of DCP's records collect with it.
"""

from __future__ import annotations

from collections.abc import Iterator

from rankless.errors import CorruptCheckpointError, FormatError
from rankless.formats.torchfile.zip_reader import FileWindow, ZipMember, read_members
from rankless.ondisk.range_checksums import RangeChecksum


def read_entry_checksums(window: FileWindow) -> Iterator[RangeChecksum | CorruptCheckpointError]:
    """Yield the checksums of a zip file's entries, or an error if they cannot be read.

    Entries with the CRC 0 have none: torch can be configured to write none, and so do programs that write the storages
    later.
    """
    try:
        members = read_members(window)
    except CorruptCheckpointError as error:
        yield error
        return
    if sum(entry.size for entry in members.values()) > window.size:
        yield CorruptCheckpointError(
            f"{window.label} is corrupt: its entries have more bytes than the file, so they overlap"
        )
        return
    for entry in members.values():
        if entry.crc:
            yield _entry_checksum(entry, window)


def _entry_checksum(entry: ZipMember, window: FileWindow) -> RangeChecksum | CorruptCheckpointError:
    try:
        start = window.start + entry.find_data(window)
    except CorruptCheckpointError as error:
        return error
    except FormatError as error:  # the entry is compressed, which torch.save never does
        return CorruptCheckpointError(*error.args)
    return RangeChecksum(window.path, start, start + entry.size, entry.crc, "CRC-32", f"the entry {entry.name!r}")
