"""The CRC-32s that zip files of ``torch.save`` have of their entries: of each storage, and of the pickle."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.errors import DamagedError, FormatError
from holdfast.formats.torchfile.zips import Entry, Window, entries
from holdfast.layout.sums import Sum


def entry_sums(window: Window) -> Iterator[Sum | DamagedError]:
    """Give the checksums of a zip file, or what is wrong with it.

    An entry without one has the number 0: torch can be told to write none, and so does who fills in storages later.
    """
    try:
        found = entries(window)
    except DamagedError as error:
        yield error
        return
    if sum(entry.size for entry in found.values()) > window.size:
        yield DamagedError(f"{window.label} is damaged: its entries have more bytes than there are, so they overlap")
        return
    for entry in found.values():
        if entry.crc:
            yield _entry_sum(entry, window)


def _entry_sum(entry: Entry, window: Window) -> Sum | DamagedError:
    try:
        start = window.start + entry.data(window)
    except DamagedError as error:
        return error
    except FormatError as error:  # it is compressed, as no file of torch.save is
        return DamagedError(*error.args)
    return Sum(window.path, start, start + entry.size, entry.crc, "CRC-32", f"the entry {entry.name!r}")
