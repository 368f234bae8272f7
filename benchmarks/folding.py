"""``python -m benchmarks.folding``: what rank 0 does for one CRC that another rank tells it, beside what it did before.

Ranks hold rows of tensors, as under FSDP: each tells one fragment of each tensor, and neighbours touch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from benchmarks.measure import seconds
from holdfast.engine.integrity.fragments import (
    BYTES,
    FragmentTable,
    decode_fragments,
    encode_fragments,
    merge_adjacent_fragments,
)
from holdfast.engine.io.requests import Fragments
from holdfast.ondisk import blocks
from holdfast.ondisk.blocks import Fragment

#: What each of so many ranks tells: as many tensors, of which it has so many bytes.
RANKS, TENSORS, NBYTES = 64, 8000, 43_750


@dataclass(frozen=True)
class Costs:
    """Seconds: a fragment folded, a folded one assembled, a byte through the store; and a fragment the old way."""

    fold: float
    block: float
    byte: float
    one_by_one: float

    def __str__(self) -> str:
        return (
            f"{self.fold * 1e6:.2f} us folded, {self.block * 1e6:.2f} us a block assembled, {self.one_by_one * 1e6:.2f}"
            f" us where each is decoded and combined by itself; {1e-6 / self.byte:.0f} MB/s through the store"
        )


def measure() -> Costs:
    """What it costs on this machine."""
    reports = [_report(rank) for rank in range(RANKS)]
    folded = merge_adjacent_fragments(FragmentTable.told(reports)).report()
    found = decode_fragments([folded])
    one_by_one = seconds(lambda: _assemble(_decoded(reports)))
    return Costs(
        fold=seconds(lambda: merge_adjacent_fragments(FragmentTable.told(reports)).report()) / (RANKS * TENSORS),
        block=seconds(lambda: _assemble(decode_fragments([folded]))) / sum(map(len, found.values())),
        byte=_byte(reports),
        one_by_one=one_by_one / (RANKS * TENSORS),
    )


def _report(rank: int) -> bytes:
    """All ranges lie in the first block."""
    crcs = np.random.default_rng(rank).integers(2**63, size=TENSORS).tolist()
    start, stop = rank * NBYTES, (rank + 1) * NBYTES
    return encode_fragments({tensor: [Fragment(start, stop, crc)] for tensor, crc in enumerate(crcs)})


def _decoded(reports: Sequence[bytes]) -> Fragments:
    """All fragments, none of them folded."""
    result: Fragments = {}
    for raw in reports:
        for tensor, fragments in FragmentTable.told([raw]).fragments().items():
            result.setdefault(tensor, []).extend(fragments)
    return result


def _assemble(found: Fragments) -> None:
    for fragments in found.values():
        if None in blocks.assemble_crcs(fragments, RANKS * NBYTES):
            raise ValueError("what was told does not tile the tensor")


def _byte(reports: Sequence[bytes]) -> float:
    """Set by one, got by another: here both over one connection of the process that has the store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    keys = [f"hashed/{rank}" for rank in range(len(reports))]

    def through() -> None:
        for key, report in zip(keys, reports, strict=True):
            store.set(key, report)  # type: ignore[arg-type]
        store.multi_get(keys)

    return seconds(through) / (RANKS * TENSORS * BYTES)


if __name__ == "__main__":
    print(measure())
