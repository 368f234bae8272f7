"""Comparison of stored tensors that are one tensor here: tied weights, or several names of one memory.

It runs on each rank for a share of the pairs, in the vote "matching …". All ranks must have the pairs in one order, or
a pair would be compared by none.
"""

from __future__ import annotations

from rankless.engine.io.source_reader import SourceReader
from rankless.engine.plan.file_ranges import CHUNK
from rankless.formats.reader import Reader


def are_equal(reader: Reader, first: tuple[str, str], second: tuple[str, str]) -> bool:
    """Return whether two stored tensors, given by group and name, are equal.

    They are compared by their CRCs if both have some, else by reading both.

    Called by :class:`rankless.load.load_operation.LoadOperation` before anything is changed.
    """
    infos = [reader.groups[group][name] for group, name in (first, second)]
    if (infos[0].dtype, tuple(infos[0].shape)) != (infos[1].dtype, tuple(infos[1].shape)):
        return False
    crcs = [reader.block_crcs(*key) for key in (first, second)]
    if crcs[0] is not None and crcs[1] is not None:
        return list(crcs[0]) == list(crcs[1])
    nbytes = infos[0].nbytes
    return all(
        _read(reader, *first, start, stop) == _read(reader, *second, start, stop)
        for start, stop in ((start, min(start + CHUNK, nbytes)) for start in range(0, nbytes, CHUNK))
    )


def _read(reader: Reader, group: str, name: str, start: int, stop: int) -> bytearray:
    """Return bytes ``[start, stop)`` of a stored tensor."""
    data = bytearray(stop - start)
    extents = reader.find_extents(group, name, start, stop)
    sources = SourceReader([extent.file for extent in extents])
    try:
        for number, extent in enumerate(extents):
            sources.read(number, extent.offset, memoryview(data)[extent.start - start : extent.stop - start])
    finally:
        sources.close()
    return data
