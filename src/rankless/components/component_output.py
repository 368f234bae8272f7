"""The interface between a save of one component and the place that it writes into.

The save defines the content (:class:`SavedComponent`). An output says where, and how it appears:
:class:`rankless.components.folder_output.FolderComponentOutput` by one rename,
:class:`rankless.components.object_output.ObjectComponentOutput` file by file, the index last.

:class:`~rankless.components.component_content.ComponentContent` has one on every rank, and calls
:meth:`ComponentOutput.write` in the thread of the save. The order of the calls must stay: begin, join, write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from rankless.components.component_files import FileSet
from rankless.components.destination import Destination
from rankless.engine.comm.session import WritingRanks
from rankless.engine.integrity.crc_gather import HashedResult
from rankless.engine.io.requests import Fragments, KnownFragments, MoveRanges
from rankless.engine.io.upload_target import FileFrame
from rankless.engine.plan.save_plan import SavePlan
from rankless.engine.plan.writer_cells import CellGrain
from rankless.storage.object_path import ObjectPath

#: The result of a save of a component: its path, or the description of a published version.
Appeared_co = TypeVar("Appeared_co", covariant=True)


class SavedComponent(Protocol):
    """The part of a save of a component that an output asks for bytes and headers."""

    @property
    def plan(self) -> SavePlan:
        """The plan of this rank."""

    def find_equal_files(self, files: Mapping[int, Path]) -> tuple[list[int], Fragments]:
        """Return which of some files, by number, have this rank's bytes: see :mod:`rankless.engine.io.equal_files`."""

    def omit_files(self, numbers: Sequence[int]) -> None:
        """Write nothing into files with these numbers, on all ranks."""

    def write_files(self, folder: Path) -> HashedResult:
        """Write this rank's bytes into the files in a folder, inside the vote on the writing."""

    def move_share(self, move: MoveRanges) -> bytes:
        """Call ``move`` once, with the bytes that this rank uploads or passes on, inside the vote on the writing."""

    def build_header(self, number: int, fragments: KnownFragments) -> bytes:
        """Return the header of a file by its number, on rank 0, from the fragments of all ranks."""


class ComponentOutput(Protocol[Appeared_co]):
    """The place of one save of a component. All ranks have one, and call :meth:`write` together.

    In the vote "preparing the save", rank 0 calls :meth:`begin`. After the vote all ranks call :meth:`join` with the
    bytes that :meth:`begin` returned.
    """

    @property
    def grain(self) -> CellGrain | None:
        """The pieces of files that one rank must write; ``None`` if any ranks of a host may write side by side."""

    def begin(self, files: FileSet, frames: Sequence[FileFrame]) -> bytes:
        """Create the new files, on rank 0. Return the bytes that all ranks must know of them.

        ``frames`` are the frames of the files, in order.
        """

    def join(self, begun: bytes) -> None:
        """Take part in the output that rank 0 has begun."""

    def write(self, component: SavedComponent) -> Appeared_co:
        """Write all files, let them appear at their final paths, and return the result. It ends in votes."""

    def discard(self) -> None:
        """Remove the written files, after a failure, unless they have their final names.

        Each rank calls it in the rollback; only rank 0 has something to remove.
        """


def open_component_output(destination: Destination, ranks: WritingRanks) -> ComponentOutput[Path]:
    """Return the output for a destination. Nothing is created. The modules of each kind are imported if it is used.

    Each rank calls it when a save of a component is made.
    """
    if isinstance(destination.path, ObjectPath):
        from rankless.components.object_output import ObjectComponentOutput  # noqa: PLC0415

        return ObjectComponentOutput(destination.path, destination, ranks)
    from rankless.components.folder_output import FolderComponentOutput  # noqa: PLC0415

    return FolderComponentOutput(destination, ranks.session)
