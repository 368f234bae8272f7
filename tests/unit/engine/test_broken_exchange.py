"""Tests exchanges in which a rank cannot write or read, or another rank has failed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch

from rankless.engine.io import read_shared, write_stripes
from rankless.engine.io.requests import Fragments
from rankless.engine.io.tensor_bytes import TensorBytes
from rankless.engine.plan.layout_types import PlacementLayout
from rankless.errors import CorruptCheckpointError, PeerFailedError, StorageError
from rankless.ondisk import block_crcs
from rankless.storage.direct_io import BufferedReader, DirectWriter
from tests.helpers.simulated_io import (
    COLUMNS,
    SimulatedLoad,
    create_files,
    small_sizes,
    store_in_pieces,
    without_cells,
)
from tests.helpers.simulated_jobs import make_job
from tests.helpers.tensors import random_tensor, tensor_bytes
from tests.helpers.thread_ranks import ThreadP2P, Transfer, run_ranks


@pytest.fixture(autouse=True)
def _small_sizes() -> Iterator[None]:
    with small_sizes():
        yield


BROKEN = "broken"


@pytest.fixture
def one_broken_rank() -> Iterator[None]:
    """Let all writes and reads of files in the folder ``BROKEN`` fail."""

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


def paths_seen_by(rank: int, broken: int, paths: Sequence[Path]) -> list[Path]:
    return [path.parent / BROKEN / path.name for path in paths] if rank == broken else list(paths)


def create_broken_folder(folder: Path) -> None:
    (folder / BROKEN).symlink_to(folder)


@pytest.mark.parametrize("broken", range(4))
def test_a_rank_that_cannot_write_still_sends_what_others_write(
    tmp_path: Path, one_broken_rank: None, broken: int
) -> None:
    job = make_job(random_tensor((160, 8), torch.float32), 4, COLUMNS)
    plans = job.plans(2**40)
    paths = create_files(tmp_path, plans[0])
    create_broken_folder(tmp_path)

    def work(rank: int, p2p: ThreadP2P) -> Fragments:
        part = TensorBytes(job.part(("model", "w"), rank))
        return write_stripes.write_stripes(
            paths_seen_by(rank, broken, paths),
            plans[rank].stripe_tasks,
            lambda _: part,
            without_cells(p2p),
        )

    actual = run_ranks(4, work)
    assert [type(outcome.error) for outcome in actual] == [
        StorageError if rank == broken else type(None) for rank in range(4)
    ]
    raw, expected = paths[0].read_bytes()[plans[0].files[0].data_start :], tensor_bytes(job.tensors["model", "w"])
    written = [fragment for outcome in actual if outcome.value for fragment in outcome.value[0]]
    assert sum(fragment.stop - fragment.start for fragment in written) == 3 * len(expected) // 4
    for start, stop, crc in written:
        assert raw[start:stop] == expected[start:stop]
        assert block_crcs.crc64(expected[start:stop]) == crc


@pytest.mark.parametrize("layout", [COLUMNS, None], ids=["stripes", "copies"])
@pytest.mark.parametrize("broken", range(4))
def test_a_rank_that_cannot_read_still_sends_something(
    tmp_path: Path, one_broken_rank: None, broken: int, layout: PlacementLayout | None
) -> None:
    job = make_job(random_tensor((160, 8), torch.float32), 4, layout)
    stored = store_in_pieces(tmp_path, (job, {("model", "w"): [0, 5120]}, [0]))
    create_broken_folder(tmp_path)
    loading = SimulatedLoad(stored, job, exchange=True)

    def work(rank: int, p2p: ThreadP2P) -> Fragments:
        plan, files = loading.plan(rank)
        target = TensorBytes(loading.targets[rank]["model", "w"])
        return read_shared.read_shared(paths_seen_by(rank, broken, files), plan.exchanged, lambda _: target, p2p)

    actual = run_ranks(4, work)
    assert [type(outcome.error) for outcome in actual] == [
        CorruptCheckpointError if rank == broken else type(None) for rank in range(4)
    ]
    raw = tensor_bytes(job.tensors["model", "w"])
    read_well = [fragment for outcome in actual if outcome.value for fragment in outcome.value[0]]
    assert all(block_crcs.crc64(raw[start:stop]) == crc for start, stop, crc in read_well)
    assert 0 < sum(fragment.stop - fragment.start for fragment in read_well) < len(raw)


class FailingP2P(ThreadP2P):
    """An exchange that learns, after some calls, that another rank has failed."""

    calls_left = 5

    def wait(self, works: Sequence[Transfer]) -> None:
        self.calls_left -= 1
        if not self.calls_left:
            raise PeerFailedError("another rank failed")
        super().wait(works)


def test_a_rank_whose_exchange_fails_raises_and_leaves_no_thread(tmp_path: Path) -> None:
    job = make_job(random_tensor((160, 8), torch.float32), 4, COLUMNS)
    plans = job.plans(2**40)
    paths = create_files(tmp_path, plans[0])
    stored = store_in_pieces(tmp_path, (job, {("model", "w"): [0, 5120]}, [0]))
    loading = SimulatedLoad(stored, job, exchange=True)

    def save(rank: int, p2p: ThreadP2P) -> None:
        part = TensorBytes(job.part(("model", "w"), rank))
        write_stripes.write_stripes(
            paths,
            plans[rank].stripe_tasks,
            lambda _: part,
            without_cells(FailingP2P(rank, p2p._network)),
        )

    def load(rank: int, p2p: ThreadP2P) -> None:
        loading.run(rank, FailingP2P(rank, p2p._network))

    for work in (save, load):
        assert {type(outcome.error) for outcome in run_ranks(4, work)} == {PeerFailedError}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rankless")]
