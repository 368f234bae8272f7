"""The manifest of a new checkpoint, with the versions of the software that wrote it.

A training save calls it on rank 0 in the commit, a conversion to the format in its process. The format defines the
fields.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping

import msgspec

from rankless._version import __version__
from rankless.ondisk import manifest
from rankless.ondisk.manifest import FileRecord, Manifest, Provenance
from rankless.run.catalog import CheckpointIdentity


class CheckpointLabel(msgspec.Struct, frozen=True):
    """The description of a checkpoint in its manifest, without the files.

    ``time``: the start of the save in seconds since 1970. ``ranks``: the number of ranks that save.
    """

    tag: str
    identity: CheckpointIdentity
    time: float
    ranks: int
    step: float | None = None
    metrics: Mapping[str, float | None] = msgspec.field(default_factory=dict)


def build_manifest(label: CheckpointLabel, files: dict[str, FileRecord], torch_version: str = "") -> Manifest:
    """Return the manifest of a checkpoint that this process writes. A conversion does so without torch."""
    return Manifest(
        format="rankless",
        version=manifest.VERSION,
        tag=label.tag,
        id=label.identity.id,
        run=label.identity.run,
        incarnation=label.identity.incarnation,
        sequence=label.identity.sequence,
        time=label.time,
        step=label.step,
        metrics=dict(label.metrics),
        provenance=Provenance(__version__, torch_version, platform.python_version(), label.ranks),
        files=files,
        edits=list(label.identity.edits) or msgspec.UNSET,
    )
