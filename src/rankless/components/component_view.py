"""A view of a checkpoint for loading one component: it must contain the component. Names may have a prefix.

:func:`rankless.components.component_calls.load_component` passes it as the ``reader_adapter`` of a load, which has
nothing to do with PEFT; each rank calls it in the vote "reading the metadata" (:mod:`rankless.load.load_operation`).
ColossalAI's booster, torchtitan's manager and :mod:`rankless.components.merged_export` load with it, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rankless.components.stored_component import MODEL, OPTIMIZER, rename_tensors
from rankless.errors import MismatchError
from rankless.formats.reader import Reader
from rankless.formats.remapped_reader import RemappedReader, TensorMapping, identity_mapping
from rankless.ondisk.data_files import ADAPTER


@dataclass(frozen=True)
class ComponentView:
    """A view of the component ``kind``, with ``prefix`` removed from the names of parameters and buffers.

    Both must be equal on all ranks. The first vote of a load compares ``reader_adapter_text``, which must name both.
    """

    kind: str
    prefix: str = ""

    def __call__(self, reader: Reader) -> Reader:
        """Return the view. Raises ``MismatchError`` if the component is missing, or if no name has the prefix."""
        kinds = {name.partition("/")[0] for name in reader.groups}
        if self.kind == MODEL and kinds == {ADAPTER} and not self.prefix:
            return reader
        if self.kind not in kinds:
            present = " and ".join(sorted(name for name in reader.groups)) or "nothing"
            raise MismatchError(f"{reader.path} contains {present}, but no {self.kind}")
        if not self.prefix:
            return reader
        table = {group: identity_mapping(names) for group, names in reader.groups.items()}
        table[self.kind] = self._remove_prefixes(table[self.kind])
        if not table[self.kind]:
            raise MismatchError(f"no name of {self.kind} in {reader.path} begins with the prefix {self.prefix!r}")
        tied = {group: dict(names) for group, names in reader.tied.items()}
        tied[self.kind] = {
            self._remove_prefix(alias): self._remove_prefix(name)
            for alias, name in tied.get(self.kind, {}).items()
            if alias.startswith(self.prefix) and name.startswith(self.prefix)
        }
        return RemappedReader(reader, table, tied, self._remap_values)

    def _remove_prefixes(self, names: Mapping[str, TensorMapping]) -> dict[str, TensorMapping]:
        return {self._remove_prefix(name): mapping for name, mapping in names.items() if name.startswith(self.prefix)}

    def _remove_prefix(self, name: str) -> str:
        return name.removeprefix(self.prefix)

    def _remap_values(self, shared: Mapping[str, Any]) -> dict[str, Any]:
        values = dict(shared)
        if MODEL in values and self.kind == MODEL:
            values[MODEL] = {
                self._remove_prefix(name): value
                for name, value in values[MODEL].items()
                if name.startswith(self.prefix)
            }
        if OPTIMIZER in values and self.kind == OPTIMIZER:
            groups = [rename_tensors(group, self._remove_prefix) for group in values[OPTIMIZER]["groups"]]
            values[OPTIMIZER] = {**values[OPTIMIZER], "groups": groups}
        return values
