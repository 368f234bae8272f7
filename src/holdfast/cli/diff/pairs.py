"""Which tensors of two checkpoints are to be compared, and what their metadata tell already. No tensor is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.cli.diff.values import ValueDifference
from holdfast.cli.placeholders import TensorPlaceholder
from holdfast.cli.show.modules import INSIDE
from holdfast.cli.target import InspectedCheckpoint
from holdfast.ondisk.files import TensorInfo

#: A tensor by its group and name, or one with its bytes inside values.
Key = tuple[str, str] | TensorPlaceholder


@dataclass(frozen=True, slots=True)
class TensorPair:
    """Tensors of one name; ``None`` where a side has none."""

    name: str
    left: Key | None
    right: Key | None


def pair_tensors(left: InspectedCheckpoint, right: InspectedCheckpoint) -> Iterator[TensorPair]:
    """All names of both sides, further names of tied tensors included; two tensors are compared under one name only."""
    known, others = _names(left), _names(right)
    seen = set()
    for name in dict.fromkeys([*known, *others]):
        one, other = known.get(name), others.get(name)
        if one is not None and other is not None:
            if (one, other) in seen:
                continue
            seen.add((one, other))
        yield TensorPair(name, one, other)


def is_inside(leaf: ValueDifference, group: str) -> TensorPair:
    """Two tensors inside values, those with files in a group: ``"state"`` or ``"ranks"``."""
    left, right = ((group, side.key) if side.key else side for side in (leaf.left, leaf.right))
    return TensorPair(leaf.path, left, right)


def _names(target: InspectedCheckpoint) -> dict[str, Key]:
    names: dict[str, Key] = {
        f"{group}/{name}": (group, name) for group, name, _ in target.entries() if group not in INSIDE
    }
    for group, tied in target.reader.tied.items():
        names |= {f"{group}/{alias}": (group, name) for alias, name in tied.items()}
    return names


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """Pairs by what is known of them: of ``equal`` the checksums agree; of ``suspect`` only the bytes can tell."""

    apart: Sequence[TensorPair]
    equal: Sequence[TensorPair]
    suspect: Sequence[TensorPair]


def sort_pairs(found: Sequence[TensorPair], left: InspectedCheckpoint, right: InspectedCheckpoint) -> SortedPairs:
    """Take apart what metadata tell: ``apart`` are those that one side lacks or that have different shapes."""
    apart, equal, suspect = [], [], []
    for pair in found:
        one, other = info_of(left, pair.left), info_of(right, pair.right)
        if one is None or other is None or one.shape != other.shape:
            apart.append(pair)
        elif one == other and (not one.nbytes or _checksums_agree(pair, left, right)):
            equal.append(pair)
        else:
            suspect.append(pair)
    return SortedPairs(apart, equal, suspect)


def info_of(target: InspectedCheckpoint, key: Key | None) -> TensorInfo | None:
    """What a tensor is."""
    if key is None or isinstance(key, TensorPlaceholder):
        return None if key is None else key.info
    return target.reader.groups[key[0]][key[1]]


def _checksums_agree(pair: TensorPair, left: InspectedCheckpoint, right: InspectedCheckpoint) -> bool:
    known, other = _crcs(left, pair.left), _crcs(right, pair.right)
    return known is not None and other is not None and list(known) == list(other)


def _crcs(target: InspectedCheckpoint, key: Key | None) -> Sequence[int] | None:
    return target.reader.crcs(*key) if isinstance(key, tuple) else None
