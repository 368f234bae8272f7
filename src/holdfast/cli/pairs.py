"""Which tensors of two checkpoints are to be compared, and what their metadata tell already. No tensor is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.cli.described import Described
from holdfast.cli.leaves import Leaf
from holdfast.cli.modules import INSIDE
from holdfast.cli.target import Target
from holdfast.layout.files import TensorInfo

#: A tensor by its group and name, or one with its bytes inside values.
Key = tuple[str, str] | Described


@dataclass(frozen=True, slots=True)
class Pair:
    """Tensors of one name; ``None`` where a side has none."""

    name: str
    left: Key | None
    right: Key | None


def pairs(left: Target, right: Target) -> Iterator[Pair]:
    """All names of both sides, further names of tied tensors included; two tensors are compared under one name only."""
    known, others = _names(left), _names(right)
    seen = set()
    for name in dict.fromkeys([*known, *others]):
        one, other = known.get(name), others.get(name)
        if one is not None and other is not None:
            if (one, other) in seen:
                continue
            seen.add((one, other))
        yield Pair(name, one, other)


def inside(leaf: Leaf, group: str) -> Pair:
    """Two tensors inside values, those with files in a group: ``"state"`` or ``"ranks"``."""
    left, right = ((group, side.key) if side.key else side for side in (leaf.left, leaf.right))
    return Pair(leaf.path, left, right)


def _names(target: Target) -> dict[str, Key]:
    names: dict[str, Key] = {
        f"{group}/{name}": (group, name) for group, name, _ in target.entries() if group not in INSIDE
    }
    for group, tied in target.reader.tied.items():
        names |= {f"{group}/{alias}": (group, name) for alias, name in tied.items()}
    return names


@dataclass(frozen=True, slots=True)
class Sorted:
    """Pairs by what is known of them: of ``equal`` the checksums agree; of ``suspect`` only the bytes can tell."""

    apart: Sequence[Pair]
    equal: Sequence[Pair]
    suspect: Sequence[Pair]


def sort(found: Sequence[Pair], left: Target, right: Target) -> Sorted:
    """Take apart what metadata tell: ``apart`` are those that one side lacks or that have different shapes."""
    apart, equal, suspect = [], [], []
    for pair in found:
        one, other = info(left, pair.left), info(right, pair.right)
        if one is None or other is None or one.shape != other.shape:
            apart.append(pair)
        elif one == other and (not one.nbytes or _checksums_agree(pair, left, right)):
            equal.append(pair)
        else:
            suspect.append(pair)
    return Sorted(apart, equal, suspect)


def info(target: Target, key: Key | None) -> TensorInfo | None:
    """What a tensor is."""
    if key is None or isinstance(key, Described):
        return None if key is None else key.info
    return target.reader.groups[key[0]][key[1]]


def _checksums_agree(pair: Pair, left: Target, right: Target) -> bool:
    known, other = _crcs(left, pair.left), _crcs(right, pair.right)
    return known is not None and other is not None and list(known) == list(other)


def _crcs(target: Target, key: Key | None) -> Sequence[int] | None:
    return target.reader.crcs(*key) if isinstance(key, tuple) else None
