"""The pairs of tensors of two checkpoints to compare, sorted by their metadata. No tensor is read.

:mod:`rankless.inspection.compare` sorts with it, in one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rankless.inspection.inspected_checkpoint import VALUE_GROUPS, InspectedCheckpoint
from rankless.inspection.placeholders import TensorPlaceholder
from rankless.inspection.value_differences import ValueDifference
from rankless.ondisk.data_files import TensorInfo

#: A tensor by its group and name, or a small one with its bytes inside values.
Key = tuple[str, str] | TensorPlaceholder


@dataclass(frozen=True, slots=True)
class TensorPair:
    """The tensors of one name on both sides; ``None`` if a side does not have it."""

    name: str
    left: Key | None
    right: Key | None


def pair_tensors(left: InspectedCheckpoint, right: InspectedCheckpoint) -> Iterator[TensorPair]:
    """Pair the tensors of both sides by name, including tied names. Two tensors are paired under one name only."""
    left_keys, right_keys = _keys_by_name(left), _keys_by_name(right)
    seen = set()
    for name in dict.fromkeys([*left_keys, *right_keys]):
        left_key, right_key = left_keys.get(name), right_keys.get(name)
        if left_key is not None and right_key is not None:
            if (left_key, right_key) in seen:
                continue
            seen.add((left_key, right_key))
        yield TensorPair(name, left_key, right_key)


def pair_inside_values(leaf: ValueDifference, group: str) -> TensorPair:
    """Pair two tensors inside values. Those in files are in the group ``"state"`` or ``"ranks"``."""
    left, right = ((group, side.key) if side.key else side for side in (leaf.left, leaf.right))
    return TensorPair(leaf.path, left, right)


def _keys_by_name(target: InspectedCheckpoint) -> dict[str, Key]:
    names: dict[str, Key] = {
        f"{group}/{name}": (group, name) for group, name, _ in target.iterate_tensors() if group not in VALUE_GROUPS
    }
    for group, tied in target.reader.tied.items():
        names |= {f"{group}/{alias}": (group, name) for alias, name in tied.items()}
    return names


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """Pairs by their metadata.

    ``apart`` cannot be compared, because a side lacks the tensor or shapes differ. ``equal`` have equal checksums.
    ``suspect`` must be compared by their bytes.
    """

    apart: Sequence[TensorPair]
    equal: Sequence[TensorPair]
    suspect: Sequence[TensorPair]


def sort_pairs(
    tensor_pairs: Sequence[TensorPair], left: InspectedCheckpoint, right: InspectedCheckpoint
) -> SortedPairs:
    """Sort pairs by their metadata and checksums."""
    apart, equal, suspect = [], [], []
    for pair in tensor_pairs:
        left_info, right_info = info_of(left, pair.left), info_of(right, pair.right)
        if left_info is None or right_info is None or left_info.shape != right_info.shape:
            apart.append(pair)
        elif left_info == right_info and (not left_info.nbytes or _checksums_agree(pair, left, right)):
            equal.append(pair)
        else:
            suspect.append(pair)
    return SortedPairs(apart, equal, suspect)


def info_of(target: InspectedCheckpoint, key: Key | None) -> TensorInfo | None:
    """Return the dtype and shape of a tensor, or ``None`` if there is none."""
    if key is None or isinstance(key, TensorPlaceholder):
        return None if key is None else key.info
    return target.reader.groups[key[0]][key[1]]


def _checksums_agree(pair: TensorPair, left: InspectedCheckpoint, right: InspectedCheckpoint) -> bool:
    left_crcs, right_crcs = _block_crcs(left, pair.left), _block_crcs(right, pair.right)
    return left_crcs is not None and right_crcs is not None and list(left_crcs) == list(right_crcs)


def _block_crcs(target: InspectedCheckpoint, key: Key | None) -> Sequence[int] | None:
    return target.reader.block_crcs(*key) if isinstance(key, tuple) else None
