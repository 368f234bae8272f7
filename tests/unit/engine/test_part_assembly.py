"""The bytes of a part that is uploaded: in order, hashed, and not copied if they are large."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from awscrt.checksums import crc64nvme
from hypothesis import given
from hypothesis import strategies as st

from rankless.engine.io import part_assembly
from rankless.engine.io.cell_exchange import ReceivedRun
from rankless.engine.io.part_assembly import PartAssembly
from rankless.engine.io.tensor_bytes import TensorBytes
from rankless.engine.plan import file_ranges
from rankless.engine.plan.file_ranges import FileRange
from rankless.errors import StateError
from rankless.storage.body import Body

START = 1000


def join_pieces(body: Body) -> bytes:
    return b"".join(body.pieces)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 200), st.sampled_from(["tensor", "strided", "run"])), min_size=1),
    order=st.randoms(use_true_random=False),
    block=st.integers(8, 300),
)
def test_a_body_has_all_bytes_in_order_and_their_crc(sizes: list[tuple[int, str]], order: object, block: int) -> None:
    whole = np.random.default_rng(0).integers(0, 256, sum(size for size, _ in sizes), np.uint8)
    assembly = PartAssembly(START, np.empty(len(whole), np.uint8))
    steps, offset = [], 0
    for number, (size, kind) in enumerate(sizes):
        steps.append((number, offset, whole[offset : offset + size], kind))
        offset += size
    order.shuffle(steps)  # type: ignore[attr-defined]
    fragments = {}
    with mock.patch.object(part_assembly, "_MIN_IN_PLACE", 64), mock.patch.object(file_ranges, "BLOCK_BYTES", block):
        for number, at, data, kind in steps:
            if kind == "run":
                assembly.add_run(ReceivedRun(0, START + at, data.copy()))
                continue
            tensor = torch.from_numpy(data.copy())
            if kind == "strided":
                tensor = torch.stack([tensor, tensor], 1)[:, 0]
            file_range = FileRange(number, 7, 7 + len(data), 0, 0, START + at)
            fragments[number] = list(assembly.add_range(file_range, TensorBytes(tensor)))
    body = assembly.make_body()
    assert join_pieces(body) == whole.tobytes()
    assert body.crc64nvme == crc64nvme(whole.tobytes())
    assert body.nbytes == len(whole)
    for number, at, data, kind in steps:
        if kind == "run":
            continue
        position = 7
        for tensor_number, fragment in fragments[number]:
            assert (tensor_number, fragment.start) == (number, position)
            assert fragment.start // block == (fragment.stop - 1) // block
            assert fragment.crc == crc64nvme(whole[at + position - 7 : at + fragment.stop - 7].tobytes())
            position = fragment.stop
        assert position == 7 + len(data)


def test_large_tensors_are_sent_from_their_own_memory() -> None:
    tensor = torch.arange(50_000, dtype=torch.float32)
    assembly = PartAssembly(0, np.empty(200_012, np.uint8))
    list(assembly.add_range(FileRange(0, 0, 200_000, 0, 0, 12), TensorBytes(tensor)))
    list(assembly.add_range(FileRange(1, 0, 4, 0, 0, 8), TensorBytes(torch.tensor([1.0]))))
    with pytest.raises(StateError, match="not all bytes"):
        assembly.check_complete()
    assembly.add_known(0, b"a header")
    assembly.check_complete()
    pieces = assembly.make_body().pieces
    assert bytes(pieces[0][:8]) == b"a header"
    shared = [np.shares_memory(np.frombuffer(piece, np.uint8), tensor.numpy()) for piece in pieces]
    assert shared == [False, True]
