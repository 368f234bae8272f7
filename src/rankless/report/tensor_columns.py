"""The tensors of a checkpoint as columns: names, dtypes, shapes, kinds, and the changes since the one before.

Both kinds of reports call it. The scripts of the page read the columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankless.formats.reader import Reader
from rankless.inspection.inspected_checkpoint import VALUE_GROUPS, InspectedCheckpoint
from rankless.ondisk.data_files import TensorInfo
from rankless.report.compaction import front_code
from rankless.storage.links_and_clones import FileIdentity, identify_file
from rankless.storage.store import store_of

#: The result of the comparison of a tensor with the checkpoint before, as one letter each.
UNKNOWN, CHANGED, UNCHANGED, SHARED = "?", "c", "u", "s"


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of a checkpoint, by its group and its name there."""

    group: str
    name: str
    info: TensorInfo

    @property
    def kind(self) -> str:
        """``weights``, the name of a state of the optimizer such as ``exp_avg``, or the group of other tensors."""
        family = self.group.partition("/")[0]
        if family == "optimizer":
            return self.name.rpartition("/")[2]
        return {"model": "weights"}.get(family, "values" if self.group in VALUE_GROUPS else self.group)

    @property
    def shown_name(self) -> str:
        """The name in the page: of one of several models it begins with the name of the model, as in ``gen/0.weight``.

        Names of optimizer states have that already.
        """
        family, _, model = self.group.partition("/")
        return f"{model}/{self.name}" if family == "model" and model else self.name

    @property
    def parameter(self) -> str:
        """The shown name of the parameter that the tensor is, or is the state of.

        For example, ``0.weight`` for the state ``0.weight/exp_avg``.
        """
        return self.name.rpartition("/")[0] if self.group.startswith("optimizer") else self.shown_name


def list_tensors(inspected: InspectedCheckpoint) -> list[NamedTensor]:
    """Return the tensors of a checkpoint, by group and name."""
    return [NamedTensor(*entry) for entry in inspected.iterate_tensors()]


def tensor_columns(tensors: Sequence[NamedTensor]) -> dict[str, Any]:
    """Return the columns of tensors. Rows share groups, kinds, dtypes and shapes by number."""
    groups, kinds = _Numbers(), _Numbers()
    signatures = _Numbers()
    rows = [
        (
            groups.number_of(tensor.group),
            kinds.number_of(tensor.kind),
            signatures.number_of((tensor.info.dtype, tensor.info.shape)),
        )
        for tensor in tensors
    ]
    return {
        "names": front_code([tensor.shown_name for tensor in tensors]),
        "groups": list(groups.items),
        "kinds": list(kinds.items),
        "signatures": [
            [info.dtype, list(info.value_shape), info.nbytes, math.prod(info.value_shape)]
            for info in itertools.starmap(TensorInfo, signatures.items)
        ],
        "group": [row[0] for row in rows],
        "kind": [row[1] for row in rows],
        "signature": [row[2] for row in rows],
        "trained": _mark_trained(tensors),
    }


class _Numbers:
    """Numbers of distinct items, in the order of their first use."""

    def __init__(self) -> None:
        self.items: dict[Any, int] = {}

    def number_of(self, item: Any) -> int:
        return self.items.setdefault(item, len(self.items))


def _mark_trained(tensors: Sequence[NamedTensor]) -> str:
    """Return one letter for each tensor: ``t`` if it has state of an optimizer, or is that; ``f`` for other weights.

    It is empty if there is no optimizer.
    """
    trained = {tensor.parameter for tensor in tensors if tensor.group.startswith("optimizer")}
    if not trained:
        return ""
    return "".join(
        "t" if tensor.parameter in trained else "f" if tensor.kind == "weights" else UNKNOWN for tensor in tensors
    )


def mark_shared(tensors: Sequence[NamedTensor], reader: Reader, before: Reader) -> str:
    """Return one letter for each tensor, by a comparison of its checksums, and of its file, with ``before``.

    Tensors in a file that both checkpoints have are shared; their bytes are on the disk once.
    """
    identities = _FileIdentities()
    return "".join(_mark_tensor(tensor, reader, before, identities) for tensor in tensors)


def _mark_tensor(tensor: NamedTensor, reader: Reader, before: Reader, identities: _FileIdentities) -> str:
    group, name = tensor.group, tensor.name
    if before.groups.get(group, {}).get(name) != tensor.info:
        return CHANGED
    crcs, crcs_before = reader.block_crcs(group, name), before.block_crcs(group, name)
    if crcs is None or crcs_before is None or not tensor.info.nbytes:
        return UNKNOWN
    if list(crcs) != list(crcs_before):
        return CHANGED
    files = [side.find_extents(group, name, 0, tensor.info.nbytes)[0].file for side in (reader, before)]
    here, there = (identities.find(file) if isinstance(file, Path) else None for file in files)
    return SHARED if here is not None and here == there else UNCHANGED


class _FileIdentities:
    """The identities of files. Each is asked for once. Objects have none: they are never shared."""

    def __init__(self) -> None:
        self._known: dict[Path, FileIdentity | None] = {}

    def find(self, file: Path) -> FileIdentity | None:
        if file not in self._known:
            self._known[file] = None if store_of(file).is_remote else identify_file(file)
        return self._known[file]
