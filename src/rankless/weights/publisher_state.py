"""The state that a publisher keeps from one publication to the next.

:class:`~rankless.weights.publisher.WeightPublisher` has one on every rank. Rank 0 alone knows the manifest of the base;
all ranks know its key, and have a copy of the bytes that they published then. It changes only when a version is
committed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from rankless.ondisk.weight_versions import PublishedFile, VersionKey, VersionManifest
from rankless.weights.published_copy import PublishedCopy


@dataclass(frozen=True)
class OwnDelta:
    """The parts that this rank has written for one delta, in ``folder``."""

    folder: str
    parts: list[PublishedFile]


@dataclass
class PublisherState:
    """The newest version that this publisher has committed, and the facts of it that the next one needs.

    ``base`` is its manifest, on rank 0. ``layout`` is a digest of the files and tensors: deltas need equal ones.
    ``level_base`` is the version that the next level begins at; ``own_deltas`` are this rank's parts since then, or
    ``None`` if some of them do not depend on their base.
    """

    copy: PublishedCopy = field(default_factory=PublishedCopy)
    key: VersionKey | None = None
    base: VersionManifest | None = None
    layout: int = 0
    since_anchor: int = 0
    level_base: VersionKey | None = None
    own_deltas: list[OwnDelta] | None = field(default_factory=list)
    #: The version that could not be committed, or that got no answer to its commit.
    failed: VersionKey | None = None
    #: On rank 0, the highest number that was committed: it is not used again, also if its version was removed.
    last_number: int = 0
    has_removed_abandoned: bool = False
    #: On rank 0, a text that changes with the manifest of the base.
    base_version: str = ""
    process: int = field(default_factory=os.getpid)

    def leave_parent(self) -> None:
        """Begin anew in a forked process: its parent's publications are not in its memory."""
        if self.process != os.getpid():
            self.process, self.failed = os.getpid(), None
            self.forget()

    def forget(self) -> None:
        """Begin anew: the next version is an anchor without a delta."""
        self.copy.forget()
        self.key = self.base = self.level_base = None
        self.own_deltas = []
