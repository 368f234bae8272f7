"""Arguments that select an existing checkpoint of a run: a tag, an alias, the best one by a metric, or the latest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from holdfast.errors import NoCheckpointError
from holdfast.formats.native import is_native
from holdfast.ondisk.validation import check_choice, check_tag
from holdfast.run.aliases import read_alias
from holdfast.run.catalog import list_checkpoints_strictly
from holdfast.run.retention import sort_by_metric

#: How the values of a metric are compared.
_MODES = ("min", "max")


@dataclass(frozen=True)
class Latest:
    """The latest checkpoint of a run, as if no tag was passed."""


#: Can be passed as a tag: the latest checkpoint.
LATEST: Final = Latest()


@dataclass(frozen=True)
class Best:
    """The best checkpoint of a run by a metric: see :func:`best`."""

    metric: str
    mode: Literal["min", "max"] = "min"


def best(metric: str, mode: Literal["min", "max"] = "min") -> Best:
    """Return what can be passed as a tag: the best checkpoint of a run by a metric, and of equal ones the newest.

    Args:
        metric: The name of the metric. Checkpoints without it are not considered.
        mode: Whether lower (``"min"``) or higher (``"max"``) values are better.

    Raises:
        InvalidArgumentError: ``mode`` is neither.
    """
    check_choice("mode", mode, _MODES)
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
    if not any((info.tag, info.id) == (alias.tag, alias.id) for info in complete):
        raise NoCheckpointError(
            f"the alias {tag!r} in {path} means the checkpoint {alias.tag!r}, which no longer exists: set the "
            "alias again"
        )
    return alias.tag


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
