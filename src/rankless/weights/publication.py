"""One publication: the caller's arguments for a new version, and the result.

:class:`~rankless.weights.publisher.WeightPublisher` makes the one on each rank, and returns the other. Followers and
commands describe versions with it, too. The names of the attributes are public.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rankless.formats.weights.version_files import manifest_path
from rankless.ondisk.weight_versions import TrainingPoint, VersionManifest


class Publication(msgspec.Struct, frozen=True):
    """The arguments of one publication. ``keep`` is the number of anchors that are kept; ``None``: all."""

    directory: Path
    step: int | float | None
    metrics: dict[str, float | None]
    training: TrainingPoint | None
    anchor_every: int
    keep: int | None

    def continues_other(self, base: VersionManifest | None) -> bool:
        """Return whether the training went back, or goes on in another incarnation, since the last version."""
        if base is None:
            return False
        has_gone_back = self.step is not None and base.step is not None and self.step < base.step
        return has_gone_back or _incarnation_of(self.training) != _incarnation_of(base.training)


def _incarnation_of(training: TrainingPoint | None) -> tuple[str, int] | None:
    return None if training is None else (training.run, training.incarnation)


@dataclass(frozen=True)
class WeightVersion:
    """One published version of a model's weights.

    Attributes:
        number: Its number. Numbers rise, also if the training went back to an earlier step.
        id: A random id.
        step: The step of the training, as it was passed.
        metrics: The metrics, as they were passed. One that was not finite is ``None``.
        time: When it was published, in seconds since 1970.
        is_anchor: Whether whole files were written, and not only differences.
        nbytes: The size of the model's files in bytes.
        written_bytes: The size of all that was written for this version.
        training: The run, incarnation and checkpoint of the training, if the publisher knows them.
        path: The manifest of the version: pass it to :func:`rankless.load_model`, :func:`rankless.open_weights` or
            :func:`rankless.convert`. The path of the weights directory means its newest version.
    """

    number: int
    id: str
    step: int | float | None
    metrics: Mapping[str, float | None]
    time: float
    is_anchor: bool
    nbytes: int
    written_bytes: int
    training: TrainingPoint | None
    path: Path

    @classmethod
    def of(cls, directory: Path, manifest: VersionManifest) -> WeightVersion:
        """Return the description of a version."""
        return cls(
            number=manifest.number,
            id=manifest.id,
            step=manifest.step,
            metrics=manifest.metrics,
            time=manifest.time,
            is_anchor=manifest.is_anchor,
            nbytes=manifest.nbytes,
            written_bytes=manifest.written_bytes,
            training=manifest.training,
            path=manifest_path(directory, manifest.number),
        )
