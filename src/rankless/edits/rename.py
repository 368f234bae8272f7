"""The verb ``rename``: parameters get other names, in the model, its averages, optimizers and schedulers."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from rankless.edits.catalog import Catalog, Change, Parameter, map_parameters
from rankless.edits.slow_patterns import check_patterns
from rankless.errors import InvalidArgumentError


class Rename(msgspec.Struct, frozen=True, tag_field="verb", tag="rename", forbid_unknown_fields=True):
    """Give parameters other names.

    Args:
        names: Regular expressions with their replacements, as in :func:`re.sub`, in order: for example ``{"^net":
            "model"}``.
    """

    names: dict[str, str]

    def apply(self, catalog: Catalog) -> Catalog:
        """Return the catalog with other names. Raises ``InvalidArgumentError`` if two would be equal."""
        if not self.names:
            raise InvalidArgumentError("rename: pass a regular expression with its replacement, such as ^net=model")
        check_patterns(self.names, catalog.names())
        changes: list[Change] = []
        matched: set[str] = set()

        def rename(name: str) -> Sequence[str]:
            return (self._rename(name, matched),)

        def move(parameter: Parameter) -> Sequence[Parameter] | None:
            (name,) = rename(parameter.name)
            if name == parameter.name:
                return None
            changes.append(Change(parameter.group, f"{parameter.name}: now {name}"))
            return [replace(parameter, name=name)]

        renamed = map_parameters(catalog, move, rename).with_changes(changes)
        if unused := [pattern for pattern in self.names if pattern not in matched]:
            raise InvalidArgumentError(f"rename: {catalog.label} has no parameter with {unused[0]!r} in its name")
        return renamed

    def _rename(self, name: str, matched: set[str]) -> str:
        """Return the new name of a parameter. Add the expressions that it matches to ``matched``."""
        for pattern, replacement in self.names.items():
            try:
                name, count = re.subn(pattern, replacement, name)
            except (re.error, IndexError, OverflowError, RecursionError) as error:
                raise InvalidArgumentError(f"rename: {pattern!r} with {replacement!r}: {error}") from error
            if count:
                matched.add(pattern)
        if not name:
            raise InvalidArgumentError("rename: a parameter would have no name")
        return name
