"""Tests that files planned to the byte are equal to those that ``torch.save`` writes."""

import io
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankless.conversion.torch_names_hash import names_hash
from rankless.errors import UnsupportedValueError
from rankless.formats.torchfile.pickler import StorageRef, pickle_tree
from rankless.formats.torchfile.zip_frame import NAMES, ZipFrame
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.dtypes import TORCH_NAMES
from rankless.state.tensor_views import NAMES as DTYPES

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
TENSORS = st.builds(
    lambda shape, dtype: (
        torch.arange(7 * max(1, torch.Size(shape).numel()))[: torch.Size(shape).numel()]
        .to(dtype)
        .reshape(shape)
        .clone()
    ),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(
        [
            getattr(torch, name)
            for name in TORCH_NAMES.values()
            if not any(part in name for part in ("fnuz", "e8m0", "float4"))
        ]
    ),
)
TREES = st.recursive(
    PLAIN | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.integers(0, 300), inner, max_size=3)
    ),
    max_leaves=6,
)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def ours(tree: Any, root: str) -> bytes:
    tensors: list[torch.Tensor] = []

    def walk(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return StorageRef(TensorInfo(DTYPES[value.dtype], tuple(value.shape)), len(tensors) - 1)
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items()}
        return [walk(item) for item in value] if isinstance(value, list) else value

    tree = walk(tree)
    data = [raw(tensor) for tensor in tensors]
    frame = ZipFrame(root, pickle_tree(tree), [len(item) for item in data], names_hash(len(data)))
    file = bytearray(frame.size)
    for start, element in zip(frame.storage_offsets, data, strict=True):
        file[start : start + len(element)] = element
    for start, element in frame.non_tensor_bytes({number: zlib.crc32(part) for number, part in enumerate(data)}):
        file[start : start + len(element)] = element
    assert len(file) == frame.size
    return bytes(file)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TREES)
def test_a_file_is_what_torch_writes(tmp_path: Path, tree: Any) -> None:
    path = tmp_path / "some_name.pt"
    torch.save(tree, path)
    assert ours(tree, "some_name") == path.read_bytes()


def test_the_hash_of_names_is_what_this_torch_makes_of_them() -> None:
    def asked(number: int) -> str:
        file = io.BytesIO()
        torch.save([torch.zeros(1) for _ in range(number)], file)
        return torch._C.PyTorchFileReader(io.BytesIO(file.getvalue())).serialization_id()[:20]

    for number in (0, 1, 2, 5):
        assert f"{names_hash(number):020}" == asked(number)
    assert {0, 1} == set(NAMES)


def test_what_is_larger_than_4_gib_is_found_by_torch(tmp_path: Path) -> None:
    size = 2**32 + 5
    tree = StorageRef(TensorInfo("U8", (size,)), 0)
    frame = ZipFrame("big", pickle_tree([tree, "after"]), [size], names_hash(1))
    path = tmp_path / "big.pt"
    with path.open("wb") as file:
        file.truncate(frame.size)
        for start, data in frame.non_tensor_bytes({0: 0}):
            file.seek(start)
            file.write(data)
        file.seek(frame.storage_offsets[0] + size - 1)
        file.write(b"\7")
    tensor, after = torch.load(path, mmap=True, weights_only=True)
    assert tensor.shape == (size,)
    assert tensor[-1] == 7
    assert after == "after"


def test_what_is_no_plain_value_is_refused() -> None:
    with pytest.raises(UnsupportedValueError, match="not a plain value"):
        pickle_tree({"a": lambda: 0})
