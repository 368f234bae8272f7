"""Tests the header of data files against the safetensors library, which reads rankless's and the reverse."""

from __future__ import annotations

import json
import math

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from rankless.errors import CorruptCheckpointError, FormatError, RanklessError
from rankless.ondisk import header
from rankless.ondisk.dtypes import WIDTHS
from rankless.ondisk.header import HeaderEntry
from rankless.state.tensor_views import DTYPES
from tests.helpers.examples import examples

FILE = "some/model.safetensors"

#: As safetensors calls them where a file is taken apart.
names = st.text(max_size=12).filter(lambda name: name != "__metadata__")
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
tables = st.dictionaries(names, st.tuples(st.sampled_from(sorted(WIDTHS)), shapes), max_size=6)
texts = st.dictionaries(st.text(max_size=8), st.text(max_size=20), max_size=4)


def packed(table: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, HeaderEntry]:
    """Entries one after another, the widest dtypes first."""
    reached, entries = 0, {}
    for name, (dtype, shape) in sorted(table.items(), key=lambda item: -WIDTHS[item[1][0]]):
        nbytes = math.prod(shape) * WIDTHS[dtype]
        entries[name] = HeaderEntry(dtype, shape, (reached, reached + nbytes))
        reached += nbytes
    return entries


def with_data(head: bytes, entries: dict[str, HeaderEntry]) -> bytes:
    size = max((entry.data_offsets[1] for entry in entries.values()), default=0)
    return head + bytes(i % 2 for i in range(size))


def raw(text: str | bytes | dict, data: int = 0) -> bytes:
    """A file with a header of this JSON and some zeros as data."""
    if isinstance(text, dict):
        text = json.dumps(text)
    encoded = text.encode() if isinstance(text, str) else text
    return len(encoded).to_bytes(8, "little") + encoded + bytes(data)


def read(file: bytes) -> header.SafetensorsHeader:
    """Our reader on a whole file."""
    size = header.header_length(file[:8], len(file), FILE)
    return header.decode_header(file[:size], len(file), FILE)


def one(**changes: object) -> dict[str, object]:
    return {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24], **changes}}


@given(tables, texts)
def test_the_safetensors_library_reads_the_header(table: dict, metadata: dict[str, str]) -> None:
    entries = packed(table)
    file = with_data(header.encode_header(entries, metadata), entries)
    theirs = {
        name: (actual["dtype"], tuple(actual["shape"]), bytes(actual["data"]))
        for name, actual in safetensors.deserialize(file)
    }
    start = read(file).size
    ours = {
        name: (entry.dtype, entry.shape, file[start + entry.data_offsets[0] : start + entry.data_offsets[1]])
        for name, entry in entries.items()
    }
    assert theirs == ours


@given(tables, texts)
def test_what_is_written_comes_back(table: dict, metadata: dict[str, str]) -> None:
    entries = packed(table)
    head = header.encode_header(entries, metadata)
    actual = read(with_data(head, entries))
    assert actual == header.SafetensorsHeader(entries, metadata, len(head))
    assert list(actual.entries) == list(entries)


@given(tables, texts)
def test_data_starts_at_a_page_and_the_padding_is_spaces(table: dict, metadata: dict[str, str]) -> None:
    head = header.encode_header(packed(table), metadata)
    text = head[8:].rstrip(b" ")
    assert len(head) % 4096 == 0
    assert len(head) - 8 - len(text) < 4096
    assert int.from_bytes(head[:8], "little") == len(head) - 8
    assert json.loads(text)["__metadata__"] == metadata


@given(st.dictionaries(names, st.tuples(st.sampled_from(sorted(WIDTHS)), shapes), max_size=5), texts)
def test_files_of_the_safetensors_library_are_read(table: dict, metadata: dict[str, str]) -> None:
    tensors = {name: torch.zeros(shape, dtype=DTYPES[dtype]) for name, (dtype, shape) in table.items()}
    actual = read(save(tensors, metadata or None))
    assert {name: (entry.dtype, entry.shape) for name, entry in actual.entries.items()} == table
    assert actual.metadata == metadata


def test_every_dtype_has_the_width_that_torch_gives_it() -> None:
    packed = {"F4": 1} if hasattr(torch, "float4_e2m1fn_x2") else {}
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == {**WIDTHS, **packed}


def assert_refused_by_name_or_read_as_the_library_does(file: bytes) -> None:
    try:
        actual = read(file)
    except RanklessError as error:
        assert FILE in str(error)
        return
    theirs = {name: (value["dtype"], tuple(value["shape"])) for name, value in safetensors.deserialize(file)}
    assert {name: (entry.dtype, entry.shape) for name, entry in actual.entries.items()} == theirs


@given(st.binary(max_size=200))
def test_noise_is_refused_by_name(noise: bytes) -> None:
    assert_refused_by_name_or_read_as_the_library_does(noise)
    assert_refused_by_name_or_read_as_the_library_does(raw(noise))


mutations = st.lists(
    st.tuples(st.integers(0, 10**6), st.sampled_from(b'0123456789-{}[],":eFU. \x00\xff\\n')), max_size=3
)


@given(mutations, st.booleans())
@settings(max_examples=examples(300))
def test_a_changed_header_is_refused_by_name_or_means_the_same_to_the_library(places: list, two: bool) -> None:
    good = {**one(), "v": {"dtype": "U8", "shape": [4], "data_offsets": [24, 28]}} if two else one()
    text = bytearray(json.dumps(good).encode())
    for place, byte in places:
        text[place % len(text)] = byte
    assert_refused_by_name_or_read_as_the_library_does(raw(bytes(text), data=28 if two else 24))


@pytest.mark.parametrize(
    "table",
    [
        pytest.param(one(data_offsets=[0, 20]), id="fewer bytes than the shape has"),
        pytest.param(one(data_offsets=[4, 28]), id="a hole before it"),
        pytest.param(one(data_offsets=[-4, 20]), id="before the data"),
        pytest.param(one(data_offsets=[24, 0]), id="backwards"),
        pytest.param(one(data_offsets=[0, 2**63]), id="beyond the file"),
        pytest.param(one(data_offsets=[0, 2**64 + 24]), id="beyond 64 bits"),
        pytest.param(one(data_offsets=[0]), id="one offset"),
        pytest.param(one(data_offsets=[0, 12, 24]), id="three offsets"),
        pytest.param(one(data_offsets=[0.0, 24.0]), id="fractions"),
        pytest.param(one(shape=[2, 4]), id="more elements than bytes"),
        pytest.param(one(shape=[-2, -3]), id="negative dimensions of a fitting product"),
        pytest.param(one(shape=[2**40, 2**40]), id="a product beyond 64 bits"),
        pytest.param(one(shape=[2**64, 2**64]), id="dimensions beyond 64 bits"),
        pytest.param(one(shape=[2**64 + 6]), id="a dimension that wraps around to the right one"),
        pytest.param(one(shape=[2**63] * 50_000), id="a product that takes minutes"),
        pytest.param(one(shape=[2, 3] + [1] * 50_000), id="more dimensions than torch knows what to do with"),
        pytest.param(one(shape="23"), id="a text for a shape"),
        pytest.param(one(shape=None), id="no shape"),
        pytest.param(one(dtype=None), id="no dtype"),
        pytest.param(one(dtype=7), id="a number for a dtype"),
        pytest.param({**one(), "v": one()["w"]}, id="two tensors in one place"),
        pytest.param({"w": "tensor"}, id="no entry"),
        pytest.param({**one(), "__metadata__": []}, id="metadata that is a list"),
        pytest.param({**one(), "__metadata__": {"a": 1}}, id="metadata that is no text"),
        pytest.param({}, id="data of no tensor"),
    ],
)
def test_tensors_that_do_not_tile_the_data_as_they_say_are_refused(table: dict) -> None:
    with pytest.raises(CorruptCheckpointError, match=FILE):
        read(raw(table, data=24))


def test_an_empty_tensor_of_impossible_strides_is_refused() -> None:
    with pytest.raises(CorruptCheckpointError, match=FILE):
        read(raw(one(shape=[0, 2**62, 2**62], data_offsets=[0, 0])))


@pytest.mark.parametrize("dtype", ["F6", "F128", "O", "object", ""])
def test_an_unknown_dtype_is_named_with_its_file(dtype: str) -> None:
    with pytest.raises(FormatError, match=f"{FILE}.*'{dtype}'"):
        read(raw(one(dtype=dtype), data=24))


def test_a_tensor_that_is_there_twice_is_refused() -> None:
    entry = json.dumps(one()["w"])
    with pytest.raises(CorruptCheckpointError, match=FILE):
        read(raw(f'{{"w":{entry},"w":{entry}}}', data=24))
    with pytest.raises(CorruptCheckpointError, match=FILE):
        read(raw('{"__metadata__":{"a":"1"},"__metadata__":{"a":"2"}}'))


@pytest.mark.usefixtures("without_garbage")
@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000 + "]" * 100_000,
        '{"w":' * 100_000 + "1" + "}" * 100_000,
        '{"w":' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"__metadata__":{"a":' + "[" * 100_000 + "]" * 100_000 + "}}",
    ],
    ids=["lists", "objects", "an entry", "metadata"],
)
def test_a_header_nested_without_end_is_refused(text: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=FILE):
        read(raw(text))


@pytest.mark.parametrize("claimed", [2**63, 2**64 - 1, 2**64 - 8, 10**8 + 1, 30])
def test_a_header_longer_than_its_file_is_refused_before_anything_is_allocated(claimed: int) -> None:
    with pytest.raises(CorruptCheckpointError, match=FILE):
        header.header_length(claimed.to_bytes(8, "little"), 37, FILE)


def test_a_header_longer_than_the_format_allows_is_refused() -> None:
    with pytest.raises(CorruptCheckpointError, match=FILE):
        header.header_length((10**8 + 1).to_bytes(8, "little"), 10**12, FILE)
    assert header.header_length((10**8).to_bytes(8, "little"), 10**12, FILE) == 10**8 + 8


@pytest.mark.parametrize("size", range(8))
def test_a_file_without_room_for_a_length_is_refused(size: int) -> None:
    with pytest.raises(CorruptCheckpointError, match=FILE):
        header.header_length(bytes(size), size, FILE)


def test_a_file_cut_short_or_with_bytes_to_spare_is_refused() -> None:
    for data in (0, 23, 25, 4096):
        with pytest.raises(CorruptCheckpointError, match=FILE):
            read(raw(one(), data=data))
