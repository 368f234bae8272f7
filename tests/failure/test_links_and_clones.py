"""Tests that files which checkpoints share do no harm: whatever other programs, file systems and users do to them."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import stat
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import rankless
from rankless.errors import (
    CorruptCheckpointError,
    InvalidArgumentError,
    RankMismatchError,
    StorageError,
    TornSnapshotError,
)
from rankless.save.base_files import BaseFiles
from rankless.storage import links_and_clones
from tests.golden import reader
from tests.helpers.chrome_traces import ChromeTrace
from tests.helpers.file_contents import read_state_files
from tests.helpers.pairwise import each_value, first_of
from tests.helpers.pool import Ranks
from tests.helpers.run_directories import list_names


class Tuned(nn.Module):
    """A frozen base, and a trained adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(300, 250, bias=False).requires_grad_(requires_grad=False)
        self.adapter = nn.Linear(250, 3)


def build_model() -> Tuned:
    torch.manual_seed(0)
    return Tuned()


def train(model: Tuned) -> None:
    with torch.no_grad():
        model.adapter.weight.add_(1)


def open_run(path: Path, **options: Any) -> rankless.RunDirectory:
    return rankless.RunDirectory(path, frozen="apart", **options)


def base_file(path: Path, tag: str) -> Path:
    """The file of the frozen parameters."""
    return path / tag / "model/model-00002-of-00002.safetensors"


def is_shared(path: Path, *tags: str) -> bool:
    return len({base_file(path, tag).stat().st_ino for tag in tags}) == 1


def assert_holds(path: Path, tag: str, model: Tuned) -> None:
    """Compare a checkpoint with a model, by rankless and by the reader that was written from the format's page."""
    restored = build_model()
    with torch.no_grad():
        restored.base.weight.zero_()
    rankless.restore(path, tag, restored)
    for name, tensor in model.state_dict().items():
        assert torch.equal(restored.state_dict()[name], tensor), name
    tensors = reader.read(path / tag).tensors["model"]
    assert bytes(tensors["base.weight"].data) == model.base.weight.detach().numpy().tobytes()


def save_twice(path: Path, **options: Any) -> tuple[rankless.RunDirectory, Tuned]:
    checkpointer, model = open_run(path, **options), build_model()
    for tag in ("s0", "s1"):
        train(model)
        checkpointer.save(tag, model).wait()
    assert is_shared(path, "s0", "s1")
    return checkpointer, model


def test_a_shared_file_is_read_only_and_no_other_is(tmp_path: Path) -> None:
    save_twice(tmp_path)
    for file in tmp_path.rglob("*"):
        if file.is_file():
            is_writable = bool(stat.S_IMODE(file.stat().st_mode) & 0o222)
            assert is_writable == (file.stat().st_nlink == 1), file


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_checkpoints_are_removed_in_any_order(tmp_path: Path, order: tuple[int, ...]) -> None:
    checkpointer, model = save_twice(tmp_path)
    train(model)
    checkpointer.save("s2", model)
    expected = {tag: read_state_files(tmp_path / tag) for tag in ("s0", "s1", "s2")}
    for number in order:
        shutil.rmtree(tmp_path / f"s{number}")
        del expected[f"s{number}"]
        for tag, files in expected.items():
            assert read_state_files(tmp_path / tag) == files
            assert rankless.open(tmp_path, tag)["model/base.weight"].shape == (250, 300)


def flip_byte(file: Path) -> None:
    file.chmod(0o644)
    with file.open("r+b") as opened:
        opened.seek(-100_000, os.SEEK_END)
        byte = opened.read(1)
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte[0] ^ 1]))


def replace_with_equal_size(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.unlink()
    file.write_bytes(data)


def truncate(file: Path) -> None:
    file.chmod(0o644)
    os.truncate(file, file.stat().st_size - 4096)


def replace_with_link(file: Path) -> None:
    moved = file.with_name("moved")
    file.rename(moved)
    file.symlink_to(moved)


def replace_with_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


CHANGES: dict[str, Callable[[Path], object]] = {
    "flipped": flip_byte,
    "replaced": replace_with_equal_size,
    "truncated": truncate,
    "link": replace_with_link,
    "pipe": replace_with_pipe,
    "removed": Path.unlink,
    "removed checkpoint": lambda file: shutil.rmtree(file.parents[1]),
    "renamed checkpoint": lambda file: file.parents[1].rename(file.parents[2] / "renamed"),
}


@each_value({"change": CHANGES, "asynchronous": [False, True]})
def test_a_file_that_another_program_has_changed_is_written_anew(
    tmp_path: Path, change: str, *, asynchronous: bool
) -> None:
    checkpointer, model = save_twice(tmp_path)
    CHANGES[change](base_file(tmp_path, "s1"))
    train(model)
    checkpointer.save("s2", model, async_save=asynchronous).wait()
    assert_holds(tmp_path, "s2", model)
    assert base_file(tmp_path, "s2").stat().st_nlink == 1


def test_a_corrupt_page_is_found_sooner_or_later(tmp_path: Path) -> None:
    """The file keeps its inode, size and time, as with a bad sector."""
    checkpointer, model = save_twice(tmp_path)
    file = base_file(tmp_path, "s1")
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    flip_byte(file)
    os.utime(file, ns=times)
    train(model)
    checkpointer.save("s2", model)
    assert_holds(tmp_path, "s2", model)  # 16 MiB are read back, which is all of it here


@first_of(2, "number", ["EMLINK", "EPERM", "ENOSYS", "EXDEV", "EOPNOTSUPP", "EACCES"])
def test_a_file_system_or_user_without_links_gets_everything_written(tmp_path: Path, number: str) -> None:
    error = OSError(getattr(errno, number), "no link")
    checkpointer, model = open_run(tmp_path), build_model()
    with mock.patch.object(os, "link", side_effect=error):
        for tag in ("s0", "s1"):
            train(model)
            checkpointer.save(tag, model)
            assert_holds(tmp_path, tag, model)
    assert not is_shared(tmp_path, "s0", "s1")


@pytest.mark.parametrize("number", ["EIO", "ENOSPC", "EDQUOT"])
def test_a_disk_that_fails_at_a_link_fails_the_save(tmp_path: Path, number: str) -> None:
    checkpointer, model = save_twice(tmp_path)
    before = list_names(tmp_path)
    with (
        mock.patch.object(os, "link", side_effect=OSError(getattr(errno, number), "no link")),
        pytest.raises(StorageError, match="could not share"),
    ):
        checkpointer.save("s2", model)
    assert list_names(tmp_path) == before
    checkpointer.save("s2", model)
    assert_holds(tmp_path, "s2", model)


def test_a_file_that_is_replaced_between_the_check_and_the_link_is_not_taken(tmp_path: Path) -> None:
    checkpointer, model = save_twice(tmp_path)
    link = os.link

    def replace_and_link(source: Path, target: Path, **options: Any) -> None:
        replace_with_equal_size(Path(source))
        link(source, target, **options)

    with mock.patch.object(os, "link", replace_and_link):
        checkpointer.save("s2", model)
    assert_holds(tmp_path, "s2", model)


def test_a_frozen_parameter_with_an_uncounted_write_is_saved_as_it_is(tmp_path: Path) -> None:
    """The write changes one element, which samples do not show."""
    checkpointer, model = save_twice(tmp_path)
    ways: list[dict[str, Any]] = [
        {},
        {"async_save": True},
        {"async_save": True, "staging": "overlapped", "staging_check": "full"},
    ]
    for number, way in enumerate(ways, 2):
        model.base.weight.data[125, 150] += 1
        checkpointer.save(f"s{number}", model, **way).wait()
        assert_holds(tmp_path, f"s{number}", model)


def test_an_overlapped_save_finds_an_uncounted_write(tmp_path: Path) -> None:
    checkpointer, model = save_twice(tmp_path)
    model.base.weight.data[125, 150] += 1
    checkpointer.save("s2", model, async_save=True, staging="overlapped")
    with pytest.raises(TornSnapshotError, match=r"base\.weight"):
        checkpointer.finalize()
    assert not (tmp_path / "s2").exists()
    checkpointer.save("s3", model, async_save=True, staging="overlapped").wait()
    assert_holds(tmp_path, "s3", model)


def test_an_overlapped_save_reads_shared_files_back(tmp_path: Path) -> None:
    """A program changes a byte and restores the times of the file, so that nothing but its bytes shows it."""
    checkpointer, model = save_twice(tmp_path, async_save=True, staging="overlapped")
    file = base_file(tmp_path, "s1")
    status = file.stat()
    flip_byte(file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    train(model)
    checkpointer.save("s2", model)
    with pytest.raises(TornSnapshotError, match=r"s1 is corrupt: the next save writes everything"):
        checkpointer.finalize()
    checkpointer.save("s3", model).wait()
    assert_holds(tmp_path, "s3", model)


@pytest.mark.parametrize("load", ["load_model", "load_checkpoint", "another checkpointer"])
def test_a_load_between_overlapped_saves_is_seen(tmp_path: Path, load: str) -> None:
    """The samples may not see a change of one element. The count of changes of the parameter shows it."""
    checkpointer, model = save_twice(tmp_path / "run", async_save=True, staging="overlapped")
    other = build_model()
    with torch.no_grad():
        other.base.weight[125, 150] += 1
    if load == "load_model":
        rankless.save_model(other, tmp_path / "other")
        rankless.load_model(model, tmp_path / "other")
    elif load == "load_checkpoint":
        rankless.save_checkpoint(tmp_path / "other", "s", other)
        rankless.load_checkpoint(tmp_path / "other", model=model)
    else:
        open_run(tmp_path / "run").save("other", other)
        open_run(tmp_path / "run").load("other", model)
    checkpointer.save("s2", model).wait()
    assert_holds(tmp_path / "run", "s2", other)


def test_everything_may_change_and_change_back_after_an_eager_save(tmp_path: Path) -> None:
    checkpointer, model = save_twice(tmp_path)
    saved = build_model()
    for number in range(2, 8):
        old = model.base.weight.detach().clone()
        model.base.weight.data[number, number] += number
        saved.load_state_dict(model.state_dict())
        handle = checkpointer.save(f"s{number}", model, async_save=True)
        with torch.no_grad():
            model.base.weight.copy_(old) if number % 2 else model.base.weight.mul_(2)
        handle.wait()
        assert_holds(tmp_path, f"s{number}", saved)


def test_a_merge_of_adapters_before_a_save_is_saved(tmp_path: Path) -> None:
    checkpointer, model = save_twice(tmp_path)
    model.base.weight.data += 0.5  # as PEFT's merge_adapter does
    checkpointer.save("s2", model, async_save=True).wait()
    assert_holds(tmp_path, "s2", model)


def test_an_unfrozen_parameter_moves_to_the_files_of_trained_ones(tmp_path: Path) -> None:
    checkpointer, model = save_twice(tmp_path)
    model.base.requires_grad_(requires_grad=True)
    checkpointer.save("s2", model)
    assert not base_file(tmp_path, "s2").exists()
    assert_holds(tmp_path, "s2", model)


def test_a_file_that_is_changed_while_it_is_shared_fails_the_save(tmp_path: Path) -> None:
    checkpointer, model = save_twice(tmp_path)
    settle = BaseFiles.settle

    def settle_and_change(files: BaseFiles, *arguments: Any) -> Any:
        omitted = settle(files, *arguments)
        flip_byte(base_file(tmp_path, "s1"))
        return omitted

    with (
        mock.patch.object(BaseFiles, "settle", settle_and_change),
        pytest.raises(CorruptCheckpointError, match="changed by another program"),
    ):
        checkpointer.save("s2", model)
    assert list_names(tmp_path) == ["s0", "s1"]
    checkpointer.save("s3", model)
    assert_holds(tmp_path, "s3", model)


def test_one_file_that_cannot_be_linked_does_not_end_the_sharing(tmp_path: Path) -> None:
    checkpointer, model = save_twice(tmp_path)
    with mock.patch.object(os, "link", side_effect=PermissionError(errno.EPERM, "immutable")):
        checkpointer.save("s2", model)
    for tag in ("s3", "s4"):
        train(model)
        checkpointer.save(tag, model)
        assert_holds(tmp_path, tag, model)
    assert is_shared(tmp_path, "s2", "s3", "s4")


def save_columns(path: str, columns: int, changed_rank: int | None) -> list[bool]:
    """Save a frozen tensor whose columns are divided, changed on one rank by an operation that torch counts."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(512.0 * columns).view(512, columns)
    tensor = distribute_tensor(whole, mesh, [Shard(1)], src_data_rank=None)
    model = nn.ParameterDict({"f": nn.Parameter(tensor, requires_grad=False)})
    checkpointer = rankless.RunDirectory(path, frozen="apart", async_save=True, staging="overlapped")
    checkpointer.save("a", model).wait()
    if dist.get_rank() == changed_rank:
        model["f"].data._local_tensor[200, 3] += 1
    checkpointer.save("b", model).wait()
    stored = rankless.open(path, "b")["model/f"]
    changed = model["f"].data.full_tensor()
    return [torch.equal(stored, changed), Path(path, "a/model/model.safetensors").stat().st_nlink > 1]


@pytest.mark.parametrize("changed_rank", [None, 1])
@pytest.mark.parametrize("columns", [64, 1024], ids=["very short rows", "short rows"])
def test_divided_columns_of_a_frozen_tensor(
    ranks: Ranks, tmp_path: Path, columns: int, changed_rank: int | None
) -> None:
    is_linked = columns > 64 and changed_rank is None
    for result in ranks(2, save_columns, str(tmp_path), columns, changed_rank):
        assert result == [True, is_linked]


def test_two_jobs_in_one_run_directory_share_their_own_files(tmp_path: Path) -> None:
    first, second = open_run(tmp_path), open_run(tmp_path)
    models = {"a": build_model(), "b": build_model()}
    with torch.no_grad():
        models["b"].base.weight.add_(1)
    for number in range(3):
        for name, checkpointer in (("a", first), ("b", second)):
            train(models[name])
            checkpointer.save(f"{name}{number}", models[name], keep=1)
            assert_holds(tmp_path, f"{name}{number}", models[name])


def test_retention_of_one_checkpoint_keeps_the_bytes(tmp_path: Path) -> None:
    checkpointer, model = open_run(tmp_path, keep=1), build_model()
    inodes = set()
    for number in range(4):
        train(model)
        checkpointer.save(f"s{number}", model)
        inodes.add(base_file(tmp_path, f"s{number}").stat().st_ino)
        assert_holds(tmp_path, f"s{number}", model)
        assert list_names(tmp_path) == [f"s{number}"]
    assert len(inodes) == 1


def test_an_overwrite_shares_with_what_it_replaces(tmp_path: Path) -> None:
    checkpointer, model = open_run(tmp_path), build_model()
    inodes = set()
    for _ in range(3):
        train(model)
        checkpointer.save("last", model, overwrite=True)
        inodes.add(base_file(tmp_path, "last").stat().st_ino)
        assert_holds(tmp_path, "last", model)
    assert len(inodes) == 1


def test_one_of_some_checkpoints_is_full(tmp_path: Path) -> None:
    checkpointer, model = open_run(tmp_path, keep_full_every=3), build_model()
    inodes = []
    for number in range(7):
        train(model)
        checkpointer.save(f"s{number}", model)
        inodes.append(base_file(tmp_path, f"s{number}").stat().st_ino)
    assert [len(list(equal)) for _, equal in itertools.groupby(inodes)] == [3, 3, 1]


@pytest.mark.parametrize(("elements", "is_asked"), [(100_000, True), (8_000_000, False)])
def test_states_of_generators_are_not_shared_with_a_large_model(
    tmp_path: Path, elements: int, *, is_asked: bool
) -> None:
    """They stay as they are in a training without dropout. Its saves need no vote on so few bytes."""
    model = nn.Linear(elements, 1, bias=False)
    rankless.save_checkpoint(tmp_path / "run", "s0", model)
    with torch.no_grad():
        model.weight.add_(1)
    with rankless.trace(tmp_path / "trace.json"):
        rankless.save_checkpoint(tmp_path / "run", "s1", model)
    steps = {each.name for each in ChromeTrace(tmp_path / "trace.json").slices}
    assert ("finding unchanged bytes" in steps) == is_asked
    file = tmp_path / "run/s1/ranks.safetensors"
    assert (file.stat().st_nlink > 1) == is_asked


def test_without_incremental_saves_nothing_is_shared(tmp_path: Path) -> None:
    checkpointer, model = open_run(tmp_path, incremental=False), build_model()
    for tag in ("s0", "s1"):
        checkpointer.save(tag, model)
    assert not is_shared(tmp_path, "s0", "s1")


def test_a_job_that_is_resumed_shares_with_the_checkpoint_that_it_loaded(tmp_path: Path) -> None:
    _, model = save_twice(tmp_path)
    resumed = open_run(tmp_path)
    resumed.restore(model=model)
    train(model)
    resumed.save("s2", model)
    assert is_shared(tmp_path, "s0", "s1", "s2")
    assert_holds(tmp_path, "s2", model)


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "1GB"}, {"timeout": 300.0}], ids=str)
def test_the_functions_share_with_what_was_loaded_whatever_their_options(tmp_path: Path, options: Any) -> None:
    _, model = save_twice(tmp_path)
    rankless.load_checkpoint(tmp_path, model=model)
    train(model)
    rankless.save_checkpoint(tmp_path, "s2", model, frozen="apart", **options)
    assert is_shared(tmp_path, "s1", "s2")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("change", [lambda file: os.chown(file, 12345, -1), lambda file: file.chmod(0)])
def test_a_file_that_a_full_save_would_not_have_made_is_not_linked(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    checkpointer, model = save_twice(tmp_path)
    change(base_file(tmp_path, "s1"))
    checkpointer.save("s2", model)
    assert not is_shared(tmp_path, "s1", "s2")
    assert base_file(tmp_path, "s2").stat().st_uid == 0


@pytest.mark.parametrize(
    "options",
    [
        {"frozen": "bogus"},
        {"incremental": "no"},
        {"incremental": torch.tensor([1, 2])},
        {"keep_full_every": 0},
        {"keep_full_every": True},
    ],
    ids=str,
)
def test_a_wrong_argument_of_one_rank_is_an_error_of_all(ranks: Ranks, tmp_path: Path, options: dict[str, Any]) -> None:
    assert set(ranks(2, save_with_wrong_argument, str(tmp_path), options)) == {next(iter(options))}


def save_with_wrong_argument(path: str, options: dict[str, Any]) -> str:
    """Pass the wrong argument on rank 1 only. Return which argument the error names."""
    (name,) = options
    with pytest.raises((InvalidArgumentError, RankMismatchError), match=name):
        rankless.save_checkpoint(path, "s", build_model(), timeout=20, **(options if dist.get_rank() else {}))
    return name


@pytest.mark.parametrize("options", [{"frozen": "bogus"}, {"incremental": None}, {"keep_full_every": 0}], ids=str)
def test_the_constructor_refuses_wrong_arguments(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(options))):
        rankless.RunDirectory(tmp_path, **options)


def save_frozen_on(path: str, frozen_ranks: tuple[int, ...]) -> None:
    model = build_model()
    model.base.requires_grad_(requires_grad=dist.get_rank() not in frozen_ranks)
    rankless.save_checkpoint(path, "s", model, frozen="apart")


def test_ranks_that_disagree_about_frozen_parameters_are_named(ranks: Ranks, tmp_path: Path) -> None:
    for error in ranks.outcomes(3, save_frozen_on, str(tmp_path), (0, 2)):
        assert isinstance(error, RankMismatchError)
        assert "'base.weight' of model is frozen on rank 0 but not on rank 1" in str(error)
    ranks(3, save_frozen_on, str(tmp_path), (0, 1, 2))


def test_copies_and_archives_of_a_run_are_whole(tmp_path: Path) -> None:
    _, model = save_twice(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    shutil.rmtree(tmp_path / "run")
    assert_holds(tmp_path / "copy", "s1", model)


@pytest.fixture(autouse=True)
def _errors_of_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def test_identity_does_not_depend_on_the_number_of_links(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"bytes")
    before = links_and_clones.identify_file(file)
    os.link(file, tmp_path / "link")
    file.chmod(0o444)
    assert links_and_clones.identify_file(file) == before is not None
