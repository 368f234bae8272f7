"""The interface between a conversion and the place that it writes into.

A conversion defines the content (:class:`ConvertedContent`, and a target with the files of the format). An output says
where, and how it appears: :class:`rankless.conversion.folder_output.FolderConversionOutput` by one rename,
:class:`rankless.conversion.object_output.ObjectConversionOutput` file by file, those that name others last. All ranks
must call the methods in the order of :class:`ConversionOutput`: some of them hold votes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from rankless.conversion.target import ConversionTarget, FileLayout
from rankless.engine.comm.session import WritingRanks
from rankless.engine.io.requests import KnownFragments, MoveRanges, OnBytesMoved
from rankless.engine.plan.file_ranges import FileRange
from rankless.storage.object_path import ObjectPath


class RankShare(NamedTuple):
    """The layout of the files, at the paths where they can be read back, and the bytes that this rank writes.

    ``linked`` are its share of the bytes in files that are links: they are read back only.
    """

    layout: FileLayout
    file_ranges: Sequence[FileRange]
    linked: Sequence[FileRange] = ()


#: Reads the files that this rank has written, and compares their bytes with the bytes that it wrote.
ReadBack = Callable[[], None]


class ConvertedContent(Protocol):
    """The part of a conversion that an output asks for bytes, inside the vote on the writing."""

    def move_share(self, move: MoveRanges) -> bytes:
        """Call ``move`` once, with the bytes of this rank. Return the report on them for rank 0."""

    def finish(self, fragments: KnownFragments, reports: Sequence[bytes]) -> None:
        """Check the source, and let the target write its headers, on rank 0, from the hashes of all ranks."""


class ConversionOutput(Protocol):
    """The place of one conversion. All ranks have one, and call its methods in this order."""

    @property
    def pending(self) -> Path:
        """The folder for the files that rank 0's target creates. Rank 0 sends it to all ranks."""

    def clean_up(self) -> None:
        """Remove the leftovers of dead conversions to the same path, on rank 0.

        Called in the vote "reading the metadata".
        """

    def create(self, target: ConversionTarget, nbytes: int, host_of: Sequence[int]) -> RankShare:
        """Create the files, with tensors of ``nbytes`` bytes, and divide the work. ``host_of`` has each rank's host.

        All ranks call it: it holds the vote "preparing".
        """

    def write(self, content: ConvertedContent, on_moved: OnBytesMoved, read_back: ReadBack | None) -> None:
        """Write all bytes. Call ``read_back``, if it is passed, when the bytes of this rank can be read.

        All ranks call it: it holds the vote or the votes on the writing.
        """

    def check_valid(self, target: ConversionTarget) -> None:
        """Raise ``CorruptCheckpointError`` if the format's reader refuses the files. Each rank calls it for itself."""

    def publish(self) -> None:
        """Let the output appear at its final path. Raises ``TagExistsError`` if something is there.

        All ranks call it: it is the vote "finishing".
        """

    def discard(self) -> None:
        """Remove the written files, after a failure. No vote."""


def open_conversion_output(final: Path, ranks: WritingRanks) -> ConversionOutput:
    """Return the output for a path. Nothing is created. The modules of each kind are imported if it is used.

    Each rank calls it when a conversion is made.
    """
    if isinstance(final, ObjectPath):
        from rankless.conversion.object_output import ObjectConversionOutput  # noqa: PLC0415

        return ObjectConversionOutput(final, ranks)
    from rankless.conversion.folder_output import FolderConversionOutput  # noqa: PLC0415

    return FolderConversionOutput(final, ranks.session)
