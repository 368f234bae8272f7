"""``python -m benchmarks.crc_merging``: the cost on rank 0 of one CRC from another rank, against the earlier method.

Ranks hold rows of tensors, as under FSDP: each reports one fragment of each tensor, adjacent to those of its
neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from benchmarks.measure import measure_seconds
from rankless.engine.io.fragments import (
    FRAGMENT_BYTES,
    FragmentTable,
    decode_fragments,
    encode_fragments,
    merge_adjacent_fragments,
)
from rankless.engine.io.requests import Fragments, KnownFragments
from rankless.ondisk import block_crcs
from rankless.ondisk.block_crcs import Fragment

#: The number of ranks, the number of tensors, and the bytes that each rank has of each tensor.
RANKS, TENSORS, NBYTES = 64, 8000, 43_750


@dataclass(frozen=True)
class Costs:
    """Seconds for merging a fragment, assembling a merged one, moving a byte through the store; and the old way."""

    fold: float
    block: float
    byte: float
    one_by_one: float

    def __str__(self) -> str:
        return (
            f"{self.fold * 1e6:.2f} us folded, {self.block * 1e6:.2f} us a block assembled, {self.one_by_one * 1e6:.2f}"
            f" us where each is decoded and combined by itself; {1e-6 / self.byte:.0f} MB/s through the store"
        )


def measure_costs() -> Costs:
    """Measure the costs on this machine."""
    reports = [_build_report(rank) for rank in range(RANKS)]
    folded = merge_adjacent_fragments(FragmentTable.from_bytes(reports)).to_bytes()
    fragments = decode_fragments([folded])
    one_by_one = measure_seconds(lambda: _assemble_crcs(_decode_reports(reports)))
    return Costs(
        fold=measure_seconds(lambda: merge_adjacent_fragments(FragmentTable.from_bytes(reports)).to_bytes())
        / (RANKS * TENSORS),
        block=measure_seconds(lambda: _assemble_crcs(decode_fragments([folded]))) / sum(map(len, fragments.values())),
        byte=_measure_byte(reports),
        one_by_one=one_by_one / (RANKS * TENSORS),
    )


def _build_report(rank: int) -> bytes:
    """Encode fragments whose ranges are all in the first block."""
    crcs = np.random.default_rng(rank).integers(2**63, size=TENSORS).tolist()
    start, stop = rank * NBYTES, (rank + 1) * NBYTES
    return encode_fragments({tensor: [Fragment(start, stop, crc)] for tensor, crc in enumerate(crcs)})


def _decode_reports(reports: Sequence[bytes]) -> Fragments:
    """Return all fragments, unmerged."""
    result: Fragments = {}
    for raw in reports:
        for tensor, fragments in FragmentTable.from_bytes([raw]).to_fragments().items():
            result.setdefault(tensor, []).extend(fragments)
    return result


def _assemble_crcs(fragments_by_tensor: KnownFragments) -> None:
    for fragments in fragments_by_tensor.values():
        if None in block_crcs.assemble_crcs(fragments, RANKS * NBYTES):
            raise ValueError("what was told does not tile the tensor")


def _measure_byte(reports: Sequence[bytes]) -> float:
    """Measure a byte that is set and read, both over one connection of the process that hosts the store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    keys = [f"hashed/{rank}" for rank in range(len(reports))]

    def through() -> None:
        for key, report in zip(keys, reports, strict=True):
            store.set(key, report)  # type: ignore[arg-type]
        store.multi_get(keys)

    return measure_seconds(through) / (RANKS * TENSORS * FRAGMENT_BYTES)


if __name__ == "__main__":
    print(measure_costs())
