"""Metrics that are added to a checkpoint after its save, by an evaluator for example.

Each is a hidden file ``.TAG.ID.DIGEST.metric`` in the run directory: the tag and the id of the checkpoint, and a digest
of the metric's name. So two processes that add metrics never write the same file, unless the metric is the same one.
The files are no part of the format: a checkpoint is complete without them, and never changes.

``rankless.add_metrics`` writes them, in a process of its own, without ranks. Each list of a run reads them
(:mod:`rankless.run.checkpoint_info`); the clean-up of a save removes stale ones on rank 0. The names and contents of
the files are on disks: readers of them must stay able to read them.
"""

from __future__ import annotations

import errno
import hashlib
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from rankless.errors import CorruptCheckpointError, StorageError
from rankless.observe.warning import warn_caller
from rankless.process.prepared_types import prepared
from rankless.storage.file_memo import FileMemo, sign_file
from rankless.storage.store import store_of

_NAME = re.compile(r"\.(?P<tag>.+)\.(?P<id>[0-9a-f]{16})\.[0-9a-f]{16}\.metric")

#: The most bytes of the file of a metric.
_MAX_BYTES = 10_000


@prepared
class _AddedMetric(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a file: a metric's name, and its value, which is ``None`` if it is not finite."""

    name: str
    value: float | None


class MetricFile(msgspec.Struct, frozen=True):
    """The name of a file, and the tag and the id of its checkpoint."""

    name: str
    tag: str
    id: str


_MEMO: FileMemo[_AddedMetric] = FileMemo(2**15)


def write_added_metric(run: Path, tag: str, checkpoint_id: str, name: str, value: float | None) -> None:
    """Add a metric to a checkpoint in a run directory, or replace the value that was added before."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    file = run / f".{tag}.{checkpoint_id}.{digest}.metric"
    store_of(run).replace_small(file, msgspec.json.encode(_AddedMetric(name, value)))


def list_metric_files(names: Collection[str]) -> list[MetricFile]:
    """Return the files of added metrics among the names in a run directory."""
    matches = (_NAME.fullmatch(name) for name in names if name.endswith(".metric"))
    return [MetricFile(match[0], match["tag"], match["id"]) for match in matches if match]


#: The metrics that were added to a checkpoint, by the tag that it had then.
_ByTag = Mapping[str, Mapping[str, float | None]]


def read_added_metrics(run: Path, files: Collection[MetricFile]) -> dict[str, _ByTag]:
    """Return the added metrics by the id of their checkpoint, and by the tag that it had then.

    A file that cannot be read is left out with a warning: the checkpoint itself is intact.
    """
    added: dict[str, dict[str, dict[str, float | None]]] = {}
    for file in files:
        try:
            metric = _read_metric(run / file.name)
        except (StorageError, CorruptCheckpointError) as error:
            warn_caller(f"an added metric of {file.tag!r} is ignored: {error}")
            continue
        if metric is not None:
            added.setdefault(file.id, {}).setdefault(file.tag, {})[metric.name] = metric.value
    return dict(added)


def select_metrics(added: _ByTag, is_called: Callable[[str], bool]) -> dict[str, float | None]:
    """Return the metrics of one checkpoint: also those that it got under an earlier name.

    ``added`` are the metrics that were added to any checkpoint with its id: copies have it, too. ``is_called`` returns
    whether this one has, or had, a name. An abandoned checkpoint has got a longer name: metrics that were added under
    it are newer. For example, a metric of ``step_10@1`` counts more than the same one of ``step_10``.
    """
    return {name: value for tag in sorted(filter(is_called, added), key=len) for name, value in added[tag].items()}


def read_metrics_of(run: Path, checkpoint_id: str, is_called: Callable[[str], bool]) -> Mapping[str, float | None]:
    """Return the metrics that were added to one checkpoint in a run directory, under any of its names."""
    files = [file for file in list_metric_files(store_of(run).list_names(run)) if file.id == checkpoint_id]
    return select_metrics(read_added_metrics(run, files).get(checkpoint_id, {}), is_called)


def remove_metrics(run: Path, is_stale: Callable[[MetricFile], bool]) -> None:
    """Remove metrics that were added to checkpoints that no longer exist."""
    for file in filter(is_stale, list_metric_files(store_of(run).list_names(run))):
        with suppress(StorageError):
            store_of(run).remove_file(run / file.name)


def _read_metric(file: Path) -> _AddedMetric | None:
    """Return the content of a file; ``None`` if it was removed meanwhile."""
    if (metric := _MEMO.recall(str(file))) is not None:
        return metric
    signature = sign_file(str(file))
    try:
        store_of(file).check_regular(file, within=(file.parent,))
        metric = msgspec.json.decode(store_of(file).read_small(file, _MAX_BYTES), type=_AddedMetric)
    except msgspec.DecodeError as error:
        raise CorruptCheckpointError(f"{file} is corrupt: add the metric again, or remove the file") from error
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return None
        raise
    _MEMO.remember(str(file), signature, metric)
    return metric
