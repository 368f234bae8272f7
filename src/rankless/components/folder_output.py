"""The output of a component on a disk: all ranks write into files in a pending directory, which rank 0 renames.

:class:`~rankless.components.component_content.ComponentContent` has one on every rank. A kept file must have been
compared byte for byte on all ranks, in the vote "finding unchanged files"; the files are durable before the rename.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rankless.components.component_files import FileSet
from rankless.components.component_output import SavedComponent
from rankless.components.destination import Destination
from rankless.components.pending_files import PendingFiles
from rankless.engine.comm.session import Session
from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.engine.integrity.crc_gather import HashedResult, vote_with_fragments
from rankless.engine.io.requests import KnownFragments
from rankless.engine.io.upload_target import FileFrame
from rankless.process.prepared_types import prepared
from rankless.run.pending_lock import confirm_lock


@prepared
class _PendingComponent(msgspec.Struct, frozen=True, array_like=True):
    """The folder that rank 0 has created, and the files, by number, that may be unchanged, in the system's encoding."""

    folder: bytes
    there: dict[int, bytes]


_encode = msgspec.msgpack.Encoder().encode


class FolderComponentOutput:
    """A :class:`rankless.components.component_output.ComponentOutput` on a file system."""

    #: Any ranks of a host may write next to each other.
    grain = None

    def __init__(self, destination: Destination, session: Session) -> None:
        self._destination, self._session = destination, session
        self._folder = Path()
        #: The files, by number, that may be at their final paths already.
        self._there: dict[int, Path] = {}
        #: On rank 0, the files, and the fragments of unchanged ones.
        self._pending: PendingFiles | None = None
        self._fragments: KnownFragments = {}

    def begin(self, files: FileSet, frames: Sequence[FileFrame]) -> bytes:
        """See :class:`ComponentOutput`."""
        self._pending = PendingFiles(self._destination, files, frames)
        there = {number: os.fsencode(path) for number, path in self._pending.find_there().items()}
        return _encode(_PendingComponent(os.fsencode(self._pending.folder), there))

    def join(self, begun: bytes) -> None:
        """See :class:`ComponentOutput`."""
        decoded = msgspec.msgpack.decode(begun, type=_PendingComponent)
        self._folder = Path(os.fsdecode(decoded.folder))
        self._there = {number: Path(os.fsdecode(path)) for number, path in decoded.there.items()}

    def _find_unchanged(self, component: SavedComponent) -> None:
        """Leave out the files that are at their final paths already, on all ranks.

        It is a vote of its own, in the background of an asynchronous save, and only if there may be such files: a
        comparison before the call returns would block as long as it reads.
        """

        def compare() -> HashedResult:
            equal, fragments = component.find_equal_files(self._there)
            return HashedResult(fragments, _encode(equal))

        def settle(fragments: KnownFragments, posted: list[bytes]) -> bytes:
            by_rank = [{*msgspec.msgpack.decode(raw, type=list[int])} for raw in posted]
            self._fragments, pending = fragments, self._pending
            return _encode(
                [
                    number
                    for number in sorted(set.intersection(*by_rank))
                    if pending is not None and pending.keep_file(number, component.build_header(number, fragments))
                ]
            )

        order = component.plan.rank_order
        raw = vote_with_fragments(self._session, "finding unchanged files", compare, settle, order)
        component.omit_files(msgspec.msgpack.decode(raw, type=list[int]))

    def write(self, component: SavedComponent) -> Path:
        """See :class:`ComponentOutput`. Rank 0 publishes the files when all ranks have written theirs."""
        if self._there:
            self._find_unchanged(component)

        def write_share() -> HashedResult:
            if self._session.rank != COORDINATOR_RANK:
                confirm_lock(self._folder)
            return component.write_files(self._folder)

        def publish(fragments: KnownFragments, _: list[bytes]) -> bytes:
            if self._pending is not None:
                known = {**self._fragments, **fragments}
                self._pending.publish(lambda number: component.build_header(number, known))
            return b""

        vote_with_fragments(self._session, "writing", write_share, publish, component.plan.rank_order)
        return self._destination.path

    def discard(self) -> None:
        """See :class:`ComponentOutput`."""
        if self._pending is not None:
            self._pending.discard()
