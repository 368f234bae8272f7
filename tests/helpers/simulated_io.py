"""Saves and loads of simulated jobs by the engine alone: stripes and ranges, without sessions and manifests."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from rankless.engine.comm.session import Session
from rankless.engine.comm.store_messages import StoreMessages
from rankless.engine.io import read, read_shared, requests, write, write_stripes
from rankless.engine.io.cell_exchange import CellExchange
from rankless.engine.io.requests import Fragments
from rankless.engine.io.tensor_bytes import TensorBytes
from rankless.engine.plan import equal_shares, file_ranges, load_plan, stripes
from rankless.engine.plan.layout_types import PlacementLayout, Sharded
from rankless.engine.plan.save_plan import EMPTY_PLAN, SavePlan
from rankless.formats.reader import FileExtent
from rankless.load import rank_reads
from rankless.ondisk import block_crcs
from rankless.ondisk.data_files import TensorInfo
from rankless.state.tensor_views import DTYPES, NAMES
from rankless.storage.direct_io import BufferedReader
from tests.helpers.simulated_jobs import Job, Key, make_mesh
from tests.helpers.tensors import random_tensor, tensor_bytes
from tests.helpers.thread_ranks import ThreadP2P, run_ranks_or_raise

#: Sizes that make many chunks, blocks and stripes out of few bytes.
SMALL = {"STRIPE": 64, "NARROW": 40, "MIN_SHARE": 32, "CHUNK": 48, "BLOCK_BYTES": 96, "MAX_BYTES_IN_FLIGHT": 160}

#: Every stripe needs every rank.
COLUMNS = PlacementLayout(make_mesh(4), (Sharded(1),))


@contextmanager
def small_sizes() -> Iterator[None]:
    """Make many chunks, blocks and stripes out of few bytes."""
    with pytest.MonkeyPatch.context() as patch:
        plans = (file_ranges, load_plan, equal_shares, stripes)
        modules = (block_crcs, *plans, write_stripes, read, read_shared, requests, write)
        for name, size in SMALL.items():
            users = [module for module in modules if hasattr(module, name)]
            assert users, f"no module has {name}"
            for module in users:
                patch.setattr(module, name, size)
        patch.setattr(os, "fsync", lambda _: None)
        yield


def without_cells(p2p: Any) -> CellExchange:
    return CellExchange((), EMPTY_PLAN.received, p2p, StoreMessages(Session(None, 0, 1, 1.0)))


def make_scattered(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values in memory that is not contiguous in any dimension."""
    room = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)
    room[..., 0] = tensor
    return room[..., 0]


def place_tensor(tensor: torch.Tensor, in_place: bool) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format) if in_place else make_scattered(tensor)


def create_files(folder: Path, plan: SavePlan) -> list[Path]:
    paths = [folder / str(number) for number in range(len(plan.files))]
    for path, file in zip(paths, plan.files, strict=True):
        path.write_bytes(bytes(file.size))
    return paths


def write_rank(
    paths: Sequence[Path], plan: SavePlan, part_of: Callable[[int], TensorBytes], p2p: ThreadP2P
) -> Fragments:
    """Write a rank's share of a save, as ``ShardWriter`` does."""
    found = (
        write_stripes.write_stripes(paths, plan.stripe_tasks, part_of, without_cells(p2p))
        if plan.needs_exchange
        else {}
    )
    return found | write.write_file_ranges(paths, plan.file_ranges, part_of)


@dataclass
class SavedJob:
    """Files with the tensors of a job, and the fragments of each tensor that ranks hashed."""

    paths: list[Path]
    plan: SavePlan
    fragments: dict[Key, list] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, folder: Path, job: Job, in_place: bool = True, limit: int = 2000) -> SavedJob:
        plans = job.plans(limit)
        saved = cls(create_files(folder, plans[0]), plans[0])

        def work(rank: int, p2p: ThreadP2P) -> Fragments:
            def part_of(tensor: int) -> TensorBytes:
                return TensorBytes(place_tensor(job.part(plans[rank].tensors[tensor], rank), in_place))

            return write_rank(saved.paths, plans[rank], part_of, p2p)

        for actual in run_ranks_or_raise(len(plans), work):
            for tensor, fragments in actual.items():
                saved.fragments[saved.plan.tensors[tensor]] += fragments
        return saved

    def extents(self) -> dict[Key, list[FileExtent]]:
        """Return the place of each tensor in the files."""
        result = {}
        names = iter(self.plan.tensors)
        for path, file in zip(self.paths, self.plan.files, strict=True):
            for entry in file.entries.values():
                start, stop = entry.data_offsets
                result[next(names)] = [FileExtent(path, file.data_start + start, 0, stop - start)]
        return result

    def bytes_of(self, key: Key) -> bytes:
        return b"".join(
            item.file.read_bytes()[item.offset : item.offset + item.stop - item.start] for item in self.extents()[key]
        )


def assert_hashed(fragments: Sequence[block_crcs.Fragment], tensor: torch.Tensor) -> None:
    """Check that the fragments of all ranks give the CRCs of every block."""
    raw = tensor_bytes(tensor)
    crcs = [
        block_crcs.crc64(raw[start : start + block_crcs.BLOCK_BYTES])
        for start in range(0, len(raw), block_crcs.BLOCK_BYTES)
    ]
    assert block_crcs.assemble_crcs(fragments, len(raw)) == crcs


class StoredTensors:
    """A checkpoint of any format: the ranges of files that hold each tensor."""

    def __init__(self, extents: Mapping[Key, Sequence[FileExtent]], tensors: Mapping[Key, torch.Tensor]) -> None:
        self._extents = extents
        self.numbered = sorted(tensors)
        self.infos = {key: TensorInfo(NAMES[tensor.dtype], tuple(tensor.shape)) for key, tensor in tensors.items()}
        self.groups: dict[str, dict[str, TensorInfo]] = {}
        for (group, name), info in self.infos.items():
            self.groups.setdefault(group, {})[name] = info

    def find_extents(self, group: str, name: str, start: int, stop: int) -> list[FileExtent]:
        result = []
        for file, offset, first, last in self._extents[group, name]:
            low, high = max(start, first), min(stop, last)
            if low < high:
                result.append(FileExtent(file, offset + low - first, low, high))
        return result


@dataclass
class SimulatedLoad:
    """A load by the ranks of a job: targets in their memory, and plans to fill them."""

    stored: StoredTensors
    job: Job
    exchange: bool
    in_place: bool = True
    targets: list[dict[Key, torch.Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        blank = {key: random_tensor(tensor.shape, tensor.dtype, seed=99) for key, tensor in self.job.tensors.items()}
        self.targets = [
            {
                key: place_tensor(self.job.part(key, rank, blank[key]), self.in_place)
                for key in self.job.tensors
                if self.job.holds(key, rank)
            }
            for rank in self.job.ranks
        ]

    def plan(self, rank: int) -> tuple[load_plan.LoadPlan, list[Path]]:
        """Return a rank's plan, and the files by their numbers in it."""
        numbers = {key: number for number, key in enumerate(self.stored.numbered)}
        held = {numbers[tensor.group, tensor.name]: tensor for tensor in self.job.membership().iter_tensors()}
        files = rank_reads._FileIndex(self.stored, numbers, held)
        plan = load_plan.plan_load(held, rank, files.locate_bytes, exchange=self.exchange)
        return plan, list(files.numbers)

    def run(self, rank: int, p2p: ThreadP2P) -> Fragments:
        """Read a rank's share of a load, as ``Reads`` does."""
        plan, files = self.plan(rank)

        def sink_of(tensor: int) -> TensorBytes:
            key = self.stored.numbered[tensor]
            return TensorBytes(self.targets[rank][key], DTYPES[self.stored.infos[key].dtype])

        actual = read_shared.read_shared(files, plan.exchanged, sink_of, p2p) if self.exchange else {}
        assert self.exchange or not plan.exchanged
        actual |= read_shared.read_stripes(files, plan.local_stripes, rank, sink_of)
        actual |= read.read_host_shared(files, plan.host_shared, rank, sink_of)
        return actual | read.read_file_ranges(files, plan.file_ranges, sink_of)

    def run_all(self) -> dict[Key, list]:
        """Load on all ranks. Return the fragments of each tensor that ranks hashed."""
        result: dict[Key, list] = defaultdict(list)
        for item in run_ranks_or_raise(len(self.targets), self.run):
            for tensor, fragments in item.items():
                result[self.stored.numbered[tensor]] += fragments
        return result

    def assert_filled(self, rank: int) -> None:
        """Check that a rank's targets are its shards by torch's own chunking."""
        for key, target in self.targets[rank].items():
            assert tensor_bytes(target) == tensor_bytes(self.job.part(key, rank)), key


#: FileRanges of files, as path, start and stop.
FileRanges = list[tuple[Path, int, int]]


@contextmanager
def record_reads() -> Iterator[FileRanges]:
    """Record the ranges that any rank reads."""
    result: FileRanges = []
    whole = BufferedReader._read_buffered

    def counted(reader: BufferedReader, fd: int, offset: int, into: memoryview) -> None:
        result.append((reader._path, offset, offset + len(into)))
        whole(reader, fd, offset, into)

    with mock.patch.object(BufferedReader, "_read_buffered", counted):
        yield result


def list_bytes(ranges: FileRanges) -> list[tuple[Path, int]]:
    return sorted((path, byte) for path, start, stop in ranges for byte in range(start, stop))


def ranges_of_tensors(stored: StoredTensors, job: Job) -> FileRanges:
    """Return the ranges of files with the tensors of a job."""
    extents = [item for key, tensor in job.tensors.items() for item in stored.find_extents(*key, 0, tensor.nbytes)]
    return [(file, offset, offset + stop - start) for file, offset, start, stop in extents]


def store_in_pieces(folder: Path, case: tuple[Job, dict[Key, list[int]], list[int]]) -> StoredTensors:
    """Write tensors in pieces over several files, as the ranks of other systems leave them."""
    job, cuts, files = case
    contents, number = defaultdict(bytearray), iter(files)
    extents: dict[Key, list[FileExtent]] = {}
    for key, tensor in job.tensors.items():
        raw, extents[key] = tensor_bytes(tensor), []
        for start, stop in itertools.pairwise(cuts[key]):
            path = folder / f"of rank {next(number)}"
            extents[key].append(FileExtent(path, len(contents[path]), start, stop))
            contents[path] += raw[start:stop]
    for path, data in contents.items():
        path.write_bytes(data)
    return StoredTensors(extents, job.tensors)
