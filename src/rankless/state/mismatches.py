"""The mismatches between a checkpoint and the objects of a load, and the policy that refuses or allows them.

A load or live copy fills a report on each rank while it matches; rank 0 of a load merges the tolerated mismatches of
all ranks in the vote "matching the checkpoint with what it is loaded into".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from rankless.errors import InvalidArgumentError, MismatchError

#: The number of lines shown in a message.
_SHOWN = 20

#: The kinds of components that ``allow_missing`` may name.
COMPONENTS = ("model", "optimizer", "scheduler", "stateful", "dataloader", "rng", "per_rank_content")


class RestorePolicy(msgspec.Struct, frozen=True):
    """The rules of a restore: names must match if ``strict``, and dtypes unless ``cast_dtype``.

    ``rng``: restore the random number generators. ``per_rank_content``: restore the content of each rank.
    ``allow_missing`` are the components that may be missing, wholly or partly, even if ``strict``. ``lenient`` are the
    components with names that need not match. Both have kinds, of :data:`COMPONENTS`, or names such as
    ``"model/generator"`` and ``"stateful/scaler"``. ``ignores_unexpected``: the checkpoint may have more names, even if
    ``strict``. ``may_skip_frozen``: an optimizer that numbers its parameters may have no number for frozen ones.
    """

    strict: bool
    cast_dtype: bool
    rng: bool
    per_rank_content: bool = False
    allow_missing: frozenset[str] = frozenset()
    lenient: frozenset[str] = frozenset()
    ignores_unexpected: bool = False
    may_skip_frozen: bool = False

    def is_strict(self, component: str) -> bool:
        """Return whether all names of a component, such as ``"model"`` or ``"model/generator"``, must match."""
        return self.strict and not _is_selected(component, self.lenient)

    def may_be_missing(self, component: str) -> bool:
        """Return whether names of a component may be missing in the checkpoint."""
        return not self.is_strict(component) or _is_selected(component, self.allow_missing)


def as_components(allow_missing: object) -> frozenset[str]:
    """Return the components in the argument ``allow_missing``: a list of their names, or a single name.

    For example, ``"scheduler"`` and ``["scheduler"]`` are the same.
    """
    if isinstance(allow_missing, str):
        return frozenset({allow_missing})
    if not isinstance(allow_missing, Iterable):
        raise InvalidArgumentError(
            f"allow_missing must be a list of components, such as ['scheduler']; got {allow_missing!r:.80}"
        )
    return frozenset(map(str, allow_missing))


def _is_selected(component: str, selected: frozenset[str]) -> bool:
    return component in selected or component.partition("/")[0] in selected


class MismatchReport(msgspec.Struct):
    """The mismatches of a load: names that are on one side only, and tensors with another shape or dtype.

    ``unexpected`` has the component of each name. ``reasons`` has, for each missing thing that was requested, its
    component and a message. ``incomplete`` are the components (``"model"``, …) that have such names, ``cast`` the
    components with tensors of another dtype. ``differing`` has, with their components, the values that differed between
    the ranks that saved: each rank gets rank 0's value.
    """

    missing: list[str] = msgspec.field(default_factory=list)
    unexpected: list[tuple[str, str]] = msgspec.field(default_factory=list)
    different: list[str] = msgspec.field(default_factory=list)
    reasons: list[tuple[str, str]] = msgspec.field(default_factory=list)
    incomplete: set[str] = msgspec.field(default_factory=set)
    cast: set[str] = msgspec.field(default_factory=set)
    differing: list[tuple[str, str]] = msgspec.field(default_factory=list)

    def add_missing(self, component: str, name: str, reason: str = "", *, is_optional: bool = False) -> None:
        """Add a name that is not in the checkpoint, or that cannot be restored for a ``reason``.

        An optional name is never refused.
        """
        self.missing.append(name)
        self.incomplete.add(component)
        if is_optional:
            return
        subject = f"{name} of {component}" if component.startswith("model/") else name
        self.reasons.append((component, f"{name}: {reason}" if reason else f"missing in the checkpoint: {subject}"))

    def add_differing(self, component: str, name: str) -> None:
        """Add a value that differed between the ranks that saved, and that this rank does not get back."""
        self.differing.append((component, name))

    def add_unexpected(self, component: str, name: str) -> None:
        """Add a name that is only in the checkpoint."""
        self.unexpected.append((component, name))
        self.incomplete.add(component)

    def refused_components(self, policy: RestorePolicy) -> list[str]:
        """Return the components where something is missing that must not be."""
        return list(dict.fromkeys(component for component, _ in self.reasons if not policy.may_be_missing(component)))

    def refused_names(self, policy: RestorePolicy) -> list[str]:
        """Return the names that are only in the checkpoint and must not be."""
        if policy.ignores_unexpected:
            return []
        return [name for component, name in self.unexpected if policy.is_strict(component)]

    def tolerated_reasons(self, policy: RestorePolicy) -> list[str]:
        """Return messages about requested things that are missing and may be: as many as are shown."""
        reasons = [reason for component, reason in self.reasons if policy.may_be_missing(component)]
        reasons += [
            f"{name}: the ranks that it comes from held different values, and this rank gets "
            + ("those of all ranks" if component.startswith("optimizer") else "that of the first one")
            for component, name in self.differing
        ]
        return reasons[: _SHOWN + 1]

    def raise_if_any(self, policy: RestorePolicy, source: str, advice: str = "") -> None:
        """Raise a ``MismatchError`` that names all mismatches, without the ones that the policy allows.

        ``advice`` is text for the message if something is different.
        """
        refused, unexpected = self.refused_components(policy), self.refused_names(policy)
        lines = self.different + [reason for component, reason in self.reasons if not policy.may_be_missing(component)]
        lines += [f"only in the checkpoint: {name}" for name in unexpected]
        if lines:
            arguments = _suggest_arguments(refused, unexpected)
            if not self.different:
                advice = f"Pass {arguments}." if policy.strict else ""
            raise MismatchError(
                f"{source} does not match what it is loaded into; nothing was changed:\n{format_lines(lines)}"
                + (f"\n{advice}" if advice else "")
            )


def _suggest_arguments(refused: Sequence[str], unexpected: Sequence[str]) -> str:
    """Return the arguments that let the rest be loaded; the narrower one if no names in a model are concerned."""
    not_strict = "strict=False to load what matches"
    if unexpected or {component.partition("/")[0] for component in refused} & {"model"}:
        return not_strict
    return f"allow_missing={tuple(refused)!r} to load the rest without, or {not_strict}"


def format_lines(lines: Sequence[str]) -> str:
    """Return the first of some lines, and the number of further ones."""
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n".join(f"  {line}" for line in [*lines[:_SHOWN], *more])
