"""The interface between the search for unchanged bytes and the code that shares them, on rank 0.

:mod:`rankless.save.incremental` calls it in the decision of the vote "finding unchanged bytes". All ranks must leave
out the same ranges: they get :class:`SettledFiles` from rank 0.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from rankless.engine.io.checkpoint_files import UnchangedBlocks
from rankless.engine.plan.omitted_ranges import OmittedRanges


class SettledFiles(NamedTuple):
    """The ranges that a save need not write, and facts that all ranks need to write the others."""

    omitted: OmittedRanges
    begun: bytes = b""


class SharedFiles(Protocol):
    """The files of an earlier checkpoint, the base, that a new one may share. Only rank 0 has one.

    :class:`rankless.save.base_files.BaseFiles` links and clones them, :class:`rankless.save.copied_files.CopiedFiles`
    has the object store copy them.
    """

    @property
    def base_path(self) -> Path:
        """The path of the base."""

    @property
    def crcs(self) -> Mapping[int, list[int]]:
        """The CRCs that the base has of the blocks of tensors in files that may be shared, by the tensor's number."""

    def settle(self, matching: Mapping[int, Collection[int]]) -> SettledFiles:
        """Share unchanged bytes, and create the files that are to be written.

        ``matching`` has the blocks of each tensor that are unchanged.
        """

    def unchanged_blocks(self, omitted: OmittedRanges) -> UnchangedBlocks:
        """Return the CRCs of the blocks that have bytes in the ``omitted`` ranges."""
