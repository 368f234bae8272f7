"""Tests files: ranges written and read past the cache or through it, small files, and the publishing rename."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankless.errors import CorruptCheckpointError, StorageError, TagExistsError, UnsafeNameError
from rankless.storage import atomic_rename, direct_io, directory_trees, posix
from rankless.storage.aligned_memory import aligned_buffer
from rankless.storage.direct_io import SECTOR_BYTES, BufferedReader, DirectWriter
from rankless.storage.exact_reader import ExactReaderFactory
from rankless.storage.file_lock import FileLock
from rankless.storage.filesystem_kind import is_in_memory
from tests.helpers.examples import examples


def at_offset(offset: int, data: bytes) -> memoryview:
    """The data at an address that is as far from a sector as the offset is."""
    lead = offset % SECTOR_BYTES
    buffer = aligned_buffer(lead + len(data)).data
    buffer[lead : lead + len(data)] = data
    return buffer[lead : lead + len(data)]


def noise(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


offsets = st.one_of(st.integers(0, 5 * SECTOR_BYTES), st.integers(0, 5).map(lambda n: n * SECTOR_BYTES))
cuts = st.lists(offsets, max_size=8)


@pytest.fixture(params=["direct where it can", "never direct", "direct until it is tried"])
def directness(request: pytest.FixtureRequest):
    """File systems that take direct writes, that refuse them when opening, and when one is tried."""
    pwrite = os.pwrite

    def is_direct(fd: int) -> bool:
        return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)

    def refuse(call, fd, *args):
        if is_direct(fd):
            raise OSError(errno.EINVAL, "Invalid argument")
        return call(fd, *args)

    if request.param == "direct where it can":
        yield
    elif request.param == "never direct":
        with mock.patch.object(direct_io, "open_direct", return_value=None):
            yield
    else:
        with mock.patch.object(os, "pwrite", lambda *args: refuse(pwrite, *args)):
            yield


@given(st.integers(0, 6 * SECTOR_BYTES), cuts, st.randoms(use_true_random=False))
@settings(max_examples=examples(40))
def test_ranges_written_in_any_order_are_in_the_file(tmp_path_factory, directness, size: int, cuts, random) -> None:
    data = noise(size)
    edges = sorted({0, size, *(cut for cut in cuts if cut < size)})
    ranges = list(itertools.pairwise(edges))
    random.shuffle(ranges)
    file = tmp_path_factory.mktemp("bulk") / "data"
    posix.allocate_space(file, size)
    with DirectWriter(file) as writer:
        for start, stop in ranges:
            writer.write(start, at_offset(start, data[start:stop]))
        writer.sync()
    assert file.read_bytes() == data


@given(st.integers(1, 6 * SECTOR_BYTES), offsets, offsets)
@settings(max_examples=examples(60))
def test_any_range_is_read(tmp_path_factory, size: int, one, two) -> None:
    data = noise(size)
    file = tmp_path_factory.mktemp("bulk") / "data"
    file.write_bytes(data)
    start, stop = sorted((min(one, size), min(two, size)))
    into = bytearray(stop - start)
    with BufferedReader(file) as reader:
        reader.read(start, memoryview(into))
        assert into == data[start:stop]


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 6000))
@settings(max_examples=examples(60))
def test_parts_of_a_range_come_in_order_and_are_there_when_they_come(tmp_path_factory, one, two, most: int) -> None:
    data = np.random.default_rng(0).bytes(5000)
    file = tmp_path_factory.mktemp("file") / "data"
    file.write_bytes(data)
    start, stop = sorted((one, two))
    into = bytearray(stop - start)
    with mock.patch.object(direct_io, "_CHUNK_BYTES", most), BufferedReader(file) as reader:
        parts = [bytes(part) for part in reader.read_in_chunks(start, memoryview(into))]
    assert into == b"".join(parts) == data[start:stop]
    assert all(0 < len(part) <= most for part in parts)


@pytest.mark.parametrize(
    "start", [0, 1, SECTOR_BYTES - 1, SECTOR_BYTES, SECTOR_BYTES + 100, 2 * SECTOR_BYTES + 200, 5 * SECTOR_BYTES]
)
def test_a_file_that_ends_inside_of_what_is_read_is_named_as_cut_short(tmp_path: Path, start: int) -> None:
    file = tmp_path / "data"
    file.write_bytes(noise(2 * SECTOR_BYTES + 100))
    with BufferedReader(file) as reader, pytest.raises(CorruptCheckpointError, match=f"{file}.*is truncated"):
        reader.read(start, memoryview(bytearray(3 * SECTOR_BYTES)))


def test_what_lies_beside_a_range_is_left_alone(tmp_path: Path, directness) -> None:
    before = noise(4 * SECTOR_BYTES)
    file = tmp_path / "data"
    file.write_bytes(before)
    start, data = SECTOR_BYTES - 7, noise(SECTOR_BYTES + 14, seed=1)
    with DirectWriter(file) as writer:
        writer.write(start, at_offset(start, data))
        writer.sync()
    assert file.read_bytes() == before[:start] + data + before[start + len(data) :]


def test_parts_of_sectors_are_not_written_between_direct_writes(tmp_path: Path) -> None:
    """Each would wait for all of these. Of very many, some are written before the end: they would fill memory."""
    ranges, size = 700, 2 * SECTOR_BYTES
    data = noise(ranges * size)
    file = tmp_path / "data"
    posix.allocate_space(file, len(data) + 200)
    with DirectWriter(file) as writer, mock.patch.object(os, "pwrite", wraps=os.pwrite) as pwrite:
        lengths = []
        for start in range(100, len(data), size):
            writer.write(start, at_offset(start, data[start : start + size]))
            lengths.append([len(call.args[1]) for call in pwrite.call_args_list])
            pwrite.reset_mock()
        writer.sync()
    early = [number for number, written in enumerate(lengths) if written != [SECTOR_BYTES]]
    assert early == [255, 511]
    assert len(lengths[255]) == 1 + 512
    assert file.read_bytes()[100 : len(data)] == data[100:]


def test_ranges_of_less_than_a_sector_wait_too(tmp_path: Path) -> None:
    file, data = tmp_path / "data", noise(2 * SECTOR_BYTES)
    posix.allocate_space(file, len(data))
    with DirectWriter(file) as writer:
        with mock.patch.object(os, "pwrite", wraps=os.pwrite) as pwrite:
            writer.write(100, at_offset(100, data[100:2000]))
            writer.write(SECTOR_BYTES - 50, at_offset(SECTOR_BYTES - 50, data[SECTOR_BYTES - 50 : SECTOR_BYTES + 50]))
            assert not pwrite.called
        writer.sync()
    assert file.read_bytes()[100:2000] == data[100:2000]
    assert file.read_bytes()[SECTOR_BYTES - 50 : SECTOR_BYTES + 50] == data[SECTOR_BYTES - 50 : SECTOR_BYTES + 50]


@pytest.mark.parametrize("refusal", ["open", errno.EINVAL, errno.EOPNOTSUPP])
def test_without_direct_writes_little_goes_into_the_page_cache_at_once(tmp_path: Path, refusal: str | int) -> None:
    file, data, plain = tmp_path / "data", noise(2**20), os.pwrite
    posix.allocate_space(file, len(data))
    sizes: list[int] = []

    def written(fd: int, view: memoryview, at: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(refusal, "refused")
        sizes.append(len(view))
        return plain(fd, view, at)

    opened = {"return_value": None} if refusal == "open" else {"wraps": direct_io.open_direct}
    with (
        mock.patch.object(direct_io, "open_direct", **opened),
        DirectWriter(file) as writer,
        mock.patch.object(os, "pwrite", written),
    ):
        writer.write(0, at_offset(0, data))
    assert file.read_bytes() == data
    assert max(sizes) <= 2**17


def test_data_at_an_address_of_no_use_for_direct_writes_arrives_all_the_same(tmp_path: Path) -> None:
    file, data = tmp_path / "data", noise(3 * SECTOR_BYTES)
    posix.allocate_space(file, len(data))
    buffer = aligned_buffer(len(data) + 1).data
    buffer[1:] = data
    with DirectWriter(file) as writer:
        writer.write(0, buffer[1:])
    assert file.read_bytes() == data


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no tmpfs")
def test_files_in_memory_are_written_through_the_page_cache(tmp_path: Path) -> None:
    with TemporaryDirectory(dir="/dev/shm") as folder:
        assert is_in_memory(Path(folder))
        file = Path(folder, "data")
        file.write_bytes(b"old")
        with DirectWriter(file) as writer:
            assert writer.copies_bytes
            writer.write(0, memoryview(b"new"))
        assert file.read_bytes() == b"new"


@pytest.mark.parametrize("size", [0, 1, 100, 2 * 2**20 - 1, 2 * 2**20, 5 * 2**20 + 1])
def test_a_buffer_starts_on_a_page_and_is_zero(size: int) -> None:
    buffer = aligned_buffer(size)
    assert buffer.ctypes.data % (SECTOR_BYTES if size < 2 * 2**20 else 2 * 2**20) == 0
    assert bytes(buffer) == bytes(size)


def test_a_large_buffer_is_in_large_pages_where_the_system_has_them() -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[never]" in enabled.read_text():
        pytest.skip("this system has no large pages")
    buffer = aligned_buffer(32 * 2**20)
    before = large_pages()
    buffer[:] = 1
    assert large_pages() - before >= 16 * 2**20


@pytest.mark.parametrize("size", [2**20, 4 * 2**20])
def test_a_process_that_is_forked_has_no_part_in_a_buffer(size: int) -> None:
    """What two processes would both stage into, each would find the other's bytes in."""
    buffer = aligned_buffer(size)
    buffer[:] = 1
    child = os.fork()
    if not child:
        there = int(buffer.max())
        buffer[:] = 2
        os._exit(there)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0  # zeros
    assert int(buffer.min()) == int(buffer.max()) == 1


@pytest.mark.parametrize("size", [1000, 4 * 2**20])
def test_memory_that_cannot_be_had_is_the_usual_error(size: int) -> None:
    with (
        mock.patch("mmap.mmap", side_effect=OSError(errno.ENOMEM, "Cannot allocate memory")),
        pytest.raises(MemoryError, match="Cannot allocate memory"),
    ):
        aligned_buffer(size)


def large_pages() -> int:
    """Bytes of this process in large pages."""
    rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(row.split()[1]) * 1024 for row in rows if row.startswith("AnonHugePages"))


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("kind", [BufferedReader, DirectWriter, ExactReaderFactory()])
def test_no_file_stays_open(tmp_path: Path, kind) -> None:
    file = tmp_path / "data"
    file.write_bytes(b"x")
    before = open_descriptors()
    with kind(file) as opened:
        assert open_descriptors() > before
    assert open_descriptors() == before
    opened.close()  # once more does nothing


def test_no_file_stays_open_where_there_are_too_many(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(b"x")
    before = open_descriptors()
    with (
        mock.patch.object(direct_io, "open_direct", side_effect=OSError(errno.EMFILE, "Too many open files")),
        pytest.raises(StorageError, match=str(file)),
    ):
        DirectWriter(file)
    assert open_descriptors() == before


@pytest.mark.parametrize("kind", [BufferedReader, DirectWriter])
def test_a_file_that_is_not_there_is_named(tmp_path: Path, kind) -> None:
    with pytest.raises(StorageError, match=str(tmp_path / "absent")):
        kind(tmp_path / "absent")


def test_a_disk_that_is_full_is_an_error_naming_the_file(tmp_path: Path, directness) -> None:
    file = tmp_path / "data"
    posix.allocate_space(file, 3 * SECTOR_BYTES)
    with (
        DirectWriter(file) as writer,
        mock.patch.object(os, "pwrite", side_effect=OSError(errno.ENOSPC, "No space left on device")),
        pytest.raises(StorageError, match=f"{file}.*No space left") as caught,
    ):
        writer.write(0, at_offset(0, bytes(3 * SECTOR_BYTES)))
    assert caught.value.errno == errno.ENOSPC


def test_a_small_file_holds_its_bytes_and_is_never_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "small"
    posix.write_small(file, b"one")
    with pytest.raises(StorageError, match=str(file)) as caught:
        posix.write_small(file, b"two")
    assert caught.value.errno == errno.EEXIST
    assert posix.read_small(file) == b"one"
    assert posix.file_size(file) == 3


def test_a_small_file_that_is_large_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "large"
    with file.open("wb") as sparse:
        sparse.truncate(2**40)
    with pytest.raises(StorageError, match=str(file)) as caught:
        posix.read_small(file)
    assert caught.value.errno == errno.EFBIG


def test_an_allocated_file_has_its_size_and_was_not_there_before(tmp_path: Path) -> None:
    file = tmp_path / "data"
    posix.allocate_space(file, 3 * SECTOR_BYTES + 1)
    assert file.stat().st_size == 3 * SECTOR_BYTES + 1
    assert stat.S_IMODE(file.stat().st_mode) & 0o600 == 0o600
    with pytest.raises(StorageError, match=str(file)):
        posix.allocate_space(file, 1)


def draft_and_final(tmp_path: Path) -> tuple[Path, Path]:
    draft = tmp_path / ".tag.partial"
    draft.mkdir()
    (draft / "file").write_bytes(b"new")
    return draft, tmp_path / "tag"


@pytest.fixture(params=["renameat2", "no renameat2", "renameat2 refuses"])
def renaming(request: pytest.FixtureRequest):
    """Systems with an atomic rename that does not replace, without one, and file systems that refuse it."""
    if request.param == "renameat2":
        yield
        return
    library = mock.Mock(spec=[]) if request.param == "no renameat2" else mock.Mock()
    if request.param == "renameat2 refuses":
        library.renameat2.return_value = -1
    with (
        mock.patch.object(atomic_rename.ctypes, "CDLL", return_value=library),
        mock.patch.object(atomic_rename.ctypes, "get_errno", return_value=errno.EINVAL),
    ):
        yield


def test_a_finished_folder_gets_its_final_name(tmp_path: Path, renaming) -> None:
    draft, final = draft_and_final(tmp_path)
    atomic_rename.rename_noreplace(draft, final)
    assert not draft.exists()
    assert (final / "file").read_bytes() == b"new"


@pytest.mark.parametrize("taken_by", ["a folder", "an empty folder", "a file"])
def test_a_name_that_is_taken_is_never_replaced(tmp_path: Path, renaming, taken_by: str) -> None:
    draft, final = draft_and_final(tmp_path)
    if taken_by == "a file":
        final.write_bytes(b"old")
    else:
        final.mkdir()
        if taken_by == "a folder":
            (final / "file").write_bytes(b"old")
    with pytest.raises(TagExistsError, match=str(final)):
        atomic_rename.rename_noreplace(draft, final)
    assert (draft / "file").read_bytes() == b"new"
    assert final.is_file() or [file.read_bytes() for file in final.iterdir()] in ([b"old"], [])


def test_a_draft_that_is_gone_is_named(tmp_path: Path, renaming) -> None:
    with pytest.raises(StorageError, match="draft"):
        atomic_rename.rename_noreplace(tmp_path / "draft", tmp_path / "final")


def test_a_tree_is_removed_and_one_that_is_gone_is_fine(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/file").write_bytes(b"x")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_bytes(b"x")
    (tmp_path / "a/link").symlink_to(tmp_path / "outside")
    directory_trees.remove_tree(tmp_path / "a")
    directory_trees.remove_tree(tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["outside"]
    assert (tmp_path / "outside/file").exists()


def test_folders_are_made_with_their_parents_and_their_names_are_listed(tmp_path: Path) -> None:
    for name in ("b/c", "a", ".hidden"):
        posix.make_directory(tmp_path / name)
        posix.make_directory(tmp_path / name)
    (tmp_path / "file").write_bytes(b"")
    assert posix.list_names(tmp_path) == {"a", "b", ".hidden", "file"}
    assert posix.list_names(tmp_path / "absent") == set()
    assert posix.list_names(tmp_path / "file") == set()
    posix.fsync_directory(tmp_path)


@pytest.fixture
def refused(tmp_path: Path) -> Iterator[None]:
    """The file system refuses to say what ``manifest.json`` is."""
    (tmp_path / "manifest.json").touch()
    with mock.patch.object(stat, "S_ISREG", side_effect=OSError(errno.EACCES, "Permission denied")):
        yield


def test_a_directory_that_may_not_be_searched_has_no_file(tmp_path: Path, refused: None) -> None:
    with mock.patch("os.access", return_value=False):
        assert posix.is_directory_without(tmp_path, "manifest.json")


def test_if_access_is_refused_only_for_the_moment_it_is_unknown_what_a_directory_has(
    tmp_path: Path, refused: None
) -> None:
    """A job that takes a checkpoint for missing begins a new run."""
    with pytest.raises(StorageError, match="Permission denied"):
        posix.is_directory_without(tmp_path, "manifest.json")


def test_what_lacks_a_file_is_told_from_what_is_not_there(tmp_path: Path) -> None:
    for name in ("with", "without", "folder/file"):
        posix.make_directory(tmp_path / name)
    (tmp_path / "with/file").write_bytes(b"")
    (tmp_path / "a file").write_bytes(b"")
    (tmp_path / "link").symlink_to("with")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    actual = {name: posix.is_directory_without(tmp_path / name, "file") for name in ("with", "link", "absent")}
    assert actual == dict.fromkeys(actual, False)
    actual = {
        name: posix.is_directory_without(tmp_path / name, "file")
        for name in ("without", "folder", "a file", "dangling", "loop")
    }
    assert actual == dict.fromkeys(actual, True)


def test_what_is_renamed_while_it_is_looked_at_does_not_lack_anything(tmp_path: Path) -> None:
    """Another folder may have its name meanwhile, and it may have been emptied."""
    (tmp_path / "a").mkdir()
    look = posix._has_file

    def change(*arguments: Any) -> bool:
        (tmp_path / "a").rename(tmp_path / "b")
        (tmp_path / "a").mkdir()
        return look(*arguments)

    with mock.patch.object(posix, "_has_file", change):
        assert not posix.is_directory_without(tmp_path / "a", "file")


def test_a_durable_folder_is_synced_where_it_was_not_there_and_so_are_those_above_it(tmp_path: Path) -> None:
    with mock.patch.object(posix, "fsync_directory") as synced:
        posix.make_durable_directory(tmp_path / "a/b/c")
        assert {call.args[0] for call in synced.mock_calls} == {tmp_path, tmp_path / "a", tmp_path / "a/b"}
        synced.reset_mock()
        posix.make_durable_directory(tmp_path / "a/b/c")
        synced.assert_not_called()


def test_a_rename_from_one_folder_into_another_syncs_both(tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden/draft").write_bytes(b"")
    with mock.patch.object(atomic_rename, "fsync_directory") as synced:
        atomic_rename.replace_file(tmp_path / "hidden/draft", tmp_path / "final")
    assert {call.args[0] for call in synced.mock_calls} == {tmp_path, tmp_path / "hidden"}


def test_a_folder_where_a_file_is_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="file"):
        posix.make_directory(tmp_path / "file")
    with pytest.raises(StorageError, match="file"):
        posix.fsync_directory(tmp_path / "file")


def test_a_regular_file_inside_is_fine_and_so_is_a_link_that_stays_inside(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        posix.check_regular(tmp_path / name, within=(tmp_path,))


def entry(folder: Path, kind: str) -> Path:
    """Something in a folder that is no file of its own."""
    path = folder / "inside" / "it"
    path.parent.mkdir()
    outside = folder / "outside"
    outside.write_bytes(b"")
    if kind == "link out":
        path.symlink_to("../outside")
    elif kind == "link to an absolute path":
        path.symlink_to("/etc/passwd")
    elif kind == "link to a link out":
        (path.parent / "second").symlink_to(outside)
        path.symlink_to("second")
    elif kind == "folder linked out":
        (path.parent / "sub").symlink_to(folder)
        return path.parent / "sub" / "outside"
    elif kind == "out through its parent":
        return path.parent / ".." / "outside"
    elif kind == "folder":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    return path


@pytest.mark.parametrize(
    "kind",
    [
        "link out",
        "link to an absolute path",
        "link to a link out",
        "folder linked out",
        "out through its parent",
        "folder",
        "FIFO",
    ],
)
def test_what_is_no_regular_file_inside_is_refused(tmp_path: Path, kind: str) -> None:
    path = entry(tmp_path, kind)
    with pytest.raises(UnsafeNameError, match=str(path)):
        posix.check_regular(path, within=(tmp_path / "inside",))


def test_a_link_to_itself_is_an_error_naming_it(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "loop", tmp_path / "absent", tmp_path / ("x" * 300)):
        with pytest.raises(StorageError, match=path.name):
            posix.check_regular(path, within=(tmp_path,))


def test_a_lock_that_is_closed_twice_closes_nobody_elses_file(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    lock.close()
    with (tmp_path / "mine").open("wb") as mine:  # gets the number that is free
        lock.close()
        mine.write(b"whole")
    assert (tmp_path / "mine").read_bytes() == b"whole"


def rename_twice(rename: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
    """Rename like a client whose server was restarted before it replied: the second call finds no source."""

    def call_again(source: Path, target: Path) -> Path:
        rename(source, target)
        return rename(source, target)

    return call_again


@pytest.mark.parametrize("publish", ["rename_noreplace", "replace_file", "rename_path"])
def test_a_rename_that_a_server_executed_before_its_restart_is_done(tmp_path: Path, publish: str) -> None:
    staging, final = tmp_path / "staging", tmp_path / "final"
    staging.write_bytes(b"new")
    with (
        mock.patch.object(atomic_rename, "_renameat2", return_value=False),
        mock.patch.object(Path, "rename", rename_twice(Path.rename)),
    ):
        getattr(atomic_rename, publish)(staging, final)
    assert final.read_bytes() == b"new"
    assert not staging.exists()


def test_an_exchange_that_a_server_executed_before_its_restart_is_done(tmp_path: Path) -> None:
    for name in ("staging", "final"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    with (
        mock.patch.object(atomic_rename, "_renameat2", return_value=False),
        mock.patch.object(Path, "rename", rename_twice(Path.rename)),
    ):
        atomic_rename.exchange_directories(tmp_path / "staging", tmp_path / "final", tmp_path / "displaced")
    assert (tmp_path / "final/file").read_text() == "staging"
    assert (tmp_path / "displaced/file").read_text() == "final"


def test_a_rename_of_something_that_another_process_removed_is_an_error(tmp_path: Path) -> None:
    """Even if another file has the final name."""
    (tmp_path / "staging").write_bytes(b"new")

    def remove_and_rename(source: Path, target: Path) -> Path:
        source.unlink()
        target.write_bytes(b"other")
        raise FileNotFoundError(2, "No such file or directory")

    with mock.patch.object(Path, "rename", remove_and_rename), pytest.raises(StorageError):
        atomic_rename.rename_path(tmp_path / "staging", tmp_path / "final")


def test_links_and_pipes_in_a_tree_are_made_durable_with_their_directory(tmp_path: Path) -> None:
    """An open of a link that leads nowhere fails, and one of a pipe waits for a writer."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/file").write_bytes(b"1")
    (tmp_path / "sub/nowhere").symlink_to(tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe")
    synced = []
    with mock.patch.object(posix, "fsync_path", synced.append):
        posix.sync_tree(tmp_path)
    assert synced == [tmp_path / "sub/file", tmp_path / "sub", tmp_path]


def test_a_tree_that_cannot_be_listed_is_an_error_that_names_it(tmp_path: Path) -> None:
    failing = mock.patch("os.scandir", side_effect=OSError(errno.EIO, "Input/output error"))
    with failing, pytest.raises(StorageError, match=f"could not list {tmp_path}"):
        posix.sync_tree(tmp_path)


def test_a_file_of_a_user_that_may_not_be_read_does_not_stop_a_tree_from_being_durable(tmp_path: Path) -> None:
    for name in ("private", "written"):
        (tmp_path / name).write_bytes(b"1")
    original, synced = os.open, []

    def open_allowed(path: Path, *rest: Any) -> int:
        if Path(path).name == "private":
            raise PermissionError(errno.EACCES, "Permission denied")
        synced.append(Path(path).name)
        return original(path, *rest)

    with mock.patch("os.open", open_allowed):
        posix.sync_tree(tmp_path)
    assert synced == ["written", tmp_path.name]
