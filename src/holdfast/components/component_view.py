"""How a checkpoint is seen when one part of it is loaded: it must hold that part, and names may have a prefix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.components.content import MODEL, OPTIMIZER, rename_tensors
from holdfast.errors import MismatchError
from holdfast.formats.reader import Reader
from holdfast.formats.remapped_reader import RemappedReader, TensorMapping, identity_mapping


@dataclass(frozen=True)
class ComponentView:
    """``kind`` is the part; ``prefix`` is taken off the names of parameters and buffers."""

    kind: str
    prefix: str = ""

    def __call__(self, reader: Reader) -> Reader:
        """The checkpoint, seen so. Raises ``MismatchError`` where it does not hold the part, or no such names."""
        if self.kind not in {name.partition("/")[0] for name in reader.groups}:
            held = " and ".join(sorted(name for name in reader.groups)) or "nothing"
            raise MismatchError(f"{reader.path} holds {held}, and no {self.kind}")
        if not self.prefix:
            return reader
        table = {group: identity_mapping(names) for group, names in reader.groups.items()}
        table[self.kind] = self._taken_off(table[self.kind])
        if not table[self.kind]:
            raise MismatchError(f"no name of {self.kind} in {reader.path} begins with the prefix {self.prefix!r}")
        tied = {group: dict(names) for group, names in reader.tied.items()}
        tied[self.kind] = {
            self._off(alias): self._off(name)
            for alias, name in tied.get(self.kind, {}).items()
            if alias.startswith(self.prefix) and name.startswith(self.prefix)
        }
        return RemappedReader(reader, table, tied, self._values)

    def _taken_off(self, names: Mapping[str, TensorMapping]) -> dict[str, TensorMapping]:
        return {self._off(name): made for name, made in names.items() if name.startswith(self.prefix)}

    def _off(self, name: str) -> str:
        return name.removeprefix(self.prefix)

    def _values(self, shared: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(shared)
        if MODEL in found and self.kind == MODEL:
            found[MODEL] = {self._off(name): one for name, one in found[MODEL].items() if name.startswith(self.prefix)}
        if OPTIMIZER in found and self.kind == OPTIMIZER:
            groups = [rename_tensors(group, self._off) for group in found[OPTIMIZER]["groups"]]
            found[OPTIMIZER] = {**found[OPTIMIZER], "groups": groups}
        return found
