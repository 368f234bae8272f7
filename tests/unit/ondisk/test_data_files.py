"""Tests sizes, order, files and index of tensors. The safetensors library opens the results."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from rankless.errors import InvalidArgumentError, RanklessError, UnsupportedTensorError
from rankless.ondisk import block_crcs, header
from rankless.ondisk import data_files as layout
from rankless.ondisk.block_crcs import BLOCK_BYTES
from rankless.ondisk.data_files import (
    CRC_KEY,
    TIED_KEY,
    DataFile,
    TensorInfo,
    build_index,
    index_path,
    intern_info,
    pack_files,
    parse_size,
    split_by_size,
)
from rankless.ondisk.dtypes import WIDTHS
from tests.helpers.cost import limit_time

names = st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__")
infos = st.builds(TensorInfo, st.sampled_from(sorted(WIDTHS)), st.lists(st.integers(0, 9), max_size=3).map(tuple))
groups = st.dictionaries(names, infos, max_size=12)
limits = st.integers(1, 4000)


def crcs_of(file: DataFile) -> list[int]:
    return list(range(sum(block_crcs.count_blocks(entry.nbytes) for entry in file.entries.values())))


def contents(file: DataFile) -> bytes:
    return file.build_header(crcs_of(file)) + bytes(file.size - file.data_start)


@given(groups, limits)
def test_every_tensor_lies_whole_in_one_file(tensors: dict[str, TensorInfo], limit: int) -> None:
    files = pack_files("model", tensors, {}, limit)
    assert [name for file in files for name in file.entries] == sorted(
        tensors, key=lambda name: (-WIDTHS[tensors[name].dtype], name)
    )
    for file in files:
        for name, entry in file.entries.items():
            assert (entry.dtype, entry.shape, entry.nbytes) == (
                tensors[name].dtype,
                tensors[name].shape,
                tensors[name].nbytes,
            )


@given(groups, limits)
def test_a_file_has_no_holes_and_every_tensor_is_aligned_to_its_dtype(tensors: dict, limit: int) -> None:
    for file in pack_files("model", tensors, {}, limit):
        reached = 0
        for entry in file.entries.values():
            start, stop = entry.data_offsets
            assert start == reached
            assert (file.data_start + start) % WIDTHS[entry.dtype] == 0
            reached = stop
        assert file.data_start % 4096 == 0
        assert file.size == file.data_start + reached


@given(groups, limits)
def test_a_file_passes_the_limit_only_for_one_tensor_that_is_larger(tensors: dict, limit: int) -> None:
    files = pack_files("model", tensors, {}, limit)
    sizes = [[entry.nbytes for entry in file.entries.values()] for file in files]
    assert all(sum(own) <= limit or len([nbytes for nbytes in own if nbytes]) == 1 for own in sizes)
    assert all(sum(own) + following[0] > limit for own, following in pairwise(sizes))


@given(st.dictionaries(st.integers(), st.integers(0, 9)), st.integers(1, 12))
def test_shelves_keep_the_order_and_pass_the_limit_only_for_one_item(sizes: dict[int, int], limit: int) -> None:
    actual = list(split_by_size(sizes, limit))
    assert [item for shelf in actual for item in shelf] == list(sizes)
    assert actual
    own = [[sizes[item] for item in shelf] for shelf in actual]
    assert all(sum(shelf) <= limit or len([size for size in shelf if size]) == 1 for shelf in own)
    assert all(sum(shelf) + following[0] > limit for shelf, following in pairwise(own))


@given(groups, limits)
def test_the_safetensors_library_opens_what_is_laid_out(tensors: dict, limit: int) -> None:
    result: dict[str, tuple[Any, ...]] = {}
    for file in pack_files("model", tensors, {}, limit):
        for name, tensor in safetensors.deserialize(contents(file)):
            result[name] = (tensor["dtype"], tuple(tensor["shape"]), len(tensor["data"]))
    assert result == {name: (info.dtype, info.shape, info.nbytes) for name, info in tensors.items()}


@given(groups, st.randoms(use_true_random=False))
def test_the_order_in_which_tensors_come_changes_no_byte(tensors: dict, random) -> None:
    shuffled = list(tensors.items())
    random.shuffle(shuffled)
    tied = {"b": min(tensors), "a": min(tensors)} if tensors else {}
    backwards = dict(reversed(tied.items()))
    assert [contents(file) for file in pack_files("model", tensors, tied, 500)] == [
        contents(file) for file in pack_files("model", dict(shuffled), backwards, 500)
    ]


@given(st.lists(st.integers(0, 2**64 - 1), min_size=5, max_size=5))
def test_the_header_is_as_long_whatever_the_crcs(crcs: list[int]) -> None:
    tensors = {
        "a": TensorInfo("F32", (2 * BLOCK_BYTES // 4 + 1,)),
        "b": TensorInfo("U8", (0,)),
        "c": TensorInfo("U8", (9,)),
    }
    (file,) = pack_files("model", {**tensors, "d": TensorInfo("BF16", ())}, {}, 2**40)
    head = file.build_header(crcs)
    assert len(head) == file.data_start
    assert block_crcs.from_hex(header.decode_header(head, file.size, "f").metadata[CRC_KEY]) == crcs


def test_the_header_says_what_is_tied_and_that_it_is_torch() -> None:
    tensors = {"embed": TensorInfo("F32", (2,)), "other": TensorInfo("F32", (2,))}
    first, second = pack_files("model", tensors, {"head": "embed", "alias": "embed"}, 8)
    actual = header.decode_header(first.build_header([1]), first.size, "f").metadata
    assert actual["format"] == "pt"
    assert json.loads(actual[TIED_KEY]) == {"alias": "embed", "head": "embed"}
    assert TIED_KEY not in header.decode_header(second.build_header([1]), second.size, "f").metadata


@pytest.mark.parametrize(
    ("group", "one", "first_of_two"),
    [
        ("model", "model/model.safetensors", "model/model-00001-of-00002.safetensors"),
        ("optimizer", "optimizer/optimizer.safetensors", "optimizer/optimizer-00001-of-00002.safetensors"),
        ("model/gen", "model/gen/model.safetensors", "model/gen/model-00001-of-00002.safetensors"),
        ("state", "state.safetensors", "state-00001-of-00002.safetensors"),
        ("ranks", "ranks.safetensors", "ranks-00001-of-00002.safetensors"),
    ],
)
def test_files_are_named_as_hugging_face_names_them(group: str, one: str, first_of_two: str) -> None:
    tensors = {"a": TensorInfo("U8", (4,)), "b": TensorInfo("U8", (4,))}
    assert [file.path for file in pack_files(group, tensors, {}, 8)] == [one]
    files = pack_files(group, tensors, {}, 4)
    assert files[0].path == first_of_two
    assert index_path(files) == f"{one}.index.json"


def test_no_tensors_have_no_file() -> None:
    assert pack_files("model", {}, {}, 100) == []


def test_the_index_names_the_file_of_every_tensor_and_their_bytes() -> None:
    tensors = {"b": TensorInfo("F32", (3,)), "a": TensorInfo("F32", (2,)), "c": TensorInfo("U8", (1,))}
    table = json.loads(build_index(pack_files("model", tensors, {}, 20)))
    assert table == {
        "metadata": {"total_size": 21},
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00001-of-00002.safetensors",
            "c": "model-00002-of-00002.safetensors",
        },
    }


@pytest.mark.parametrize("name", ["__metadata__", "half a character \ud800"])
def test_a_name_that_safetensors_cannot_hold_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedTensorError, match="name"):
        pack_files("model", {name: TensorInfo("F32", (2,))}, {}, 100)


def test_a_tensor_of_more_dimensions_than_are_read_back_is_refused() -> None:
    pack_files("model", {"w": TensorInfo("F32", (1,) * 64)}, {}, 100)
    with pytest.raises(UnsupportedTensorError, match=r"'w'.*65 dimensions"):
        pack_files("model", {"w": TensorInfo("F32", (1,) * 65)}, {}, 100)


@pytest.mark.parametrize("letter", ["x", "\u4e16", "\U0001f600", "\n", "\x01", '"'])
def test_a_file_ends_before_its_header_is_longer_than_the_format_allows(letter: str) -> None:
    """At a budget and a limit that are both ten thousand times smaller."""
    tensors = {f"{i}" + letter * 50: TensorInfo("U8", (1,)) for i in range(500)}
    with mock.patch.object(layout, "_HEADER_BUDGET", layout._HEADER_BUDGET // 10_000):
        files = pack_files("model", tensors, {}, 2**60)
    for file in files:
        assert len(file.build_header(crcs_of(file)).rstrip()) <= header.HEADER_LIMIT // 10_000
    assert sum(len(file.entries) for file in files) == 500


def test_the_crcs_of_one_file_do_not_outgrow_its_header() -> None:
    files = pack_files("model", {f"w{i}": TensorInfo("U8", (2**45,)) for i in range(4)}, {}, 2**60)
    assert all(block_crcs.DIGITS * len(crcs_of(file)) <= header.HEADER_LIMIT for file in files)


def test_twenty_thousand_tied_names_are_laid_out_in_no_time() -> None:
    tensors = {f"w{i}": TensorInfo("U8", (1,)) for i in range(20_000)}
    with limit_time():
        (file,) = pack_files("model", tensors, {f"t{i}": f"w{i}" for i in range(20_000)}, 2**40)
    assert len(file.tied) == 20_000


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (5_000_000_000, 5 * 10**9),
        ("5GB", 5 * 10**9),
        ("5 gb", 5 * 10**9),
        ("1.5KB", 1500),
        ("512MiB", 512 * 2**20),
        ("2KIB", 2048),
        ("1TB", 10**12),
        ("1TiB", 2**40),
        (" 700 ", 700),
        ("700B", 700),
        ("1e3", 1000),
    ],
)
def test_sizes_are_read_as_transformers_reads_them(text: int | str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GB",
        "five",
        "5XB",
        "5 G B",
        "5GBB",
        "-5GB",
        "0",
        "0.1B",
        "inf",
        "1e400GB",
        "nanGB",
        0,
        -1,
        2.5,
        None,
        b"5GB",
    ],
)
def test_a_size_that_is_no_size_is_named(text: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="size"):
        parse_size(text)


@given(st.text(max_size=10))
def test_text_is_a_positive_size_or_an_error_of_ours(text: str) -> None:
    try:
        assert parse_size(text) > 0
    except RanklessError as error:
        assert "size" in str(error)


def test_the_size_of_a_tensor_is_that_of_its_elements() -> None:
    assert TensorInfo("C64", (3, 5)).nbytes == 8 * math.prod((3, 5))
    assert TensorInfo("BF16", ()).nbytes == 2
    assert TensorInfo("F64", (7, 0)).nbytes == 0


class CountingShape(tuple[int, ...]):
    """A shape with the hash of all others. It counts comparisons."""

    __slots__ = ()
    comparisons = 0

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        CountingShape.comparisons += 1
        return tuple.__eq__(self, other)


def test_shapes_of_one_hash_are_not_all_compared_with_one_another() -> None:
    intern_info.cache_clear()
    count = 5000
    for size in range(count):
        assert intern_info("F32", CountingShape((0, size))).shape == (0, size)
    intern_info.cache_clear()
    assert CountingShape.comparisons < 500 * count
