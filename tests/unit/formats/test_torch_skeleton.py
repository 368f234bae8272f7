"""The layout of a ``torch.save`` file that is not written has the bytes of the file that torch writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rankless.conversion.torch_skeleton import TorchSkeleton
from rankless.conversion.torch_target import PlannedTorchFile


@pytest.mark.parametrize("shapes", [[], [(3,)], [(0,), (1000, 7), ()], [(5,)] * 200])
def test_a_layout_has_the_bytes_of_the_file(tmp_path: Path, shapes: list[tuple[int, ...]]) -> None:
    with FakeTensorMode():
        planned = [torch.empty(shape) for shape in shapes]
    tree = {"planned": planned, "again": planned[:1], "small": [torch.arange(5), torch.ones(0)], "values": [1, "two"]}
    layout = PlannedTorchFile(tree).lay_out()
    tensors = [torch.randn(shape) for shape in shapes]
    data = bytearray(layout.size)
    for offset, piece in layout.known:
        data[offset : offset + len(piece)] = piece
    for fake, tensor in zip(planned, tensors, strict=True):
        if fake.nbytes:
            offset = layout.offsets[id(fake)]
            data[offset : offset + fake.nbytes] = tensor.numpy().tobytes()
    written = PlannedTorchFile(tree)
    written.create_file(tmp_path / "created.pt")
    assert written.read_offsets(tmp_path / "created.pt") == layout.offsets
    (tmp_path / "assembled.pt").write_bytes(data)
    loaded = torch.load(tmp_path / "assembled.pt")
    assert all(map(torch.equal, loaded["planned"], tensors))
    assert torch.equal(loaded["small"][0], torch.arange(5))
    assert loaded["values"] == tree["values"]
    covered = sum(len(piece) for _, piece in layout.known) + sum(fake.nbytes for fake in planned)
    assert covered == layout.size


def test_a_hole_is_zeros_and_bytes_are_read_across_it() -> None:
    skeleton = TorchSkeleton()
    skeleton.write(memoryview(b"ab"))
    skeleton.write(memoryview(b"c"))
    skeleton.seek(2, 1)
    skeleton.write(memoryview(b"de"))
    assert skeleton.size == 7
    for start in range(8):
        for stop in range(start, 8):
            data = bytearray(b"?" * (stop - start))
            skeleton.read(Path(), start, memoryview(data))
            assert bytes(data) == b"abc\0\0de"[start:stop]
    assert skeleton.fill({3: b"xy"}) == [(0, b"abc"), (3, b"xy"), (5, b"de")]
