"""Tests the assembly of stripes and the exchange of read data, with threads as ranks and an in-memory transport."""

from __future__ import annotations

import itertools
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from holdfast.engine.io import read, read_shared, requests, write, write_stripes
from holdfast.engine.io.cell_exchange import CellExchange
from holdfast.engine.io.requests import Fragments
from holdfast.engine.io.tensor_bytes import TensorBytes
from holdfast.engine.plan import file_ranges, load_plan, partition, stripes
from holdfast.engine.plan.placements import MeshShape, PlacementLayout, Replicated, Sharded
from holdfast.engine.plan.save_plan import EMPTY_PLAN, SavePlan
from holdfast.errors import CorruptCheckpointError, PeerFailedError, StorageError
from holdfast.formats.reader import FileExtent
from holdfast.load import read_plan
from holdfast.ondisk import blocks
from holdfast.ondisk.files import TensorInfo
from holdfast.state.tensors import DTYPES, NAMES
from holdfast.storage.direct_io import SECTOR_BYTES, BufferedReader, DirectWriter
from holdfast.storage.memory import Bytes
from tests.helpers.simulated_jobs import Job, Key, jobs, make_job, make_mesh, named_tensors
from tests.helpers.tensors import random_tensor, tensor_bytes

#: Sizes that make many chunks, blocks and stripes out of few bytes.
SMALL = {"STRIPE": 64, "NARROW": 40, "MIN_SHARE": 32, "CHUNK": 48, "BLOCK_BYTES": 96}

#: Every stripe needs every rank.
COLUMNS = PlacementLayout(make_mesh(4), (Sharded(1),))

#: Seconds after which a rank that goes on without an end is given up.
PATIENCE = 30

T = TypeVar("T")


def without_cells(wire: Any) -> CellExchange:
    return CellExchange((), EMPTY_PLAN.received, wire)


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        modules = (blocks, file_ranges, write_stripes, read, partition, read_shared, stripes, requests, write)
        for name, size in SMALL.items():
            users = [module for module in modules if hasattr(module, name)]
            assert users, f"no module has {name}"
            for module in users:
                patch.setattr(module, name, size)
        patch.setattr(os, "fsync", lambda _: None)
        yield


@dataclass
class Transfer:
    """Bytes between two ranks. They are moved when one of both waits for them, and no sooner."""

    data: Bytes | None = None
    into: Bytes | None = None
    done: bool = False

    @property
    def met(self) -> bool:
        """Whether both ranks have begun it."""
        return self.data is not None and self.into is not None

    def move(self) -> None:
        if not self.done:
            assert len(self.data) == len(self.into), "one rank sends what another does not expect"
            np.copyto(self.into, self.data)
            self.done = True


class StuckError(Exception):
    """Ranks wait for each other, or for one that is gone."""


class Post:
    """All transfers between some ranks; those between two of them meet in the order in which both begin them."""

    def __init__(self, size: int) -> None:
        self._changed = threading.Condition()
        self._begun: dict[tuple[int, int, str], deque[Transfer]] = defaultdict(deque)
        self._working = set(range(size))
        self._waiting: dict[int, Sequence[Transfer]] = {}

    def begin(self, source: int, to: int, side: str, data: Bytes) -> Transfer:
        """One side of a transfer."""
        with self._changed:
            waiting = self._begun[source, to, "into" if side == "data" else "data"]
            transfer = waiting.popleft() if waiting else Transfer()
            setattr(transfer, side, data)
            if transfer.met:
                self._changed.notify_all()
            else:
                self._begun[source, to, side].append(transfer)
            return transfer

    def wait(self, rank: int, works: Sequence[Transfer]) -> None:
        """Until both sides of all of them have begun; then move the bytes. ``StuckError`` where that cannot come."""
        with self._changed:
            self._waiting[rank] = works
            self._changed.notify_all()
            self._changed.wait_for(lambda: met(works) or self._stuck(), PATIENCE)
            if not met(works):
                raise StuckError(f"rank {rank} waits in vain")
            del self._waiting[rank]
            for work in works:
                work.move()

    def leave(self, rank: int) -> None:
        """A rank has done its work, or has failed."""
        with self._changed:
            self._working.discard(rank)
            self._changed.notify_all()

    def _stuck(self) -> bool:
        return all(rank in self._waiting and not met(self._waiting[rank]) for rank in self._working)


def met(works: Sequence[Transfer]) -> bool:
    return all(work.met for work in works)


class FakeWire:
    """As ``engine/wire.py``: one rank's end. A send is done when it is received, and not before."""

    def __init__(self, rank: int, post: Post) -> None:
        self.rank, self._post = rank, post

    def send(self, data: Bytes, to: int) -> Transfer:
        assert to != self.rank
        return self._post.begin(self.rank, to, "data", data)

    def receive(self, into: Bytes, source: int) -> Transfer:
        assert source != self.rank
        return self._post.begin(source, self.rank, "into", into)

    def wait(self, works: Sequence[Transfer]) -> None:
        self._post.wait(self.rank, works)


class Outcome(NamedTuple):
    """What a rank returned, or raised."""

    value: Any = None
    error: BaseException | None = None


def outcomes(size: int, work: Callable[[int, FakeWire], T]) -> list[Outcome]:
    """What ranks return or raise that work at the same time. Raises where one waits in vain."""
    post = Post(size)
    actual = [Outcome(error=StuckError(f"rank {rank} goes on without an end")) for rank in range(size)]

    def run(rank: int) -> None:
        try:
            actual[rank] = Outcome(work(rank, FakeWire(rank, post)))
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            actual[rank] = Outcome(error=error)
        post.leave(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    errors = [outcome.error for outcome in actual if outcome.error is not None]
    if any(isinstance(error, StuckError) for error in errors):
        raise min(errors, key=lambda error: isinstance(error, StuckError))
    return actual


def together(size: int, work: Callable[[int, FakeWire], T]) -> list[T]:
    """What ranks return that work at the same time."""
    actual = outcomes(size, work)
    for outcome in actual:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in actual]


def scattered(tensor: torch.Tensor) -> torch.Tensor:
    """The same values where no row of memory is: bytes that cannot be reached in place."""
    room = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)
    room[..., 0] = tensor
    return room[..., 0]


def placed(tensor: torch.Tensor, in_place: bool) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format) if in_place else scattered(tensor)


def empty_files(folder: Path, plan: SavePlan) -> list[Path]:
    paths = [folder / str(number) for number in range(len(plan.files))]
    for path, file in zip(paths, plan.files, strict=True):
        path.write_bytes(bytes(file.size))
    return paths


def write_all(
    paths: Sequence[Path], plan: SavePlan, part_of: Callable[[int], TensorBytes], wire: FakeWire
) -> Fragments:
    """A rank's share of a save, as ``saving.py`` does it."""
    found = (
        write_stripes.write_stripes(paths, plan.stripe_tasks, part_of, without_cells(wire))
        if plan.needs_exchange
        else {}
    )
    return found | write.write_file_ranges(paths, plan.file_ranges, part_of)


@dataclass
class Saved:
    """Files with the tensors of a job in them, and what ranks hashed of each tensor."""

    paths: list[Path]
    plan: SavePlan
    fragments: dict[Key, list] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, folder: Path, job: Job, in_place: bool = True, limit: int = 2000) -> Saved:
        plans = job.plans(limit)
        saved = cls(empty_files(folder, plans[0]), plans[0])

        def work(rank: int, wire: FakeWire) -> Fragments:
            def part_of(tensor: int) -> TensorBytes:
                return TensorBytes(placed(job.part(plans[rank].tensors[tensor], rank), in_place))

            return write_all(saved.paths, plans[rank], part_of, wire)

        for actual in together(len(plans), work):
            for tensor, fragments in actual.items():
                saved.fragments[saved.plan.tensors[tensor]] += fragments
        return saved

    def extents(self) -> dict[Key, list[FileExtent]]:
        """Where each tensor lies."""
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


def assert_hashed(fragments: Sequence[blocks.Fragment], tensor: torch.Tensor) -> None:
    """The fragments of all ranks are the CRCs of every block."""
    raw = tensor_bytes(tensor)
    crcs = [blocks.crc64(raw[start : start + blocks.BLOCK_BYTES]) for start in range(0, len(raw), blocks.BLOCK_BYTES)]
    assert blocks.assemble_crcs(fragments, len(raw)) == crcs


@given(jobs(), st.booleans())
@settings(max_examples=60)
def test_what_ranks_save_together_is_every_tensor_whole_and_hashed(tmp_path_factory, job: Job, in_place: bool) -> None:
    saved = Saved.of(tmp_path_factory.mktemp("save"), job, in_place)
    assert set(saved.plan.tensors) == job.tensors.keys()
    for key, tensor in job.tensors.items():
        assert saved.bytes_of(key) == tensor_bytes(tensor)
        assert_hashed(saved.fragments[key], tensor)


@given(jobs())
@settings(max_examples=20)
def test_what_ranks_save_together_is_read_by_the_safetensors_library(tmp_path_factory, job: Job) -> None:
    saved = Saved.of(tmp_path_factory.mktemp("save"), job)
    keys = iter(saved.plan.tensors)
    loaded: dict[Key, torch.Tensor] = {}
    for path, file in zip(saved.paths, saved.plan.files, strict=True):
        own = list(itertools.islice(keys, len(file.entries)))
        crcs = [blocks.assemble_crcs(saved.fragments[key], file.entries[key[1]].nbytes) for key in own]
        path.write_bytes(file.build_header(itertools.chain(*crcs)) + path.read_bytes()[file.data_start :])
        actual = load_file(path)
        loaded |= {key: actual[key[1]] for key in own}
        assert len(actual) == len(own)
    assert loaded.keys() == job.tensors.keys()
    for key, tensor in job.tensors.items():
        assert loaded[key].dtype == tensor.dtype
        assert loaded[key].shape == tensor.shape
        assert tensor_bytes(loaded[key]) == tensor_bytes(tensor)


class Stored:
    """A checkpoint of any format, as far as reading asks: which ranges of which files hold a tensor."""

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
class Loading:
    """What the ranks of a job read of a checkpoint: targets in their memory, and plans to fill them."""

    stored: Stored
    job: Job
    exchange: bool
    in_place: bool = True
    targets: list[dict[Key, torch.Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        blank = {key: random_tensor(tensor.shape, tensor.dtype, seed=99) for key, tensor in self.job.tensors.items()}
        self.targets = [
            {
                key: placed(self.job.part(key, rank, blank[key]), self.in_place)
                for key in self.job.tensors
                if self.job.holds(key, rank)
            }
            for rank in self.job.ranks
        ]

    def plan(self, rank: int) -> tuple[load_plan.LoadPlan, list[Path]]:
        """As ``reading.py`` makes it: files have the numbers that it gives them."""
        numbers = {key: number for number, key in enumerate(self.stored.numbered)}
        held = {numbers[tensor.group, tensor.name]: tensor for tensor in self.job.membership().iter_tensors()}
        files = read_plan._FileIndex(self.stored, self.stored.numbered, held)
        plan = load_plan.plan_load(held, rank, files.locate_tensor, exchange=self.exchange)
        return plan, list(files.numbers)

    def run(self, rank: int, wire: FakeWire) -> Fragments:
        """A rank's share of a load, as ``reading.py`` does it."""
        plan, files = self.plan(rank)

        def sink_of(tensor: int) -> TensorBytes:
            key = self.stored.numbered[tensor]
            return TensorBytes(self.targets[rank][key], DTYPES[self.stored.infos[key].dtype])

        actual = read_shared.read_shared(files, plan.exchanged, sink_of, wire) if self.exchange else {}
        assert self.exchange or not plan.exchanged
        actual |= read_shared.read_stripes(files, plan.local_stripes, rank, sink_of)
        actual |= read.read_host_shared(files, plan.host_shared, rank, sink_of)
        return actual | read.read_file_ranges(files, plan.file_ranges, sink_of)

    def run_all(self) -> dict[Key, list]:
        """What all ranks hashed of each tensor."""
        result: dict[Key, list] = defaultdict(list)
        for item in together(len(self.targets), self.run):
            for tensor, fragments in item.items():
                result[self.stored.numbered[tensor]] += fragments
        return result

    def assert_filled(self, rank: int) -> None:
        """Its targets are what torch's chunking gives the rank of every tensor."""
        for key, target in self.targets[rank].items():
            assert tensor_bytes(target) == tensor_bytes(self.job.part(key, rank)), key


@pytest.mark.parametrize(
    ("layout", "alone"),
    [
        (None, False),
        (PlacementLayout(make_mesh(4), (Sharded(0),)), True),
        (PlacementLayout(make_mesh(4), (Replicated(),)), False),
    ],
)
def test_what_other_ranks_read_too_is_told_from_what_one_reads_alone(
    tmp_path: Path, layout: PlacementLayout | None, alone: bool
) -> None:
    """The first stays in the page cache, the other need not go there."""
    job = make_job(random_tensor((16, 8), torch.float32), 4, layout)
    loading = Loading(strew(tmp_path, (job, {("model", "w"): [0, 512]}, [0])), job, exchange=False)
    plans = [loading.plan(rank)[0] for rank in range(4)]
    assert all(bool(plan.file_ranges) == alone and bool(plan.host_shared) != alone for plan in plans)


def test_a_stripe_lies_in_memory_as_far_from_a_page_as_in_its_file(tmp_path: Path) -> None:
    """Else it could not be written past the page cache."""
    result = []

    def seen(_: DirectWriter, offset: int, data: memoryview) -> None:
        result.append((np.frombuffer(data, np.uint8).ctypes.data % SECTOR_BYTES, offset % SECTOR_BYTES))

    job = make_job(random_tensor((160, 8), torch.float32), 4, COLUMNS)
    with mock.patch.object(DirectWriter, "write", seen):
        Saved.of(tmp_path, job, limit=2**40)
    assert sorted(offset for _, offset in result) == sorted(64 * number % SECTOR_BYTES for number in range(80))
    assert all(address == offset for address, offset in result)


#: Ranges of files, as path, start and stop.
Ranges = list[tuple[Path, int, int]]


@contextmanager
def counted_reads() -> Iterator[Ranges]:
    """All that any rank reads."""
    result: Ranges = []
    whole = BufferedReader._read_buffered

    def counted(reader: BufferedReader, offset: int, into: memoryview) -> None:
        result.append((reader._path, offset, offset + len(into)))
        whole(reader, offset, into)

    with mock.patch.object(BufferedReader, "_read_buffered", counted):
        yield result


def each_byte(ranges: Ranges) -> list[tuple[Path, int]]:
    return sorted((path, byte) for path, start, stop in ranges for byte in range(start, stop))


def wanted(stored: Stored, job: Job) -> Ranges:
    """Where every tensor of a job lies."""
    extents = [item for key, tensor in job.tensors.items() for item in stored.find_extents(*key, 0, tensor.nbytes)]
    return [(file, offset, offset + stop - start) for file, offset, start, stop in extents]


@st.composite
def resaved(draw: st.DrawFn) -> tuple[Job, Job]:
    """Two jobs over the same tensors: how they are saved, and how some of them are loaded."""
    chosen = draw(named_tensors())
    kept = draw(st.lists(st.sampled_from(sorted(chosen)), min_size=1, unique=True))
    return draw(jobs(chosen)), draw(jobs({key: chosen[key] for key in kept}))


@given(resaved(), st.booleans(), st.booleans())
@settings(max_examples=80)
def test_what_is_saved_in_any_layout_is_loaded_in_any_other(
    tmp_path_factory, case: tuple[Job, Job], exchange: bool, in_place: bool
) -> None:
    before, after = case
    saved = Saved.of(tmp_path_factory.mktemp("save"), before, limit=200)
    loading = Loading(Stored(saved.extents(), before.tensors), after, exchange, in_place)
    actual = loading.run_all()
    for rank in after.ranks:
        loading.assert_filled(rank)
    for key, tensor in after.tensors.items() if exchange else ():
        assert_hashed(actual[key], tensor)


@st.composite
def strewn(draw: st.DrawFn) -> tuple[Job, dict[Key, list[int]], list[int]]:
    """A job, where each of its tensors is cut, and the file that each piece of them is in."""
    job = draw(jobs(draw(named_tensors())))
    cuts = {}
    for key, tensor in job.tensors.items():
        inside = draw(st.lists(st.integers(0, tensor.numel()), max_size=3))
        cuts[key] = [cut * tensor.element_size() for cut in sorted({0, *inside, tensor.numel()})]
    pieces = sum(len(edges) - 1 for edges in cuts.values())
    return job, cuts, draw(st.lists(st.integers(0, 3), min_size=pieces, max_size=pieces))


def strew(folder: Path, case: tuple[Job, dict[Key, list[int]], list[int]]) -> Stored:
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
    return Stored(extents, job.tensors)


@given(strewn(), st.booleans())
@settings(max_examples=80)
def test_with_exchange_each_byte_is_read_once_by_all_ranks_together(tmp_path_factory, case, in_place: bool) -> None:
    stored = strew(tmp_path_factory.mktemp("load"), case)
    loading = Loading(stored, case[0], exchange=True, in_place=in_place)
    with counted_reads() as reads:
        actual = loading.run_all()
    assert each_byte(reads) == each_byte(wanted(stored, case[0]))
    for rank in loading.job.ranks:
        loading.assert_filled(rank)
    for key, tensor in loading.job.tensors.items():
        assert_hashed(actual[key], tensor)


@given(strewn(), st.booleans())
@settings(max_examples=60)
def test_without_exchange_each_rank_reads_for_itself(tmp_path_factory, case, in_place: bool) -> None:
    """One after another, and nobody sends anything."""
    loading = Loading(strew(tmp_path_factory.mktemp("load"), case), case[0], exchange=False, in_place=in_place)
    for rank in loading.job.ranks:
        loading.run(rank, FakeWire(rank, mock.Mock(spec=())))
        loading.assert_filled(rank)


def test_without_exchange_a_rank_reads_no_more_than_the_stripes_that_it_has_part_in(tmp_path: Path) -> None:
    job = make_job(random_tensor((16, 8), torch.float32), 4, PlacementLayout(make_mesh(2, 2), (Sharded(0), Sharded(1))))
    stored = strew(tmp_path, (job, {("model", "w"): [0, 512]}, [0]))
    with counted_reads() as reads:
        Loading(stored, job, exchange=False).run(2, FakeWire(2, mock.Mock(spec=())))
    assert [byte for _, byte in each_byte(reads)] == list(range(256, 512))


def test_elements_are_cast_on_their_way_in(tmp_path: Path) -> None:
    tensor = torch.arange(64.0).view(8, 8)
    layout = PlacementLayout(make_mesh(2, 2), (Replicated(), Sharded(1)))
    stored = strew(tmp_path, (make_job(tensor, 4, layout), {("model", "w"): [0, 256]}, [0]))
    for exchange in (True, False):
        loading = Loading(stored, make_job(tensor, 4, layout), exchange)
        for targets in loading.targets:
            targets["model", "w"] = torch.zeros(8, 4, dtype=torch.bfloat16)
        loading.run_all()
        for rank, targets in enumerate(loading.targets):
            expected = tensor[:, 4 * (rank % 2) : 4 * (rank % 2) + 4].bfloat16()
            assert torch.equal(targets["model", "w"], expected)


def test_ranks_that_meet_files_in_another_order_still_agree_on_who_reads_what(tmp_path: Path) -> None:
    """The second rank has no part in the first tensor, whose file the first rank therefore meets first."""
    job = Job([0, 1])
    for name, ranks in (("a", [0]), ("b", [0, 1]), ("c", [0, 1])):
        job.tensors["model", name] = random_tensor((64,), torch.uint8, seed=ord(name))
        job.held["model", name] = dict.fromkeys(ranks)
    stored = strew(tmp_path, (job, {key: [0, 64] for key in job.tensors}, [1, 0, 1]))
    loading = Loading(stored, job, exchange=True)
    with counted_reads() as reads:
        loading.run_all()
    assert each_byte(reads) == each_byte(wanted(stored, job))
    for rank in job.ranks:
        loading.assert_filled(rank)


@pytest.mark.parametrize("before", range(1, 8))
def test_what_ranks_share_is_not_cut_inside_an_element_wherever_it_lies_in_its_file(
    tmp_path: Path, before: int
) -> None:
    """Files of other systems need not be aligned to the tensors in them."""
    job = Job([0, 1, 2])
    for name, tensor in (("a", random_tensor((before,), torch.uint8)), ("b", random_tensor((50,), torch.float64))):
        job.tensors["model", name] = tensor
        job.held["model", name] = dict.fromkeys(job.ranks)
    stored = strew(tmp_path, (job, {("model", "a"): [0, before], ("model", "b"): [0, 400]}, [0, 0]))
    loading = Loading(stored, job, exchange=True, in_place=False)
    loading.run_all()
    for rank in job.ranks:
        loading.assert_filled(rank)


@pytest.mark.parametrize("exchange", [True, False])
def test_a_tensor_of_nothing_is_loaded_on_several_ranks(tmp_path: Path, exchange: bool) -> None:
    job = make_job(torch.zeros(0, 3), 2)
    loading = Loading(strew(tmp_path, (job, {("model", "w"): [0]}, [])), job, exchange)
    assert loading.run_all() == {}


def test_more_stripes_than_can_be_in_flight_are_saved_and_loaded(tmp_path: Path) -> None:
    """Each rank owns a hundred stripes, and gives to three hundred."""
    job = make_job(
        random_tensor((1600, 16), torch.float32),
        4,
        PlacementLayout(MeshShape((2, 2), (3, 0, 2, 1)), (Sharded(1), Sharded(1))),
    )
    saved = Saved.of(tmp_path, job, limit=2**40)
    assert saved.bytes_of(("model", "w")) == tensor_bytes(job.tensors["model", "w"])
    loading = Loading(Stored(saved.extents(), job.tensors), job, exchange=True)
    with counted_reads() as reads:
        loading.run_all()
    for rank in job.ranks:
        loading.assert_filled(rank)
    assert len(reads) == 1600


BROKEN = "broken"


@pytest.fixture
def one_broken_rank() -> Iterator[None]:
    """Files that a rank sees under a certain folder can be neither written nor read."""

    def failing(whole: Callable[..., None], error: Exception) -> Callable[..., None]:
        def work(bulk: DirectWriter | BufferedReader, offset: int, data: memoryview) -> None:
            if BROKEN in bulk._path.parts:
                raise error
            whole(bulk, offset, data)

        return work

    with (
        mock.patch.object(DirectWriter, "write", failing(DirectWriter.write, StorageError(28, "no space left"))),
        mock.patch.object(
            BufferedReader, "read", failing(BufferedReader.read, CorruptCheckpointError("it was cut short"))
        ),
    ):
        yield


def seen_by(rank: int, broken: int, paths: Sequence[Path]) -> list[Path]:
    return [path.parent / BROKEN / path.name for path in paths] if rank == broken else list(paths)


def break_for_one(folder: Path) -> None:
    (folder / BROKEN).symlink_to(folder)


@pytest.mark.parametrize("broken", range(4))
def test_a_rank_that_cannot_write_still_passes_on_what_others_write(
    tmp_path: Path, one_broken_rank: None, broken: int
) -> None:
    job = make_job(random_tensor((160, 8), torch.float32), 4, COLUMNS)
    plans = job.plans(2**40)
    paths = empty_files(tmp_path, plans[0])
    break_for_one(tmp_path)

    def work(rank: int, wire: FakeWire) -> Fragments:
        part = TensorBytes(job.part(("model", "w"), rank))
        return write_stripes.write_stripes(
            seen_by(rank, broken, paths),
            plans[rank].stripe_tasks,
            lambda _: part,
            without_cells(wire),
        )

    actual = outcomes(4, work)
    assert [type(outcome.error) for outcome in actual] == [
        StorageError if rank == broken else type(None) for rank in range(4)
    ]
    raw, expected = paths[0].read_bytes()[plans[0].files[0].data_start :], tensor_bytes(job.tensors["model", "w"])
    written = [fragment for outcome in actual if outcome.value for fragment in outcome.value[0]]
    assert sum(fragment.stop - fragment.start for fragment in written) == 3 * len(expected) // 4
    for start, stop, crc in written:
        assert raw[start:stop] == expected[start:stop]
        assert blocks.crc64(expected[start:stop]) == crc


@pytest.mark.parametrize("layout", [COLUMNS, None], ids=["stripes", "copies"])
@pytest.mark.parametrize("broken", range(4))
def test_a_rank_that_cannot_read_still_passes_on_something(
    tmp_path: Path, one_broken_rank: None, broken: int, layout: PlacementLayout | None
) -> None:
    job = make_job(random_tensor((160, 8), torch.float32), 4, layout)
    stored = strew(tmp_path, (job, {("model", "w"): [0, 5120]}, [0]))
    break_for_one(tmp_path)
    loading = Loading(stored, job, exchange=True)

    def work(rank: int, wire: FakeWire) -> Fragments:
        plan, files = loading.plan(rank)
        target = TensorBytes(loading.targets[rank]["model", "w"])
        return read_shared.read_shared(seen_by(rank, broken, files), plan.exchanged, lambda _: target, wire)

    actual = outcomes(4, work)
    assert [type(outcome.error) for outcome in actual] == [
        CorruptCheckpointError if rank == broken else type(None) for rank in range(4)
    ]
    raw = tensor_bytes(job.tensors["model", "w"])
    read_well = [fragment for outcome in actual if outcome.value for fragment in outcome.value[0]]
    assert all(blocks.crc64(raw[start:stop]) == crc for start, stop, crc in read_well)
    assert 0 < sum(fragment.stop - fragment.start for fragment in read_well) < len(raw)


class AbandonedWire(FakeWire):
    """A wire that hears, after a while, that another rank has failed."""

    heard = 5

    def wait(self, works: Sequence[Transfer]) -> None:
        self.heard -= 1
        if not self.heard:
            raise PeerFailedError("another rank failed")
        super().wait(works)


def test_a_rank_whose_wire_breaks_raises_and_leaves_no_thread_behind(tmp_path: Path) -> None:
    job = make_job(random_tensor((160, 8), torch.float32), 4, COLUMNS)
    plans = job.plans(2**40)
    paths = empty_files(tmp_path, plans[0])
    stored = strew(tmp_path, (job, {("model", "w"): [0, 5120]}, [0]))
    loading = Loading(stored, job, exchange=True)

    def save(rank: int, wire: FakeWire) -> None:
        part = TensorBytes(job.part(("model", "w"), rank))
        write_stripes.write_stripes(
            paths,
            plans[rank].stripe_tasks,
            lambda _: part,
            without_cells(AbandonedWire(rank, wire._post)),
        )

    def load(rank: int, wire: FakeWire) -> None:
        loading.run(rank, AbandonedWire(rank, wire._post))

    for work in (save, load):
        assert {type(outcome.error) for outcome in outcomes(4, work)} == {PeerFailedError}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("holdfast")]
