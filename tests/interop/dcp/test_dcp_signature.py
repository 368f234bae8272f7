"""Tests that rankless's DCP writer and reader have the parameters and methods of torch's."""

import inspect
import os
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

import rankless.dcp as ours
from rankless.dcp.reader import checksums_json
from rankless.dcp_versions import DCP_VERSION, SerializationFormat
from rankless.errors import InvalidArgumentError
from tests.helpers.torch_limits import HAS_DCP_VERSION

#: What torch's have and ours do not, and why.
ABSENT = {
    "metadata_path": "older versions of torch have it: the path of the metadata",
    "fs": "torch's layer of file operations: ours are in rankless.storage",
    "transforms": "torch's experimental extensions of streams, which _extensions registers",
    "rank": "torch notes it for saves without collectives, which are refused",
    "use_collectives": "as rank",
    "storage_data": "torch's table of records: ours is in the metadata that was opened",
}

PAIRS = [(dcp.FileSystemWriter, ours.FileSystemWriter), (dcp.FileSystemReader, ours.FileSystemReader)]


def parameters(kind: type) -> dict[str, inspect.Parameter]:
    actual = inspect.signature(kind.__init__).parameters
    return {name: value for name, value in actual.items() if name != "self" and not name.startswith("_")}


def lacking(theirs: type, mine: type) -> list[str]:
    """What a caller of torch's class may write that ours does not take, or takes otherwise."""
    known, actual = parameters(mine), []
    for position, (name, parameter) in enumerate(parameters(theirs).items()):
        if name not in known:
            actual.append(f"{theirs.__name__} of torch {torch.__version__} has the argument {name!r}: add it to ours")
        elif known[name].default != parameter.default:
            actual.append(f"{name!r}: the default is {parameter.default!r} in torch, {known[name].default!r} here")
        elif list(known).index(name) != position:
            actual.append(f"{name!r} is argument {position} in torch, {list(known).index(name)} here")
    return actual


def members(kind: type, path: Path) -> set[str]:
    made = kind(path)
    return {name for name in {*dir(made), *vars(made)} if not name.startswith("_")}


@pytest.mark.parametrize(("theirs", "mine"), PAIRS)
def test_all_arguments_of_torchs_are_taken(theirs: type, mine: type) -> None:
    assert not lacking(theirs, mine)


def test_an_argument_that_is_new_in_torch_is_named() -> None:
    class Newer(dcp.FileSystemWriter):
        def __init__(self, path: str, single_file_per_rank: bool = True, shiny: int = 3) -> None:
            pass

    Newer.__name__ = "FileSystemWriter"
    (actual,) = lacking(Newer, ours.FileSystemWriter)
    assert "has the argument 'shiny'" in actual


@pytest.mark.parametrize(("theirs", "mine"), PAIRS)
def test_all_that_torchs_have_is_there(tmp_path: Path, theirs: type, mine: type) -> None:
    lost = members(theirs, tmp_path) - members(mine, tmp_path) - ABSENT.keys()
    assert not lost, f"{theirs.__name__} of torch {torch.__version__} has {sorted(lost)}: add them, or say why not"


@pytest.mark.parametrize(("theirs", "mine"), PAIRS)
def test_the_guide_lists_all_arguments(theirs: type, mine: type) -> None:
    guide = (Path(__file__).parents[3] / "docs/dcp.md").read_text()
    missing = [name for name in {**parameters(theirs), **parameters(mine)} if f"- `{name}`: " not in guide]
    assert not missing


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((8,), value), "step": int(value)}


def loaded(path: Path) -> tuple[list[float], int]:
    actual = state(0)
    dcp.load(actual, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return actual["w"].tolist(), actual["step"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [dcp.FileSystemWriter, ours.FileSystemWriter])
def test_staged_memory_is_kept_if_asked_for(tmp_path: Path, kind: type) -> None:
    with mock.patch.object(torch.Tensor, "pin_memory", lambda self: self):  # which needs an accelerator
        writer, once = kind(tmp_path / "a", cache_staged_state_dict=True), kind(tmp_path / "a")
    writer.state_dict_cache = {"w": torch.empty(8), "step": 0}
    memory = []
    for step in (1.0, 2.0):
        for item in (writer, once):
            staged = item.stage(state(step))
            assert staged["w"].tolist() == [step] * 8
            assert item.per_thread_copy_ahead == 0
            memory.append(staged["w"].data_ptr())
    assert memory[0] == memory[2]
    assert isinstance(writer, dcp.staging.AsyncStager)


def save_both(folder: str) -> list[tuple[list[float], int]]:
    from rankless.dcp import FileSystemWriter

    writer = FileSystemWriter(folder)
    for step in (1.0, 2.0):
        changing = state(step)
        future = dcp.async_save(changing, checkpoint_id=f"{folder}/{step}", storage_writer=writer)
        changing["w"].zero_()
        future.result()
    return [loaded(Path(folder, "1.0")), loaded(Path(folder, "2.0"))]


def test_asynchronous_saves_are_staged_by_the_writer(ranks: Any, tmp_path: Path) -> None:
    expected = [([1.0] * 8, 1), ([2.0] * 8, 2)]
    assert ranks(1, save_both, str(tmp_path)) == [expected]


@pytest.mark.parametrize("sync_files", [True, False])
def test_files_are_made_durable_unless_told_otherwise(tmp_path: Path, sync_files: bool) -> None:
    synced, fsync = [], os.fsync

    def noted(fd: int) -> None:
        synced.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        fsync(fd)

    with mock.patch("os.fsync", noted):
        dcp.save(state(1), storage_writer=ours.FileSystemWriter(tmp_path / "a", sync_files=sync_files), no_dist=True)
    assert ("__0_0.distcp" in synced) == sync_files
    assert loaded(tmp_path / "a") == ([1.0] * 8, 1)


@pytest.mark.parametrize(("writer", "reader"), zip(*PAIRS, strict=True))
def test_saves_and_loads_have_ids(tmp_path: Path, writer: type, reader: type) -> None:
    """As torch's own test of its metadata looks at them."""
    saving, loading = writer(tmp_path / "a"), reader(tmp_path / "a")
    seen = []
    for step in (1, 2):
        where = {"checkpoint_id": tmp_path / str(step), "no_dist": True}
        dcp.save(state(step), storage_writer=saving, **where)
        dcp.load(state(0), storage_reader=loading, **where)
        meta = loading.read_metadata().storage_meta
        assert (meta.save_id, meta.load_id) == (saving.save_id, loading.load_id)
        seen += [saving.save_id, loading.load_id]
    assert len(set(seen)) == 4


@pytest.mark.skipif(not HAS_DCP_VERSION, reason="torch's metadata have no version")
@pytest.mark.parametrize("writer", PAIRS[0])
@pytest.mark.parametrize("version", [DCP_VERSION, None])
def test_planners_are_told_the_version_of_the_format(tmp_path: Path, writer: type, version: str | None) -> None:
    """Releases of torch that wrote no version left the field out."""
    dcp.save(state(1), storage_writer=writer(tmp_path / "a"), no_dist=True)
    if version is None:
        file = tmp_path / "a/.metadata"
        metadata = pickle.loads(file.read_bytes())  # noqa: S301
        del metadata.__dict__["version"]
        file.write_bytes(pickle.dumps(metadata))
        (tmp_path / "a" / checksums_json.NAME).unlink(missing_ok=True)
    for reader in (dcp.FileSystemReader, ours.FileSystemReader):
        planner = dcp.DefaultLoadPlanner()
        dcp.load(state(0), storage_reader=reader(tmp_path / "a"), planner=planner, no_dist=True)
        assert planner.metadata is not None
        assert planner.metadata.version == version


def test_other_formats_of_records_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="TORCH_SAVE"):
        ours.FileSystemWriter(tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
