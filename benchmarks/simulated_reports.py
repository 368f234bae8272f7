"""What simulated ranks report and send: from plans of the product, for a few ranks, and from the layout for all others.

Under FSDP2 the fragments of a rank are its shards, cut at the edges of blocks: no plan is needed for them. Values that
all ranks hold, the steps of AdamW, are dealt out: which rank writes one depends on the plan, but one does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulated_training import Training
from rankless.engine.comm.spec_directory import SpecDigests, SpecDirectory, digest_specs
from rankless.engine.io.column_tables import compress_rows, decompress_rows
from rankless.engine.io.fragments import (
    FRAGMENT_BYTES,
    FragmentTable,
    encode_fragments,
    merge_adjacent_fragments,
)
from rankless.engine.io.requests import Fragments, merge_fragments
from rankless.engine.plan.cell_transfers import cut_out
from rankless.engine.plan.file_ranges import split_at_blocks
from rankless.engine.plan.global_spec import GlobalSpec
from rankless.engine.plan.save_plan import SavePlan, plan_save
from rankless.engine.plan.tensor_specs import Meshes, Spec
from rankless.ondisk.block_crcs import BLOCK_BYTES, Fragment, crc64
from rankless.ondisk.data_files import parse_size
from rankless.options import SaveOptions
from rankless.state.capture import capture_training
from rankless.state.training import TrainingObjects

#: Of jobs with at most so many ranks, all plans are made.
ALL_PLANNED = 64


class Reports:
    """The encoded CRCs of each rank, whose bytes are zeros, and the sizes of messages to rank 0."""

    def __init__(self, training: Training, size: int, ranks_per_host: int, *, rng: bool) -> None:
        self._size, self._ranks_per_host = size, ranks_per_host
        self._host_of = [rank // ranks_per_host for rank in range(size)] if size > ranks_per_host else []
        captured = capture_training(TrainingObjects(training.model, training.optimizer, rng=rng), 0)
        self._spec, self._meshes = captured.inventory.build_spec(), captured.inventory.build_meshes()
        self._shapes = {(tensor.group, tensor.name): tensor for tensor in self._spec.tensors}
        self._plans: dict[int, SavePlan] = {}
        self._plan = self._plan_of(0)
        ranks, sizes = self._plan.received.ranks, self._plan.received.sizes
        self.message_sizes = dict(enumerate(np.bincount(ranks, sizes, size).astype(int).tolist())) if len(ranks) else {}
        self._numbers = {key: number for number, key in enumerate(self._plan.tensors)}
        self._even = self._list_even()
        self._own = [tensor.name for tensor in self._spec.tensors if tensor.group == "own"]
        self._whole = self._list_whole()
        self._planned: dict[int, bytes] = {}

    @property
    def rank_order(self) -> Sequence[int]:
        """The order of the ranks by the bytes that they write."""
        return self._plan.rank_order

    def plan(self, rank: int) -> SavePlan:
        """Return the plan of a rank."""
        limit = parse_size(SaveOptions().max_shard_size)
        return plan_save(build_spec_of_all(self._spec, self._meshes, self._size), rank, limit, self._host_of)

    def sent_sizes(self, rank: int) -> dict[int, int]:
        """Return the size of what a rank sends to each other, if its plan is made: rank 0's, and those of few ranks."""
        sizes: dict[int, int] = {}
        for transfer in self._plan_of(rank).sent if self._is_planned(rank) else ():
            sizes[transfer.rank] = sizes.get(transfer.rank, 0) + transfer.stop - transfer.start
        return sizes

    def sample_files(self, rank: int) -> list[bool]:
        """Return whether a rank writes bytes of each file."""
        files = range(len(self._plan.files))
        if not self._is_planned(rank):
            return [True for _ in files]
        written = {file_range.file for file_range in self._plan_of(rank).file_ranges}
        return [file in written for file in files]

    def _is_planned(self, rank: int) -> bool:
        return not rank or self._size <= ALL_PLANNED

    def _plan_of(self, rank: int) -> SavePlan:
        if rank not in self._plans:
            self._plans[rank] = self.plan(rank)
        return self._plans[rank]

    def of(self, rank: int) -> bytes:
        """Return the report of a rank."""
        if self._size > ALL_PLANNED:
            return self._derive(range(rank, rank + 1))
        if rank not in self._planned:
            self._planned[rank] = encode_fragments(self.planned(rank))
        return self._planned[rank]

    def planned(self, rank: int) -> Fragments:
        """Return the fragments of a rank from its plan."""
        plan = self._plan_of(rank)
        kept, cut = cut_out(plan.file_ranges, plan.sent)
        ranges = [*kept, *(part for _, parts in cut for part in parts)]
        pieces = [piece for file_range in ranges for piece in split_at_blocks(file_range)]
        fragments = [
            (piece.tensor, Fragment(piece.start, piece.stop, crc_of_zeros(piece.stop - piece.start)))
            for piece in pieces
        ]
        return merge_fragments([fragments])

    def packed(self, rank: int) -> bytes:
        """Return the report of a rank as it is stored."""
        return compress_rows(self.of(rank), FRAGMENT_BYTES)

    def packed_of_host(self, host: int) -> bytes:
        """Return the merged report of a host whose ranks have neighbouring numbers, as it is stored."""
        ranks = range(host * self._ranks_per_host, min((host + 1) * self._ranks_per_host, self._size))
        return compress_rows(self._derive(ranks), FRAGMENT_BYTES)

    def _derive(self, ranks: range) -> bytes:
        """Return the report of neighbours that write their shards, the states of their generators, and some others."""
        numbers, sizes, totals = self._even
        starts, stops = (np.minimum(edge * sizes, totals) for edge in (ranks.start, ranks.stop))
        rest = [number for rank in ranks for number in self._whole[rank - 1 :: self._size - 1]]
        rest += [self._numbers["ranks", f"{rank}/{name}"] for rank in ranks for name in self._own]
        rest_sizes = np.array([self._plan.tensor_sizes[number] for number in rest], np.int64)
        columns = (
            np.concatenate([numbers, np.array(rest, np.int64)]),
            np.concatenate([starts, np.zeros_like(rest_sizes)]),
            np.concatenate([stops, rest_sizes]),
        )
        order = np.argsort(columns[0], kind="stable")
        return encode_drawn(*(column[order] for column in columns))

    def _list_whole(self) -> list[int]:
        """Return the numbers of the tensors that all ranks hold, without those that rank 0 writes."""
        own = self.planned(0)
        whole = [key for key, tensor in self._shapes.items() if tensor.layout is None and tensor.group != "own"]
        return [self._numbers[key] for key in whole if self._numbers[key] not in own]

    def _list_even(self) -> NDArray[np.int64]:
        """Return, of tensors that are sharded: the numbers, the bytes of a shard, and the bytes of all."""
        rows = []
        for key, tensor in self._shapes.items():
            if tensor.layout is not None:
                number = self._numbers[key]
                nbytes = self._plan.tensor_sizes[number]
                rows.append((number, -(-tensor.shape[0] // self._size) * (nbytes // tensor.shape[0]), nbytes))
        return np.array(rows, np.int64).T


def merge_reports(packed: Sequence[bytes]) -> bytes:
    """Merge stored reports."""
    reports = (decompress_rows(report, FRAGMENT_BYTES) for report in packed)
    return compress_rows(merge_adjacent_fragments(FragmentTable.from_bytes(reports)).to_bytes(), FRAGMENT_BYTES)


def build_spec_of_all(spec: Spec, meshes: Meshes, size: int) -> GlobalSpec:
    """Return the spec of a job whose ranks have equal ones."""
    directory = SpecDirectory.from_digests([SpecDigests(*digest_specs(spec, meshes))] * size)
    return directory.share_spec(spec, meshes, range(size))


def encode_drawn(tensors: NDArray[np.int64], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> bytes:
    """Encode the fragments of ranges, which are cut at the edges of blocks, with CRCs as of any bytes."""
    counts = np.where(stops > starts, -(-stops // BLOCK_BYTES) - starts // BLOCK_BYTES, 0)
    row = np.repeat(np.arange(len(counts)), counts)
    block = starts[row] // BLOCK_BYTES + np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    low = np.maximum(starts[row], block * BLOCK_BYTES)
    high = np.minimum(stops[row], (block + 1) * BLOCK_BYTES)
    crcs = np.random.default_rng(len(row)).integers(2**63, size=len(row), dtype=np.uint64)
    columns = tensors[row].astype(np.uint32), low.astype(np.uint64), high.astype(np.uint64), crcs
    return FragmentTable(*columns).to_bytes()


@cache
def crc_of_zeros(nbytes: int) -> int:
    """Return the CRC of so many zeros."""
    return crc64(bytes(nbytes))
