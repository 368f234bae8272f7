"""Tests asynchronous saves: they have the state at the call, raise their errors, and finish before the process ends."""

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import rankless
from rankless import api
from rankless.errors import RankFailedError, RanklessError, RankTimeoutError, StateError, StorageError
from rankless.save.background import background_saves
from rankless.save.shard_writer import ShardWriter
from rankless.save.training_content import TrainingContent
from tests.helpers.file_contents import read_state_files
from tests.helpers.layouts import LAYOUTS, fill_run, local_tensor, named_tensors
from tests.helpers.pairwise import first_of
from tests.helpers.pool import Ranks
from tests.helpers.processes import run_code, start_code
from tests.helpers.run_directories import list_names
from tests.helpers.slow_writes import slow_down_writes


def test_it_returns_before_it_is_committed_and_wait_tells_when(tmp_path: Path) -> None:
    with slow_down_writes():
        handle = rankless.save_checkpoint(tmp_path, "s", {"w": torch.ones(4)}, async_save=True)
        assert not handle.done()
        assert handle.path == tmp_path / "s"
        assert not handle.path.exists()
        with pytest.raises(RankTimeoutError, match="still in progress"):
            handle.wait(0.01)
        assert handle.wait().tag == "s"
    assert handle.done()
    assert handle.path.is_dir()


def test_what_changes_after_the_call_is_not_in_the_file(tmp_path: Path) -> None:
    content = {"list": [1], "tensor": torch.zeros(3)}
    model = {"w": torch.arange(1000.0), "strided": torch.arange(12.0).view(3, 4).T}
    for number in range(20):
        before = {name: tensor.clone() for name, tensor in model.items()}
        rankless.save_checkpoint(tmp_path, f"s{number}", model, user_content=content, async_save=True)
        for tensor in (*model.values(), content["tensor"]):
            tensor.add_(1)
        content["list"][0] += 1
        rankless.finalize()
        checkpoint = rankless.open(tmp_path / f"s{number}")
        assert all(torch.equal(checkpoint[f"model/{name}"], tensor) for name, tensor in before.items())
        assert checkpoint.values["user_content"]["list"] == [number + 1]
        assert torch.equal(checkpoint.values["user_content"]["tensor"], torch.full((3,), float(number)))


def test_one_save_is_under_way_at_a_time_and_the_next_one_waits(tmp_path: Path) -> None:
    with slow_down_writes(0.3):
        first = rankless.save_checkpoint(tmp_path, "a", {"w": torch.ones(1)}, async_save=True)
        second = rankless.save_checkpoint(tmp_path, "b", {"w": torch.ones(1)}, async_save=True)
        assert first.done()
        assert not second.done()
    rankless.finalize()
    assert [info.tag for info in rankless.list_checkpoints(tmp_path)] == ["a", "b"]


def test_a_failure_in_the_background_comes_out_at_the_next_save_or_finalize_and_once(tmp_path: Path) -> None:
    disk_full = StorageError(28, "the disk is full")
    broken = mock.patch("rankless.save.shard_writer.write_file_ranges", side_effect=disk_full)
    for ask in (rankless.finalize, lambda: rankless.save_checkpoint(tmp_path, "next", {"w": torch.ones(1)})):
        with broken:
            handle = rankless.save_checkpoint(tmp_path, "s", {"w": torch.ones(1)}, async_save=True)
            with pytest.raises(StorageError, match="the disk is full"):
                handle.wait()
        with pytest.raises(StorageError, match="the disk is full"):
            ask()
        rankless.finalize()
    assert [info.tag for info in rankless.list_checkpoints(tmp_path)] == ["next"]


def test_a_context_manager_waits(tmp_path: Path) -> None:
    with slow_down_writes(0.2), rankless.RunDirectory(tmp_path, async_save=True) as checkpointer:
        checkpointer.save("s", {"w": torch.ones(1)})
    assert rankless.has_checkpoint(tmp_path)


def test_the_arena_is_used_again(tmp_path: Path) -> None:
    from rankless.engine.io import staging_memory

    rankless.finalize()  # which gives back what tests before have left
    made = []
    make = staging_memory.aligned_buffer
    with mock.patch.object(staging_memory, "aligned_buffer", lambda size: made.append(size) or make(size)):
        checkpointer = rankless.RunDirectory(tmp_path, async_save=True)
        for number in range(4):
            checkpointer.save(f"s{number}", {"w": torch.ones(1000)}).wait()
    assert len(made) == 1


def test_saves_of_different_paths_use_the_same_memory_and_finalize_frees_it(tmp_path: Path) -> None:
    rankless.finalize()
    memory = background_saves._memory
    for number in range(8):
        saved = rankless.save_checkpoint(tmp_path / str(number), "s", {"w": torch.ones(2**20)}, async_save=True)
        saved.wait()
        rankless.save_model({"w": torch.ones(2**18)}, tmp_path / f"{number}.safetensors", async_save=True).wait()
    (idle,) = memory._idle
    assert 2**22 <= len(idle) < 2**22 + 2**20
    with slow_down_writes(0.3):
        for number in range(5):  # these overlap, and each needs memory of its own
            rankless.save_checkpoint(tmp_path / f"o{number}", "s", {"w": torch.ones(2**18)}, async_save=True)
    rankless.RunDirectory(tmp_path / "o4").finalize()
    for number in range(4):
        rankless.RunDirectory(tmp_path / f"o{number}").finalize()
    assert len(memory._idle) <= 2
    rankless.finalize()
    assert memory._idle == []


def test_default_instances_of_many_paths_are_not_kept(tmp_path: Path) -> None:
    first = rankless.save_checkpoint(tmp_path / "0", "s", {"w": torch.ones(1)}).wait()
    for number in range(1, 40):
        rankless.save_checkpoint(tmp_path / str(number), "s", {"w": torch.ones(1)})
    assert len(api._defaults._directories) <= 16
    again = rankless.save_checkpoint(tmp_path / "0", "t", {"w": torch.ones(1)}).wait()
    assert again.run == first.run


def save_then_change(path: str, layout: str) -> None:
    run = fill_run(LAYOUTS[layout][0]())
    rankless.save_checkpoint(path, "s", run.model, run.optimizer, async_save=True)
    with torch.no_grad():
        for _, tensor in named_tensors(run):
            local_tensor(tensor).fill_(3)
    rankless.finalize()


@pytest.mark.parametrize(
    ("layout", "n"),
    [
        pytest.param(layout, n, marks=() if n == max(size for size in sizes if size <= 4) else pytest.mark.full)
        for layout, (_, sizes) in LAYOUTS.items()
        if not layout.startswith("pp")
        for n in sizes
    ],
)
def test_the_files_are_those_of_a_synchronous_save_in_every_layout(
    ranks: Ranks, tmp_path: Path, layout: str, n: int
) -> None:
    run = fill_run(LAYOUTS["plain"][0]())
    rankless.save_checkpoint(tmp_path / "plain", "s", run.model, run.optimizer)
    ranks(n, save_then_change, str(tmp_path / "other"), layout)
    assert read_state_files(tmp_path / "other/s") == read_state_files(tmp_path / "plain/s")


def one_fails(path: str) -> str:
    model = {"w": torch.ones(4)}
    broken = mock.patch.object(ShardWriter, "write", side_effect=KeyError("lost"))
    with broken if dist.get_rank() == 1 else contextlib.nullcontext():
        try:
            handle = rankless.save_checkpoint(path, "s", model, async_save=True)
            handle.wait()
        except RanklessError as error:
            with pytest.raises(RankFailedError):
                rankless.finalize()
            return str(error)
    return "saved"


def test_a_rank_that_fails_in_the_background_fails_all(ranks: Ranks, tmp_path: Path) -> None:
    (message,) = set(ranks(3, one_fails, str(tmp_path)))
    assert "rank 1 of 3, writing: KeyError" in message
    assert not list_names(tmp_path)


SCRIPT = """
import pathlib, sys, time
import torch, torch.distributed as dist
import rankless
from tests.helpers.rendezvous import join_store, serve_store
rank, size, path, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
store = (join_store if rank else serve_store)(pathlib.Path(sys.argv[5]))
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
import rankless.save.shard_writer as moving
write = moving.write_file_ranges
moving.write_file_ranges = lambda *a, **o: (time.sleep(0.5 + 0.5 * rank), write(*a, **o))[1]
rankless.save_checkpoint(path, "s", {"w": torch.arange(100_000.0)}, async_save=True)
if how == "destroyed":
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["destroyed", "left"])
def test_a_script_that_simply_ends_has_its_save_committed(tmp_path: Path, how: str) -> None:
    """Rank 0, in whose process the store is, has the least to do and ends first."""
    arguments = ["3", str(tmp_path / "run"), how, str(tmp_path / "port")]
    with contextlib.ExitStack() as job:
        processes = [job.enter_context(start_code(SCRIPT, str(rank), *arguments)) for rank in range(3)]
        assert [process.wait(240) for process in processes] == [0, 0, 0]
    assert torch.equal(load_file(tmp_path / "run/s/model/model.safetensors")["w"], torch.arange(100_000.0))


def test_an_interpreter_that_dies_leaves_nothing_half_committed(tmp_path: Path) -> None:
    code = (
        "import sys, os, time, torch, rankless, rankless.save.shard_writer as moving\n"
        "moving.write_file_ranges = lambda *a, **o: time.sleep(60)\n"
        "rankless.save_checkpoint(sys.argv[1], 'a', {'w': torch.ones(4)}, async_save=True)\n"
        "os._exit(3)\n"
    )
    assert run_code(code, tmp_path).returncode == 3
    assert rankless.list_checkpoints(tmp_path) == []
    rankless.save_checkpoint(tmp_path, "b", {"w": torch.ones(4)})
    assert [info.tag for info in rankless.list_checkpoints(tmp_path)] == ["b"]


def test_training_threads_are_not_given_way_to(tmp_path: Path) -> None:
    """Only the writing is lower in priority, and nobody else's thread is."""
    seen = []

    def write(*_: Any, **__: Any) -> Any:
        import os

        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        raise StorageError(5, "enough")

    with mock.patch("rankless.save.shard_writer.write_file_ranges", write):
        handle = rankless.save_checkpoint(tmp_path, "s", {"w": torch.ones(4)}, async_save=True)
        with pytest.raises(StorageError):
            handle.wait()
        with pytest.raises(StorageError):
            rankless.finalize()

    assert seen == [min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)]


def test_a_save_whose_end_was_not_awaited_is_still_awaited_by_the_next(tmp_path: Path) -> None:
    """Interrupted while it waited; the arena must not be used again before."""
    model = {"w": torch.ones(1000)}
    checkpointer = rankless.RunDirectory(tmp_path, async_save=True)
    with slow_down_writes(0.5):
        checkpointer.save("a", model)
        model["w"].fill_(2)
        with (
            mock.patch("rankless.save.background.wait", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            checkpointer.save("b", model)
        checkpointer.save("b", model)
        checkpointer.finalize()
    assert float(rankless.open(tmp_path / "a")["model/w"][0]) == 1.0
    assert [info.sequence for info in rankless.list_checkpoints(tmp_path)] == [1, 2]


INTERRUPTED = """
import os, sys, threading, time, signal
import torch, rankless
from rankless.engine.io import write
fill, started = write.copy_and_hash, []
def slow(*a):
    if not started:
        started.append(threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start())
    time.sleep(1)
    return fill(*a)
write.copy_and_hash = slow
try:
    rankless.save_checkpoint(sys.argv[1], "s", {"w": torch.ones(8_000_000)})
except KeyboardInterrupt:
    pass
files = [open(f"{sys.argv[1]}/mine{i}", "wb") for i in range(6)]
time.sleep(2)
print(sum(os.fstat(f.fileno()).st_size for f in files), threading.active_count())
"""


def test_an_interrupted_save_writes_nothing_afterwards(tmp_path: Path) -> None:
    """The numbers of its closed files are those of others by then."""
    done = run_code(INTERRUPTED, tmp_path, check=True)
    assert done.stdout.split() == ["0", "1"]
    assert not [name for name in list_names(tmp_path) if (tmp_path / name).is_dir()]


def test_finalize_waits_for_all_saves_also_where_one_has_failed_oddly(tmp_path: Path) -> None:
    with slow_down_writes(0.4):
        with mock.patch.object(TrainingContent, "write_and_commit", side_effect=MemoryError):
            rankless.save_checkpoint(tmp_path / "x", "s", {"w": torch.ones(1)}, async_save=True)
            time.sleep(0.1)
        other = rankless.save_checkpoint(tmp_path / "y", "s", {"w": torch.ones(1)}, async_save=True)
        with pytest.raises(MemoryError):
            rankless.finalize()
        assert other.done()


def fail_and_look_for_the_group(path: str) -> bool:
    """Whether a group that was destroyed is alive after a save over it that failed, which nobody asked about."""
    import gc
    import weakref

    group = dist.new_group([0, 1])
    alive, model = weakref.ref(group), torch.nn.Linear(2, 2)
    run = rankless.RunDirectory(path, process_group=group, async_save=True)
    with mock.patch("rankless.save.shard_writer.write_file_ranges", side_effect=StorageError(28, "the disk is full")):
        run.save("s", model)
        while background_saves._flights[-1].thread.is_alive():
            time.sleep(0.01)
    dist.destroy_process_group(group)
    del run, group
    gc.collect()
    return alive() is not None


def test_a_failure_that_nobody_asks_about_does_not_keep_the_process_group(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, fail_and_look_for_the_group, str(tmp_path)) == [False, False]


def test_each_failure_is_raised_once_also_if_several_saves_have_failed(tmp_path: Path) -> None:
    with mock.patch("rankless.save.shard_writer.write_file_ranges", side_effect=StorageError(28, "the disk is full")):
        for number in range(2):
            rankless.save_checkpoint(tmp_path / str(number), "s", {"w": torch.ones(1)}, async_save=True)
        for _ in range(2):
            with pytest.raises(StorageError, match="the disk is full"):
                rankless.finalize()
    rankless.finalize()


def in_threads(number: int, function: Any) -> list[BaseException | None]:
    errors: list[BaseException | None] = [None] * number

    def run(at: int) -> None:
        try:
            function(at)
        except BaseException as error:  # noqa: BLE001
            errors[at] = error

    threads = [threading.Thread(target=run, args=(at,)) for at in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return errors


def test_one_of_several_threads_that_finalize_gets_the_error(tmp_path: Path) -> None:
    with (
        mock.patch("rankless.engine.io.write.write_file_ranges", side_effect=StorageError(28, "full")),
        slow_down_writes(0.2),
    ):
        rankless.save_checkpoint(tmp_path, "s", {"w": torch.ones(1)}, async_save=True)
        errors = in_threads(3, lambda _: rankless.finalize())
    assert sorted(type(error).__name__ for error in errors) == ["NoneType", "NoneType", "StorageError"]


@pytest.mark.parametrize("async_save", [False, True])
def test_threads_that_save_to_one_path_take_turns(tmp_path: Path, async_save: bool) -> None:
    def save(at: int) -> None:
        size = (64, 96, 32)[at]
        for number in range(6):
            model = {"w": torch.full((size, size), float(at))}
            rankless.save_checkpoint(tmp_path, f"{at}_{number}", model, async_save=async_save)

    assert in_threads(3, save) == [None] * 3
    rankless.finalize()
    for at, size in enumerate((64, 96, 32)):
        for number in range(6):
            assert torch.equal(
                rankless.open(tmp_path, f"{at}_{number}")["model/w"], torch.full((size, size), float(at))
            )


def test_a_listener_may_save_and_finalize_but_not_wait_for_its_own_save(tmp_path: Path) -> None:
    seen: list[object] = []

    def listen(event: object) -> None:
        if isinstance(event, rankless.Saved) and not seen:
            seen.append(event)
            with pytest.raises(StateError, match="a listener of the save"):
                handles[0].wait()
            rankless.finalize()
            rankless.save_checkpoint(tmp_path, "second", {"w": torch.ones(1)})
            seen.append("saved")

    handles: list[Any] = []
    with slow_down_writes(0.2):
        handles.append(rankless.save_checkpoint(tmp_path, "s", {"w": torch.ones(1)}, async_save=True, on_event=listen))
        handles[0].wait(30)
    assert seen[1:] == ["saved"]
    assert {info.tag for info in rankless.list_checkpoints(tmp_path)} == {"s", "second"}


@first_of(1, "saves", [5, 20])
def test_polling_gives_the_result_or_says_that_it_is_not_there_yet(tmp_path: Path, saves: int) -> None:
    for number in range(saves):
        handle = rankless.save_checkpoint(tmp_path, f"s{number}", {"w": torch.ones(1)}, async_save=True)
        while True:
            try:
                assert handle.wait(0).tag == f"s{number}"
                break
            except RankTimeoutError:
                continue
