"""Folding of tensors of equal layers into one row: their names differ only in numbers, such as ``layers.0.weight``.

``rankless show`` and notebooks fold rows with it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from rankless.ondisk.data_files import TensorInfo

#: A number that is a whole component of a name.
_NUMBER = re.compile(r"(?<=[./])\d{1,18}(?=[./]|$)")


@dataclass(frozen=True, slots=True)
class FoldedTensors:
    """Tensors of equal dtype and shape: ``name`` has ``{0..31}`` in place of their numbers."""

    name: str
    info: TensorInfo
    count: int

    @property
    def nbytes(self) -> int:
        """The size of all of them in bytes."""
        return self.count * self.info.nbytes


def fold_tensors(tensors: Mapping[str, TensorInfo]) -> Iterator[FoldedTensors]:
    """Fold tensors, in the order of the first of each row.

    Tensors are folded only if the row names exactly these: all combinations of the numbers in it. For example,
    ``a.0.b.0`` and ``a.1.b.1`` are not folded, because ``a.{0..1}.b.{0..1}`` would name four tensors.
    """
    rows: dict[tuple[str, str, tuple[int, ...]], list[str]] = {}
    for name, info in tensors.items():
        rows.setdefault((name_pattern(name), info.dtype, tuple(info.shape)), []).append(name)
    for names in rows.values():
        folded = fold_names(names)
        shown = names if folded is None else [folded]
        yield from (FoldedTensors(name, tensors[names[0]], len(names) // len(shown)) for name in shown)


def name_pattern(name: str) -> str:
    """Return a name without its numbers, which is equal for names that may be folded.

    For example, ``layers.{}.weight`` for ``layers.0.weight``.
    """
    return _NUMBER.sub("{}", name)


def fold_names(names: Sequence[str]) -> str | None:
    """Return one name for several of one pattern; ``None`` if they are not all combinations of their numbers.

    For example, ``layers.{0..1}.weight`` for ``layers.0.weight`` and ``layers.1.weight``.
    """
    numbers = [{int(number) for number in column} for column in zip(*map(_NUMBER.findall, names), strict=True)]
    if math.prod(map(len, numbers)) != len(names):
        return None
    texts = map(_format_numbers, numbers)
    return _NUMBER.sub(lambda _: next(texts), names[0])


def _format_numbers(numbers: Iterable[int]) -> str:
    """Format numbers as ``{0..3,7}``, or a single one as it is."""
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(sorted(numbers)), lambda entry: entry[1] - entry[0])
    ]
    text = ",".join(map(_format_run, runs))
    return text if text.isdigit() else f"{{{text}}}"


def _format_run(run: Sequence[int]) -> str:
    return str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}"
