"""The division of a conversion among ranks. Every rank can read the whole source, so any rank can write any byte.

Pure functions of the layout: all ranks call them with equal arguments, and get shares that fit together.

:mod:`rankless.conversion.folder_output` and :mod:`rankless.conversion.object_output` ask it on each rank, after the
layout is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rankless.conversion.target import FileLayout
from rankless.engine.plan.equal_shares import split_evenly
from rankless.engine.plan.file_ranges import FileRange
from rankless.engine.plan.file_writers import PlacedTensor, WriterMap
from rankless.engine.plan.tensor_writers import EqualWriters
from rankless.engine.plan.writer_cells import CellGrain, CellPlanner


def share_evenly(layout: FileLayout, rank: int, ranks: int) -> list[FileRange]:
    """Return the share of a rank in the bytes, in the order of the files, for ranks of one host."""
    return [share for share in split_evenly(list(_spans(layout)), rank, ranks) if share.start < share.stop]


def share_by_cells(
    layout: FileLayout, sizes: Sequence[int], host_of: Sequence[int], rank: int, grain: CellGrain | None = None
) -> list[FileRange]:
    """Return the share of a rank in files of these sizes, if each cell must be written by the ranks of one host.

    A cell is a page, or with ``grain`` a part of an upload: then each rank is a host.
    """
    by_file: dict[int, list[PlacedTensor]] = {}
    spans = list(_spans(layout))
    for span in spans:
        stop = span.offset + span.stop - span.start
        by_file.setdefault(span.file, []).append(PlacedTensor(span.offset, stop, ("", ""), span.start))
    all_ranks = tuple(range(len(host_of)))
    writer_map = WriterMap(by_file, sizes, EqualWriters(all_ranks))
    # The ranks send each other nothing: each holds all bytes.
    return list(CellPlanner(writer_map, host_of, rank, grain).plan_rank({all_ranks: spans}, []).file_ranges)


def _spans(layout: FileLayout) -> Iterator[FileRange]:
    for number, of_tensor in enumerate(layout.tensors.values()):
        for span in of_tensor:
            yield FileRange(number, span.start, span.stop, span.start, span.file, span.offset)
