"""The arguments of a copy on one rank, and their checks.

:func:`rankless.copy_state` makes one on each rank; the vote "looking at what to copy" checks and compares it. An
argument that the votes depend on must be in one of the descriptions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from rankless.engine.comm.call_check import CallDescription
from rankless.errors import InvalidArgumentError
from rankless.ondisk.validation import check_choice
from rankless.state.mismatches import COMPONENTS, RestorePolicy
from rankless.state.training import TrainingObjects

#: The objects that ``source`` may have, by the name of the argument for them.
_SOURCE_NAMES = ("model", "optimizer", "scheduler", "stateful", "dataloader")


@dataclass(frozen=True)
class CopyRequest:
    """The part of one rank in a copy.

    ``objects`` are the objects of the call itself, ``source`` has the objects in its argument ``source``. ``sources``
    are the ranks that give their ``objects`` as the source; with ``None`` these are the ranks that pass a ``source``.
    Both are as the caller passed them: they may be wrong on one rank alone, so all ranks check them together.
    """

    objects: TrainingObjects
    source: Mapping[str, Any] | None
    sources: Collection[int] | None
    policy: RestorePolicy

    def find_given(self, rank: int) -> TrainingObjects | None:
        """Return the objects that this rank gives the state of; ``None`` if it is no source."""
        if self.sources is not None:
            return self.objects if rank in self.sources else None
        if self.source is None:
            return None
        return TrainingObjects(**self.source, user_content=self.objects.user_content)

    def find_filled(self, rank: int) -> TrainingObjects | None:
        """Return the objects that this rank gets the state into; ``None`` if it gets none."""
        if self.sources is not None:
            return None if rank in self.sources else self.objects
        return self.objects if self.objects.component_names() else None

    def describe_call(self) -> CallDescription:
        """Return the arguments that must be equal on all ranks."""
        sources: object = self.sources
        if isinstance(sources, tuple):
            sources = sorted(map(str, sources))
        elif sources is None:
            sources = "the ranks that pass source="
        return CallDescription("copy_state", {"sources": str(sources)})

    def describe_policy(self) -> str:
        """Return the arguments that must be equal on all ranks that receive."""
        policy = self.policy
        allowed = ", ".join(sorted(policy.allow_missing)) or "nothing"
        return f"strict={policy.strict}, cast_dtype={policy.cast_dtype}, rng={policy.rng}, allow_missing: {allowed}"

    def check_arguments(self, size: int) -> None:
        """Raise ``InvalidArgumentError`` if an argument is invalid. ``size`` is the number of ranks.

        Each rank calls it in the vote "looking at what to copy".
        """
        for name in ("strict", "cast_dtype", "rng"):
            value = getattr(self.policy, name)
            if not isinstance(value, bool):
                raise InvalidArgumentError(f"{name} must be True or False; got {value!r:.80}")
        if self.sources is not None:
            self._check_sources(self.sources, size)
        if self.source is not None:
            _check_source(self.source)
            unknown = sorted(map(str, self.source.keys() - {*_SOURCE_NAMES}))
            if unknown:
                raise InvalidArgumentError(
                    f"source must be a dict with the keys {', '.join(_SOURCE_NAMES)}; got the key {unknown[0]!r}"
                )
        names = {*self.objects.component_names(), *self.objects.stateful_names()}
        for component in self.policy.allow_missing:
            check_choice("each of allow_missing", component, (*COMPONENTS, *(name for name in names if "/" in name)))

    def _check_sources(self, sources: Collection[int], size: int) -> None:
        if self.source is not None:
            raise InvalidArgumentError(
                "pass sources= with ranks, if the objects of these ranks are copied to the other ranks, or source= "
                "with objects, on the ranks that have them; not both"
            )
        if not isinstance(sources, tuple):
            raise InvalidArgumentError(f"sources must be a list of ranks, such as [0, 1]; got {sources!r:.80}")
        outside = [rank for rank in sources if not isinstance(rank, int) or not 0 <= rank < size]
        if outside or not sources:
            got = repr(outside[0]) if outside else "none"
            raise InvalidArgumentError(f"sources must be ranks of the process group, 0 to {size - 1}; got {got}")


def list_ranks(sources: Any) -> Any:
    """Return the argument ``sources`` as a tuple, which can be read more than once, or as it is if it is no list."""
    try:
        return None if sources is None else tuple(sources)
    except TypeError:
        return sources


def _check_source(source: object) -> None:
    """Raise ``InvalidArgumentError`` if the argument ``source`` is not a dict of objects."""
    if not isinstance(source, Mapping):
        raise InvalidArgumentError(
            f"source must be a dict of objects, such as {{'model': model, 'optimizer': optimizer}}; got {source!r}. "
            "Ranks are passed as sources="
        )
