"""Tests the bytes of a rank's shard, in any memory layout, against torch's own copies."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankless.engine.io.tensor_bytes import TensorBytes
from rankless.ondisk.dtypes import WIDTHS
from rankless.state.tensor_views import DTYPES
from tests.helpers.examples import examples
from tests.helpers.tensors import random_tensor, tensor_bytes

dtypes = st.sampled_from(list(DTYPES.values()))
shapes = st.lists(st.integers(0, 5), max_size=4)


def read(part: TensorBytes, start: int, stop: int) -> bytes:
    into = np.full(stop - start, 0xAA, np.uint8)
    part.copy_out(start, into)
    return into.tobytes()


def views(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors of 12 elements or so, seen in every way that is not a plain row of memory."""
    base = random_tensor((4, 6), dtype, seed=1)
    actual = {
        "plain": base[1:3].clone(),
        "inside of another": base[1:3],
        "transposed": base[:2].T,
        "strided": base[::2, ::2],
        "columns": base[:, 2:5],
        "permuted": random_tensor((2, 3, 2), dtype).permute(2, 0, 1),
        "channels last": random_tensor((2, 3, 2, 1), dtype).contiguous(memory_format=torch.channels_last),
        "scalar inside": base[2, 3],
        "empty inside": base[2:2, ::2],
    }
    if dtype.is_complex:
        actual["conjugate"] = base[1:3].conj()
        actual["conjugate transposed"] = base[:2].T.conj()
        actual["negative"] = base[:2].conj().imag
    return actual


KINDS = sorted(views(torch.complex64))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_way_to_lie_in_memory_is_read_as_a_contiguous_copy(dtype: torch.dtype) -> None:
    for kind, tensor in views(dtype).items():
        part = TensorBytes(tensor)
        assert read(part, 0, part.nbytes) == tensor_bytes(tensor), kind
        assert part.nbytes == tensor.numel() * tensor.dtype.itemsize


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_way_to_lie_in_memory_is_written_in_place(dtype: torch.dtype) -> None:
    for kind, tensor in views(dtype).items():
        wanted = random_tensor(tensor.shape, tensor.dtype, seed=2)
        storage = tensor.untyped_storage().data_ptr()
        TensorBytes(tensor).write(0, np.frombuffer(bytearray(tensor_bytes(wanted)), np.uint8))
        assert tensor_bytes(tensor) == tensor_bytes(wanted), kind
        assert tensor.untyped_storage().data_ptr() == storage


def test_what_lies_beside_a_view_is_left_alone() -> None:
    base = torch.zeros(4, 6)
    part = TensorBytes(base[1:3, 1:4])
    part.write(0, np.frombuffer(torch.ones(6).numpy(), np.uint8))
    assert base.sum() == 6
    assert base[1:3, 1:4].sum() == 6


@st.composite
def cut_views(draw: st.DrawFn) -> tuple[torch.Tensor, list[int]]:
    """A view that is permuted and strided, and places to cut its elements at."""
    dtype = draw(dtypes)
    shape = draw(shapes)
    tensor = random_tensor([2 * size for size in shape], dtype, seed=draw(st.integers(0, 99)))
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    tensor = tensor[
        tuple(slice(None, size // 2) if draw(st.booleans()) else slice(1, None, 2) for size in tensor.shape)
    ]
    if dtype.is_complex and draw(st.booleans()):
        tensor = tensor.conj()
    cuts = draw(st.lists(st.integers(0, tensor.numel()), max_size=5))
    return tensor, sorted({0, tensor.numel(), *cuts})


@given(cut_views())
@settings(max_examples=examples(200))
def test_a_view_is_read_in_any_pieces(case: tuple[torch.Tensor, list[int]]) -> None:
    tensor, cuts = case
    part, width = TensorBytes(tensor), tensor.dtype.itemsize
    pieces = [read(part, start * width, stop * width) for start, stop in itertools.pairwise(cuts)]
    assert b"".join(pieces) == tensor_bytes(tensor)


@given(cut_views())
@settings(max_examples=examples(200))
def test_a_view_is_written_in_any_pieces_in_any_order(case: tuple[torch.Tensor, list[int]]) -> None:
    tensor, cuts = case
    wanted = random_tensor(tensor.shape, tensor.dtype, seed=100)
    raw = np.frombuffer(bytearray(tensor_bytes(wanted)), np.uint8)
    part, width = TensorBytes(tensor), tensor.dtype.itemsize
    for start, stop in reversed(list(itertools.pairwise(cuts))):
        part.write(start * width, raw[start * width : stop * width])
    assert tensor_bytes(tensor) == tensor_bytes(wanted)


castable = [DTYPES[name] for name in WIDTHS if name != "F8_E8M0"]


@given(st.sampled_from(castable), st.sampled_from(castable), st.lists(st.integers(0, 12), max_size=3), st.booleans())
@settings(max_examples=examples(200))
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_elements_of_another_dtype_are_cast_on_their_way_in_as_torch_casts(
    saved: torch.dtype, here: torch.dtype, cuts: list[int], transposed: bool
) -> None:
    source = torch.arange(12).view(3, 4).to(saved)
    target = torch.zeros(4, 3, dtype=here).T if transposed else torch.zeros(3, 4, dtype=here)
    part = TensorBytes(target, saved)
    assert part.dtype == saved
    assert part.nbytes == 12 * saved.itemsize
    raw, width = np.frombuffer(bytearray(tensor_bytes(source)), np.uint8), saved.itemsize
    for start, stop in itertools.pairwise(sorted({0, 12, *cuts})):
        part.write(start * width, raw[start * width : stop * width])
    assert tensor_bytes(target) == tensor_bytes(torch.zeros(3, 4, dtype=here).copy_(source))


def test_a_part_that_is_cast_has_no_view_in_place() -> None:
    assert TensorBytes(torch.zeros(4), torch.bfloat16).view(0, 8) is None
    assert TensorBytes(torch.zeros(4), torch.float32).view(0, 16) is not None


def test_a_contiguous_part_is_its_own_memory() -> None:
    tensor = torch.zeros(3, 4)
    view = TensorBytes(tensor[1:]).view(4, 12)
    assert view is not None
    view[:] = 255
    assert tensor.view(torch.uint8).view(-1).nonzero().flatten().tolist() == list(range(20, 28))


@pytest.mark.parametrize("kind", ["transposed", "strided", "columns", "conjugate", "negative"])
def test_a_part_that_is_no_row_of_memory_has_no_view(kind: str) -> None:
    assert TensorBytes(views(torch.complex64)[kind]).view(0, 8) is None


@pytest.mark.parametrize("size", [6, 30_000])
@pytest.mark.parametrize("value", [torch.zeros, lambda *shape: torch.zeros(shape[::-1]).T], ids=["row", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_parameter_is_filled_without_autograd_noticing(
    size: int, value: Callable[..., torch.Tensor], dtype: torch.dtype
) -> None:
    parameter = torch.nn.Parameter(value(2, size // 2))
    TensorBytes(parameter, dtype).write(0, np.frombuffer(torch.ones(size, dtype=dtype).numpy(), np.uint8))
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert parameter.grad_fn is None
    assert parameter.sum() == size
    assert read(TensorBytes(parameter), 0, 4 * size) == torch.ones(size).numpy().tobytes()


@pytest.mark.parametrize("size", [16, 100_000])
def test_bytes_beyond_the_end_are_neither_read_nor_written(size: int) -> None:
    part = TensorBytes(torch.zeros(size + 1, dtype=torch.uint8)[:size])
    with pytest.raises(ValueError, match=r"shape|structure|broadcast"):
        read(part, 1, size + 1)
    with pytest.raises(ValueError, match=r"shape|structure|broadcast"):
        part.write(1, np.ones(size, np.uint8))


@pytest.mark.parametrize("size", [4, 100_000])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_bytes_stay_those_of_the_memory_that_the_tensor_had(size: int, requires_grad: bool) -> None:
    tensor = torch.ones(size, requires_grad=requires_grad)
    part = TensorBytes(tensor)
    tensor.data = torch.zeros(size)
    assert read(part, 0, 4 * size) == torch.ones(size).numpy().tobytes()


def test_nothing_is_read_of_nothing() -> None:
    for tensor in (torch.zeros(0), torch.zeros(3, 0).T, torch.zeros(4)[::2]):
        assert read(TensorBytes(tensor), 0, 0) == b""


def test_without_a_stream_to_wait_for_each_copy_blocks() -> None:
    """A copy from MPS that need not block returns before the bytes are there, and nothing could wait for it."""
    tensor, copy, blocking = torch.arange(12.0).reshape(3, 4).T, torch.Tensor.copy_, list[bool]()

    def record_copy(into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        blocking.append(not non_blocking)
        return copy(into, source)

    with mock.patch.object(torch.Tensor, "copy_", record_copy):
        data = np.frombuffer(read(TensorBytes(tensor), 0, 48), np.uint8)
        TensorBytes(tensor).write(0, data.copy())
    assert blocking
    assert all(blocking)
