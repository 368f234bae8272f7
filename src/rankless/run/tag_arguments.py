"""Arguments that select an existing checkpoint of a run: a tag, an alias, the best one by a metric, or the latest.

Rank 0 resolves the argument of a load in the vote "finding the checkpoint to load" (:mod:`rankless.load.selection`);
the view, aliases, added metrics and commands resolve theirs in one process.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

from rankless.errors import InvalidArgumentError, NoCheckpointError, TagExistsError
from rankless.formats.native import holds_checkpoint, is_native, read_manifest
from rankless.ondisk.validation import check_choice, check_tag
from rankless.run.added_metrics import remove_metrics, write_added_metric
from rankless.run.aliases import delete_alias, find_meant, read_alias, write_alias
from rankless.run.catalog import list_checkpoints_strictly
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.retention import sort_by_metric
from rankless.storage.store import store_of

#: How often :func:`give_alias` tries again if the checkpoint is removed meanwhile, and the seconds between.
_ATTEMPTS, _RETRY_SECONDS = 40, 0.05

#: How the values of a metric are compared.
_MODES = ("min", "max")


class Latest(msgspec.Struct, frozen=True):
    """The latest checkpoint of a run, as if no tag was passed."""


#: Can be passed as a tag: the latest checkpoint.
LATEST: Final = Latest()


class Best(msgspec.Struct, frozen=True):
    """The best checkpoint of a run by a metric: see :func:`best`."""

    metric: str
    mode: Literal["min", "max"] = "min"


def best(metric: str, mode: Literal["min", "max"] = "min") -> Best:
    """Return an object to pass as a tag: the best checkpoint of a run by a metric, and of equal ones the newest.

    Args:
        metric: The name of the metric, such as ``"loss"``. Checkpoints without it are not considered.
        mode: Whether lower (``"min"``) or higher (``"max"``) values are better.

    Raises:
        InvalidArgumentError: ``mode`` is neither.
    """
    check_choice("mode", mode, _MODES)
    if not isinstance(metric, str):
        raise InvalidArgumentError(f"the name of a metric must be a text; got {metric!r}")
    return Best(metric, mode)


#: The tag of an existing checkpoint, as callers may pass it. ``None`` means the latest, too.
TagArgument: TypeAlias = str | Best | Latest | None


def check_tag_argument(tag: object) -> str | Best | None:
    """Return a tag as it was passed; ``None`` for the latest checkpoint. Raises ``InvalidArgumentError``."""
    if tag is None or isinstance(tag, Latest):
        return None
    return tag if isinstance(tag, Best) else check_tag(tag)


def resolve_tag(path: Path, tag: str | Best) -> str:
    """Return the tag of the checkpoint in a run directory that is meant.

    A checkpoint with this very tag is preferred to an alias. Raises ``NoCheckpointError`` if there is no checkpoint
    with the metric, or if the one that an alias means no longer exists.

    Rank 0 of a load calls it in a vote, commands call it in one process.
    """
    if isinstance(tag, Best):
        return _find_best(path, tag)
    if is_native(path / check_tag(tag)):
        return tag
    alias = read_alias(path, tag)
    if alias is None:
        return tag
    complete = [info for info in list_checkpoints_strictly(path) if info.status == "complete"]
    if any(info.tag == tag for info in complete):
        return tag
    meant = find_meant(alias, complete)
    if meant is None:
        raise NoCheckpointError(
            f"the alias {tag!r} in {path} means the checkpoint {alias.tag!r}, which was removed or replaced: set the "
            "alias again"
        )
    return meant


def _find_best(path: Path, selector: Best) -> str:
    complete = [info for info in list_checkpoints_strictly(path) if info.status == "complete"]
    ranked = sort_by_metric(complete, selector.metric, selector.mode)
    if not ranked:
        metrics = sorted({name for info in complete for name in info.metrics})
        known = f"their metrics are {', '.join(metrics)}" if metrics else "they have no metrics"
        raise NoCheckpointError(
            f"none of the {len(complete)} checkpoint(s) in {path} has a finite {selector.metric!r}; {known}"
        )
    return ranked[0].tag


def give_alias(run: Path, alias: str, tag: str | Best | None) -> CheckpointInfo:
    """Make ``alias`` a name of a checkpoint in a run directory, by default of the latest. Return the checkpoint.

    Retention may remove the checkpoint meanwhile. So, as with a pin, the alias is written first, and after that the
    checkpoint must still be in a list of the directory. Raises ``NoCheckpointError`` and ``TagExistsError``.

    ``rankless.set_alias`` and ``rankless alias`` call it in one process. The alias must be written before the look.
    """
    for _ in range(_ATTEMPTS):
        if any((info.tag, info.status) == (alias, "complete") for info in list_checkpoints_strictly(run)):
            raise TagExistsError(f"there is a checkpoint {alias!r} in {run}: choose another alias")
        info = _find_checkpoint(run, tag)
        write_alias(run, alias, info)
        if info.path.name in store_of(run).list_names(run) and holds_checkpoint(info.path, info.id):
            return info
        delete_alias(run, alias)
        time.sleep(_RETRY_SECONDS)
    raise NoCheckpointError(f"the checkpoints in {run} are removed or replaced faster than one can get an alias")


def give_metrics(run: Path, tag: str | Best | None, metrics: Mapping[str, float | None]) -> CheckpointInfo:
    """Add metrics to a checkpoint in a run directory, by default to the latest. Return the checkpoint with them.

    Raises ``NoCheckpointError``, and ``InvalidArgumentError`` if the save has stored one of the metrics.

    ``rankless.add_metrics`` calls it in one process.
    """
    info = _find_checkpoint(run, tag)
    if stored := sorted(metrics.keys() & read_manifest(info.path).metrics.keys()):
        raise InvalidArgumentError(
            f"the checkpoint {info.tag!r} was saved with the metric {stored[0]!r}, which cannot be changed: choose "
            "another name"
        )
    for name, value in metrics.items():
        write_added_metric(run, info.tag, info.id, name, value)
    if not holds_checkpoint(info.path, info.id):
        remove_metrics(run, lambda file: (file.tag, file.id) == (info.tag, info.id))
        raise NoCheckpointError(f"the checkpoint {info.tag!r} in {run} was removed or replaced meanwhile")
    return replace(info, metrics={**info.metrics, **metrics})


def _find_checkpoint(run: Path, tag: str | Best | None) -> CheckpointInfo:
    complete = [info for info in list_checkpoints_strictly(run) if info.status == "complete"]
    wanted = None if tag is None else resolve_tag(run, tag)
    matches = [info for info in complete if wanted in {None, info.tag}]
    if not matches:
        which = "checkpoint" if wanted is None else f"checkpoint {wanted!r}"
        known = f"; there are {', '.join(info.tag for info in complete)}" if complete else ""
        raise NoCheckpointError(f"there is no {which} in {run} that can be read{known}")
    return matches[-1]
