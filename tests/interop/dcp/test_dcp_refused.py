"""Tests that corrupt or forged ``torch.distributed.checkpoint`` directories are refused by name."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)

import rankless
from rankless.engine.plan.element_ranges import IndexBox
from rankless.errors import (
    CorruptCheckpointError,
    OptimizerMismatchError,
    RanklessError,
    UnsafeNameError,
    UnsafePickleError,
)
from tests.helpers.bounded_reads import limit_memory, read_checkpoint
from tests.helpers.dcp_checkpoints import save_dcp, state_by_name, train_model, write_chunks
from tests.helpers.unsafe_pickles import UNSAFE_OBJECTS

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    boxes = [IndexBox((0, 0), (2, 3)), IndexBox((2, 0), (2, 3))]
    write_chunks(tmp_path / "c", {"w": (torch.arange(12.0).reshape(4, 3), boxes)}, lambda n: tuple(range(n)))
    return tmp_path / "c"


def edit(folder: Path, change: Callable[[Metadata], object]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def assert_refused(folder: Path, *kinds: type[RanklessError], match: str | None = None) -> None:
    with limit_memory(), pytest.raises(kinds or RanklessError, match=match) as caught:
        read_checkpoint(folder)
    assert str(folder) in str(caught.value)
    model = nn.Module()
    model.w = nn.Parameter(torch.full((4, 3), 7.0))
    with limit_memory(), pytest.raises(kinds or RanklessError):
        rankless.load_checkpoint(folder, model=model)


def chunk(metadata: Metadata, number: int) -> ChunkStorageMetadata:
    return metadata.state_dict_metadata["w"].chunks[number]


def place(metadata: Metadata, number: int) -> _StorageInfo:
    return list(metadata.storage_data.values())[number]


def swap(metadata: Metadata) -> None:
    """The chunk's place is that of something else."""
    metadata.storage_data = dict(zip(metadata.storage_data, reversed(metadata.storage_data.values()), strict=True))
    tensor = metadata.state_dict_metadata["w"]
    tensor.properties = TensorProperties(dtype=torch.int32)


def twice(metadata: Metadata) -> None:
    metadata.state_dict_metadata["v"] = metadata.state_dict_metadata["w"]
    for index, info in list(metadata.storage_data.items()):
        metadata.storage_data[MetadataIndex("v", index.offset)] = info
    metadata.planner_data["v"] = ("w",)


CHANGES: dict[str, tuple[Callable[[Metadata], object], str]] = {
    "a chunk that was not written": (lambda m: m.storage_data.popitem(), "chunk of tensor 'w' at .* has no entry"),
    "a chunk missing": (lambda m: m.state_dict_metadata["w"].chunks.pop(), "'w' is incomplete: no chunk has"),
    "a hole in the middle": (lambda m: m.state_dict_metadata["w"].chunks.pop(0), "no chunk has its elements 0"),
    "chunks that overlap": (lambda m: shift(m, (1, 0)), "two chunks overlap from its element 3 on"),
    "chunks beyond the tensor": (lambda m: shift(m, (3, 0)), "reaches beyond the shape"),
    "a negative offset": (lambda m: shift(m, (-1, 0)), "size"),
    "another number of dimensions": (lambda m: shift(m, (2,)), "reaches beyond the shape"),
    "a tensor larger than its chunks": (lambda m: grow(m, (5, 3)), "'w' is incomplete"),
    "a tensor of petabytes": (lambda m: grow(m, (2**60, 2**60)), "tensor 'w' has the shape"),
    "a place beyond the file": (lambda m: vars(place(m, 0)).update(offset=10**6), "truncated, or is from another save"),
    "a length beyond the file": (lambda m: vars(place(m, 0)).update(length=10**18), "truncated"),
    "a place inside another chunk": (lambda m: vars(place(m, 0)).update(offset=8), ""),
    "a file elsewhere": (lambda m: vars(place(m, 0)).update(relative_path="../secret"), "not a plain path"),
    "a file at the root": (lambda m: vars(place(m, 0)).update(relative_path="/etc/passwd"), "not a plain path"),
    "a file that is not there": (lambda m: vars(place(m, 0)).update(relative_path="x.distcp"), "is missing"),
    "its own metadata as data": (lambda m: vars(place(m, 0)).update(relative_path=".metadata"), ""),
    "chunks of another dtype": (swap, "another save, or corrupt"),
    "no places at all": (lambda m: vars(m).update(storage_data=None), "storage_data is None"),
    "compressed chunks": (
        lambda m: vars(place(m, 0)).update(transform_descriptors=["stream.zstd/1"]),
        r"stream\.zstd/1.*save it without",
    ),
    "a path that is none": (lambda m: m.planner_data.update(w=5), "path"),
    "a path of numbers": (lambda m: m.planner_data.update(w=("a", 10**9)), "not those of a list"),
    "one path twice": (twice, "two values have the path"),
}


def shift(metadata: Metadata, offsets: tuple[int, ...]) -> None:
    """The second chunk lies elsewhere, in all that tells of it."""
    index = list(metadata.storage_data)[1]
    metadata.storage_data[MetadataIndex("w", offsets, 1)] = metadata.storage_data.pop(index)
    chunk(metadata, 1).offsets = torch.Size(offsets)


def grow(metadata: Metadata, shape: tuple[int, ...]) -> None:
    metadata.state_dict_metadata["w"].size = torch.Size(shape)


@pytest.mark.parametrize("kind", CHANGES)
def test_metadata_that_contradicts_itself_or_the_files(folder: Path, kind: str) -> None:
    change, match = CHANGES[kind]
    edit(folder, change)
    assert_refused(folder, match=match or None)


def test_what_it_is_before_any_of_these_changes(folder: Path) -> None:
    edit(folder, vars)
    read_checkpoint(folder)


@pytest.mark.parametrize("kind", UNSAFE_OBJECTS)
def test_metadata_that_runs_code(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    edit(folder, lambda m: vars(m).update(planner_data=UNSAFE_OBJECTS[kind]))
    assert_refused(folder, UnsafePickleError)
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("kind", UNSAFE_OBJECTS)
def test_values_that_run_code_are_refused_and_keep_nobody_from_the_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    path = save_dcp(tmp_path / "c", {"model": {"w": torch.ones(4, 3)}, "evil": UNSAFE_OBJECTS[kind], "epoch": 5})
    monkeypatch.chdir(path)
    before = sorted(path.iterdir())
    with pytest.raises(
        UnsafePickleError, match=rf"{path}.*evil.*torch\.distributed\.checkpoint\.load.*weights_only=False"
    ):
        read_checkpoint(path)
    with pytest.raises(UnsafePickleError, match="evil"):
        rankless.convert(path, tmp_path / "out", to="native")
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(4, 3))
    content = rankless.load_checkpoint(path, model=model)
    assert torch.equal(model.w, torch.ones(4, 3))
    assert content["epoch"] == 5
    assert "does not run" in repr(content["evil"])
    assert "user_content value evil is not read" in caplog.text
    assert torch.equal(rankless.open(path)["model/w"], torch.ones(4, 3))
    assert sorted(path.iterdir()) == before


def test_a_part_with_a_value_that_is_not_read_is_refused_when_it_is_asked_for(tmp_path: Path) -> None:
    model, optimizer, scheduler = train_model()
    state = state_by_name(model, optimizer, scheduler)
    state["optim"]["param_groups"][0]["hook"] = UNSAFE_OBJECTS["eval"]
    path = save_dcp(tmp_path / "c", state)
    rankless.load_checkpoint(path, model=train_model()[0])
    with pytest.raises(UnsafePickleError, match=r"optimizer value .*hook"):
        rankless.load_checkpoint(path, model=model, optimizer=optimizer)


def test_a_file_in_memory_is_read_as_its_bytes(tmp_path: Path) -> None:
    path = save_dcp(tmp_path / "c", {"model": {"w": torch.ones(4, 3)}, "blob": io.BytesIO(b"bytes of a file")})
    assert rankless.open(path).values["user_content"] == {"blob": b"bytes of a file"}
    rankless.convert(path, tmp_path / "native", to="native")
    assert rankless.open(tmp_path / "native").values["user_content"] == {"blob": b"bytes of a file"}


def test_metadata_cut_short_anywhere(folder: Path) -> None:
    raw = (folder / ".metadata").read_bytes()
    for size in range(0, len(raw), 5):
        (folder / ".metadata").write_bytes(raw[:size])
        with limit_memory(), pytest.raises(CorruptCheckpointError, match=str(folder)):
            rankless.open(folder)


@pytest.mark.parametrize("keep", [0, 1, 100, 1000, -1])
def test_data_cut_short(folder: Path, keep: int) -> None:
    file = folder / "__1_0.distcp"
    os.truncate(file, keep if keep >= 0 else file.stat().st_size + keep)
    assert_refused(folder, CorruptCheckpointError, match=str(file))


def test_a_link_out_of_the_folder(folder: Path, tmp_path: Path) -> None:
    (folder / "__1_0.distcp").rename(tmp_path / "elsewhere")
    (folder / "__1_0.distcp").symlink_to(tmp_path / "elsewhere")
    assert_refused(folder, UnsafeNameError)


def test_verify_names_every_damaged_tensor_and_goes_on(folder: Path) -> None:
    """A save into a folder that has another one in it, interrupted: DCP loads that without a word."""
    boxes = [IndexBox((0,), (3,)), IndexBox((3,), (3,))]
    named = {name: (torch.ones(6), boxes) for name in ("a", "b", "c")}
    shutil.rmtree(folder)
    write_chunks(folder, named, lambda n: tuple(range(n)))
    raw = bytearray((folder / "__1_0.distcp").read_bytes())
    second = raw.index(b"PK\3\4", raw.index(b"PK\5\6"))
    raw[second : second + 4] = b"XXXX"
    (folder / "__1_0.distcp").write_bytes(raw)
    actual = {check.name: check.problem for check in rankless.open(folder).verify()}
    assert {name for name, problem in actual.items() if problem} == {"model/b"}


@given(st.data())
@settings(max_examples=150)
def test_any_change_is_read_or_refused_by_an_error_of_ours(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c"
        boxes = [IndexBox((0, 0), (2, 2)), IndexBox((0, 2), (2, 1)), IndexBox((2, 0), (2, 3))]
        write_chunks(path, {"w": (torch.arange(12.0).reshape(4, 3), boxes)}, lambda n: tuple(range(n)))
        file = path / data.draw(st.sampled_from([".metadata", "__0_0.distcp", "__1_0.distcp"]))
        raw = bytearray(file.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        file.write_bytes(raw)
        try:
            read_checkpoint(path)
        except RanklessError as error:
            assert str(path) in str(error)


def test_an_optimizer_whose_groups_contradict_its_states(tmp_path: Path) -> None:
    model, optimizer, scheduler = train_model()
    state = state_by_name(model, optimizer, scheduler)
    state["optim"]["param_groups"][0]["params"].pop()
    with pytest.raises(CorruptCheckpointError, match="in none of its groups"):
        rankless.open(save_dcp(tmp_path / "c", state))


def test_an_optimizer_of_other_parameters_is_a_mismatch(tmp_path: Path) -> None:
    path = save_dcp(tmp_path / "c", state_by_name(*train_model()))
    model = train_model()[0]
    with pytest.raises(OptimizerMismatchError, match="does not train"):
        rankless.load_checkpoint(path, model=model, optimizer=torch.optim.AdamW(list(model.parameters())[:2]))
