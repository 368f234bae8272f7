"""Tests that corrupt, forged or foreign ``torch.save`` files are refused with an error that names them."""

from __future__ import annotations

import math
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rankless
from rankless.errors import CorruptCheckpointError, FormatError, RanklessError, UnsafePickleError
from tests.helpers.bounded_reads import limit_memory, read_checkpoint
from tests.helpers.equality import equal_bits
from tests.helpers.torch_files import LEGACY_OPTIONS, SAVE_OPTIONS, make_net, save_tree, write_archive
from tests.helpers.unsafe_pickles import UNSAFE_OBJECTS


@pytest.fixture
def entries(tmp_path: Path) -> dict[str, bytes]:
    file = save_tree(tmp_path, {"model": {"w": torch.arange(6.0), "v": torch.ones(3)}, "epoch": 1})
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def assert_refused(file: Path, *kinds: type[RanklessError], match: str | None = None) -> None:
    with limit_memory(), pytest.raises(kinds or RanklessError, match=match) as caught:
        read_checkpoint(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("kind", UNSAFE_OBJECTS)
@pytest.mark.parametrize("options", SAVE_OPTIONS)
def test_a_pickle_that_runs_code_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    file = save_tree(tmp_path, {"model": {"w": torch.ones(1)}, "evil": UNSAFE_OBJECTS[kind]}, **options)
    assert_refused(file, UnsafePickleError)
    with pytest.raises(UnsafePickleError, match=str(file)):
        rankless.load_checkpoint(file, model=torch.nn.Linear(1, 1))
    assert [item.name for item in tmp_path.iterdir()] == [file.name]


def test_objects_of_unknown_classes_are_named(tmp_path: Path) -> None:
    file = save_tree(tmp_path, {"model": {"w": torch.ones(1)}, "whole": make_net()})
    assert_refused(file, UnsafePickleError, match="torch.nn.modules")


@pytest.mark.parametrize("options", SAVE_OPTIONS)
def test_a_file_cut_short_anywhere_is_damage(tmp_path: Path, options: Any) -> None:
    file = save_tree(tmp_path, {"model": {"w": torch.arange(6.0), "v": torch.ones(3)}}, **options)
    raw = file.read_bytes()
    for size in [*range(0, len(raw) - 1, 7), len(raw) - 1]:
        file.write_bytes(raw[:size])
        assert_refused(file, CorruptCheckpointError, FormatError)


def test_entries_that_are_compressed(tmp_path: Path, entries: dict[str, bytes]) -> None:
    assert_refused(write_archive(tmp_path / "x.pt", entries, zipfile.ZIP_DEFLATED), FormatError, match="compressed")


def test_a_zip_bomb(tmp_path: Path, entries: dict[str, bytes]) -> None:
    """256 MiB of zeros in a few hundred KiB."""
    entries["some/data/0"] = bytes(2**28)
    assert_refused(write_archive(tmp_path / "x.pt", entries, zipfile.ZIP_DEFLATED), FormatError, match="compressed")


def test_an_entry_twice(tmp_path: Path, entries: dict[str, bytes]) -> None:
    first = write_archive(tmp_path / "x.pt", entries)
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(first, "a") as archive:
        archive.writestr("some/data/0", entries["some/data/0"])
    assert_refused(tmp_path / "x.pt", CorruptCheckpointError, match="two of its entries")


@pytest.mark.parametrize("missing", ["some/data.pkl", "some/data/0", "some/data/1"])
def test_an_entry_missing(tmp_path: Path, entries: dict[str, bytes], missing: str) -> None:
    del entries[missing]
    assert_refused(write_archive(tmp_path / "x.pt", entries), CorruptCheckpointError, FormatError)


@pytest.mark.parametrize("size", [0, 23, 25, 1000])
def test_a_storage_of_another_size(tmp_path: Path, entries: dict[str, bytes], size: int) -> None:
    entries["some/data/0"] = bytes(size)
    assert_refused(write_archive(tmp_path / "x.pt", entries), CorruptCheckpointError, match="storage '0'")


def test_the_other_byte_order(tmp_path: Path, entries: dict[str, bytes]) -> None:
    entries["some/byteorder"] = b"big"
    assert_refused(write_archive(tmp_path / "x.pt", entries), FormatError, match="big-endian")


def test_a_torchscript_program(tmp_path: Path) -> None:
    torch.jit.script(torch.nn.Linear(1, 1)).save(tmp_path / "x.pt")
    assert_refused(tmp_path / "x.pt", FormatError, match="TorchScript")


def test_a_zip_file_of_something_else(tmp_path: Path) -> None:
    assert_refused(write_archive(tmp_path / "x.zip", {"a/b.txt": b"hello"}), FormatError, match="a zip file")
    assert_refused(write_archive(tmp_path / "y.zip", {"a": b""}), FormatError)


def pickled(tree: bytes) -> dict[str, bytes]:
    return {"a/data.pkl": b"\x80\x02" + tree + b".", "a/byteorder": b"little", "a/data/0": bytes(8)}


def tensor(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> bytes:
    """A pickle of a view of a storage of two floats."""

    def row(numbers: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(b"\x8a\x09" + number.to_bytes(9, "little", signed=True) for number in numbers) + b"t"

    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x02tQ"
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage
        + row((offset,))[1:-1]
        + row(shape)
        + row(strides)
        + b"\x89ccollections\nOrderedDict\n)RtR"
    )


ABSURD = {
    "beyond the storage": ((3,), (1,), 0),
    "an offset beyond the storage": ((2,), (1,), 1),
    "a negative offset": ((1,), (1,), -1),
    "a negative size": ((-1,), (1,), 0),
    "a negative stride": ((2,), (-1,), 1),
    "a stride beyond the storage": ((2,), (2,), 0),
    "a petabyte of one element": ((2**48,), (0,), 0),
    "more than all numbers": ((2**62, 2**62), (0, 0), 0),
    "a huge offset": ((1,), (1,), 2**63),
    "nothing, times more than all numbers": ((2**40, 0, 2**40), (0, 0, 0), 0),
    "a huge stride": ((2,), (2**62,), 0),
    "another number of strides": ((2,), (1, 1), 0),
    "too many dimensions": ((1,) * 100, (1,) * 100, 0),
}


@pytest.mark.parametrize("kind", ABSURD)
def test_absurd_tensors(tmp_path: Path, kind: str) -> None:
    assert_refused(write_archive(tmp_path / "x.pt", pickled(b"}X\x01\0\0\0w" + tensor(*ABSURD[kind]) + b"s")))


def test_the_tensor_of_which_these_are_variants_is_read(tmp_path: Path) -> None:
    file = write_archive(tmp_path / "x.pt", pickled(b"}X\x01\0\0\0w" + tensor((2,), (1,)) + b"s"))
    assert equal_bits(rankless.open(file)["model/w"], torch.zeros(2))


def doubled(levels: int) -> bytes:
    """Lists of two lists of two lists …: few bytes, and no end of walking them."""
    return b"]" + b"".join(b"q\x000(h\x00h\x00l" for _ in range(levels))


def test_values_that_name_each_other_again_and_again(tmp_path: Path) -> None:
    assert_refused(write_archive(tmp_path / "x.pt", pickled(doubled(60))), CorruptCheckpointError, match="more work")


def test_values_inside_themselves(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert_refused(save_tree(tmp_path, loop), CorruptCheckpointError, match="levels")


@pytest.mark.parametrize("field", range(20))
def test_numbers_in_the_directory(tmp_path: Path, field: int) -> None:
    """Each 32 bits of the end of the file, which says where the directory is, made the largest there are."""
    file = save_tree(tmp_path, {"model": {"w": torch.arange(6.0)}})
    raw = bytearray(file.read_bytes())
    at = len(raw) - 98 + 4 * field
    if bytes(raw[at : at + 4]) in {b"PK\5\6", b"PK\6\6", b"PK\6\7"}:
        return
    struct.pack_into("<I", raw, at, 0xFFFFFFFF)
    file.write_bytes(raw)
    with limit_memory():
        try:
            assert equal_bits(rankless.open(file)["model/w"], torch.arange(6.0))
        except RanklessError as error:
            assert str(file) in str(error)


@given(st.data())
@settings(max_examples=300)
def test_any_change_is_read_or_refused_by_an_error_of_ours(tmp_path: Path, data: st.DataObject) -> None:
    options = data.draw(st.sampled_from([{}, LEGACY_OPTIONS]))
    file = save_tree(tmp_path, {"model": {"w": torch.arange(6.0)}, "a": [1, {"b": torch.ones(2)}]}, **options)
    raw = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(raw)
    try:
        opened = rankless.open(file)
        for name in opened:
            assert math.prod(opened[name].shape) < 1000
        assert opened.values is not None
    except RanklessError as error:
        assert str(file) in str(error)


def test_a_flipped_bit_in_the_pickle_is_found_by_its_crc(tmp_path: Path) -> None:
    """torch writes CRCs, and checks none."""
    file = save_tree(tmp_path, {"model": {"w": torch.arange(6.0)}, "epoch": 7})
    raw = bytearray(file.read_bytes())
    raw[raw.index(b"epoch") + 10] ^= 1
    file.write_bytes(raw)
    assert_refused(file, CorruptCheckpointError, match="CRC")


def test_a_file_without_crcs_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        file = save_tree(tmp_path, {"w": torch.arange(6.0)})
    finally:
        torch.serialization.set_crc32_options(True)
    assert equal_bits(rankless.open(file)["model/w"], torch.arange(6.0))


def test_arrays_of_objects_are_refused(tmp_path: Path) -> None:
    file = save_tree(tmp_path, {"a": np.array([object], dtype=object)})
    assert_refused(file, FormatError)
