"""The verb ``rename``: parameters get other names, in the model, its averages, optimizers and schedulers."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from rankless.edits.catalog import Catalog, Change, Parameter, map_parameters
from rankless.errors import InvalidArgumentError


class Rename(msgspec.Struct, frozen=True, tag_field="verb", tag="rename", forbid_unknown_fields=True):
    """Give parameters other names.

    Args:
        names: Regular expressions with their replacements, as in :func:`re.sub`, in order.
    """

    names: dict[str, str]

    def apply(self, catalog: Catalog) -> Catalog:
        """Return the catalog with other names. Raises ``InvalidArgumentError`` if two would be equal."""
        changes: list[Change] = []

        def rename(name: str) -> Sequence[str]:
            return (self._rename(name),)

        def move(parameter: Parameter) -> Sequence[Parameter] | None:
            (name,) = rename(parameter.name)
            if name == parameter.name:
                return None
            changes.append(Change(parameter.group, f"{parameter.name}: now {name}"))
            return [replace(parameter, name=name)]

        return map_parameters(catalog, move, rename).with_changes(changes)

    def _rename(self, name: str) -> str:
        for pattern, replacement in self.names.items():
            try:
                name = re.sub(pattern, replacement, name)
            except (re.error, IndexError) as error:
                raise InvalidArgumentError(f"rename: {pattern!r} with {replacement!r}: {error}") from error
        if not name:
            raise InvalidArgumentError("rename: a parameter would have no name")
        return name
