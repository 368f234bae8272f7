"""The rules for rows that edits add and no stored tensor has: of embeddings, heads and routers.

Verbs ask it when they build a catalog. The rule is part of the recipe, as text: ``mean``, ``zeros``, ``copy:7``,
``normal:0.02``.
"""

from __future__ import annotations

import math
import re

import msgspec

from rankless.edits.formulas import MeanRow, NormalRows, Repeated, RowRange, Rows, Zeros, is_floating, with_rows
from rankless.errors import InvalidArgumentError
from rankless.formats.edited_reader import EditedTensor
from rankless.ondisk.data_files import TensorInfo

#: Seeds of NumPy's generator are less.
_SEEDS = 2**32

_RULE = re.compile(r"(mean|zeros)|copy:([0-9]{1,18})|normal:([0-9.eE+-]{1,32})")


class RowRule(msgspec.Struct, frozen=True):
    """A rule for new rows. ``kind`` is ``"mean"``, ``"zeros"``, ``"copy"`` of row ``row``, or ``"normal"``."""

    kind: str
    row: int = 0
    std: float = 0.0
    seed: int = 0

    def fill(self, old: EditedTensor, name: str, count: int) -> EditedTensor:
        """Return new rows for a tensor that has the rows ``old``.

        Raises ``InvalidArgumentError``, which names the tensor, if the rule does not fit.
        """
        info = with_rows(old.info, count)
        if self.kind == "zeros":
            return Zeros(info)
        if self.kind == "copy":
            if self.row >= old.info.shape[0]:
                raise InvalidArgumentError(f"copy:{self.row}: {name!r} has the rows 0 to {old.info.shape[0] - 1}")
            return Repeated(info, Rows(with_rows(old.info, 1), (RowRange(old, self.row, 1),)))
        if not is_floating(old.info):
            raise InvalidArgumentError(
                f"{self.kind}: {name!r} has the dtype {old.info.dtype}: fill its new rows by zeros or copy:N"
            )
        if self.kind == "normal":
            return NormalRows(info, name, self.std, self.seed)
        if not old.info.shape[0]:
            raise InvalidArgumentError(f"mean: {name!r} has no rows: fill new ones by zeros or normal:STD")
        return Repeated(info, MeanRow(with_rows(old.info, 1), old))


def parse_rule(text: str, seed: int) -> RowRule:
    """Return the rule that a recipe names, such as ``copy:0`` or ``normal:0.02``. Raises ``InvalidArgumentError``."""
    if not 0 <= seed < _SEEDS:
        raise InvalidArgumentError(f"seed must be 0 to {_SEEDS - 1}; got {seed}")
    match = _RULE.fullmatch(text)
    if match is not None and match[1]:
        return RowRule(match[1])
    if match is not None and match[2]:
        return RowRule("copy", row=int(match[2]))
    std = _parse_float(match[3]) if match is not None else None
    if std is None:
        raise InvalidArgumentError(
            f"rows must be mean, zeros, copy:ROW, or normal:STD such as normal:0.02; got {text!r}"
        )
    return RowRule("normal", std=std, seed=seed)


def _parse_float(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def describe_size(info: TensorInfo) -> str:
    """Return the shape of a tensor for reports. For example, ``2x3``."""
    return "x".join(map(str, info.shape)) or "one value"
