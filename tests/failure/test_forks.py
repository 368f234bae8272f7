"""Tests that a process that is forked during a save keeps nothing of it."""

import gc
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import rankless
import rankless.errors
from rankless.engine.io.write import write_file_ranges
from rankless.process.gc_pause import gc_paused
from rankless.storage.file_lock import FileLock
from tests.helpers.processes import run_code

FORK = multiprocessing.get_context("fork")


def run_in_fork(function: Callable[[], Any]) -> Any:
    """What a function gives in a forked process, which has ten seconds."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=lambda: theirs.send(function()))
    process.start()
    try:
        assert ours.poll(10), "the forked process hangs"
        return ours.recv()
    finally:
        process.kill()
        process.join()


@contextmanager
def writing_stopped() -> Iterator[threading.Event]:
    """Writing goes on when the event is set."""
    go_on = threading.Event()

    def write(*arguments: Any, **options: Any) -> Any:
        result = write_file_ranges(*arguments, **options)
        go_on.wait(30)
        return result

    with mock.patch("rankless.save.shard_writer.write_file_ranges", write):
        yield go_on


def open_files_below(folder: Path) -> list[str]:
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # it was open while the folder was listed only
            links.append(str(descriptor.readlink()))
    return [link for link in links if link.startswith(str(folder))]


@contextmanager
def files_open(folder: Path) -> Iterator[None]:
    """A save whose files are open: it is in the middle of its writing."""
    from rankless.engine.io import write

    fill, is_filling, go_on = write.copy_and_hash, threading.Event(), threading.Event()

    def stop(*arguments: Any) -> Any:
        is_filling.set()
        go_on.wait(30)
        return fill(*arguments)

    with mock.patch.object(write, "copy_and_hash", stop):
        rankless.save_checkpoint(folder, "s", {"w": torch.ones(2**20)}, async_save=True)
        assert is_filling.wait(10)
        try:
            yield
        finally:
            go_on.set()
            rankless.finalize()


def test_a_forked_worker_has_no_file_of_the_save_open(tmp_path: Path) -> None:
    with files_open(tmp_path):
        assert open_files_below(tmp_path)
        assert run_in_fork(lambda: open_files_below(tmp_path)) == []
        assert open_files_below(tmp_path)
    assert rankless.open(tmp_path)["model/w"].sum() == 2**20


def test_a_forked_worker_does_not_hold_the_lock_and_does_not_release_it(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    pause = FORK.Event()
    worker = FORK.Process(target=pause.wait, args=(30,))
    worker.start()
    try:
        with pytest.raises(BlockingIOError):
            FileLock(tmp_path / "lock")
        lock.close()
        FileLock(tmp_path / "lock").close()
    finally:
        pause.set()
        worker.join()


def test_a_lock_is_released_though_another_process_has_its_descriptor(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    copy = os.dup(lock.fd)  # as a process that is started by other means than Python's may have
    lock.close()
    FileLock(tmp_path / "lock").close()
    os.close(copy)


def test_a_worker_that_is_forked_during_the_copy_steps_and_finalizes_without_waiting(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    from rankless.engine.io import staging

    copy, is_copying, go_on = staging._copy_chunk, threading.Event(), threading.Event()

    def stop(*arguments: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            is_copying.set()
            go_on.wait(30)
        copy(*arguments)

    def step() -> str:
        own = torch.nn.Parameter(torch.ones(2))
        own.grad = torch.ones(2)  # torch may refuse backward() in a forked process
        torch.optim.SGD([own], lr=0.1).step()
        rankless.finalize()
        return "stepped"

    with mock.patch.object(staging, "_copy_chunk", stop):
        rankless.save_checkpoint(tmp_path, "s", model, optimizer, async_save=True, staging="overlapped")
        assert is_copying.wait(10)
        try:
            assert run_in_fork(step) == "stepped"
        finally:
            go_on.set()
    rankless.finalize()
    assert rankless.has_checkpoint(tmp_path)


def test_a_forked_process_saves_by_itself(tmp_path: Path) -> None:
    checkpointer = rankless.RunDirectory(tmp_path / "run", async_save=True)

    def save() -> list[str]:
        checkpointer.save("forked", {"w": torch.zeros(3)}).wait()
        return [info.tag for info in checkpointer.list()]

    with writing_stopped() as go_on:
        checkpointer.save("own", {"w": torch.ones(3)})
        time.sleep(0.1)
        with mock.patch("rankless.save.shard_writer.write_file_ranges", write_file_ranges):
            assert run_in_fork(save) == ["forked"]
        go_on.set()
        checkpointer.finalize()
    assert sorted(info.tag for info in checkpointer.list()) == ["forked", "own"]


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_a_process_that_a_listener_forks_and_ends_leaves_the_save_alone(tmp_path: Path, mode: str) -> None:
    code = """
import os, sys, torch, rankless
forked = []
def listen(event):
    if not forked and isinstance(event, rankless.Progress):
        forked.append(os.fork())
        if not forked[0]:
            sys.exit(0)  # which unwinds the save
        os.waitpid(forked[0], 0)
state, in_background = {"w": torch.ones(100)}, sys.argv[2] == "asynchronous"
rankless.save_checkpoint(sys.argv[1], "s", state, on_event=listen, async_save=in_background)
rankless.finalize()
"""
    run_code(code, tmp_path, mode, check=True)
    assert rankless.open(tmp_path)["model/w"].sum() == 100


def test_a_forked_process_cannot_wait_for_the_save_and_collects_garbage_again(tmp_path: Path) -> None:
    def look() -> tuple[str, bool]:
        try:
            handle.wait()
        except rankless.errors.StateError as error:
            return str(error), gc.isenabled()
        return "", gc.isenabled()

    with writing_stopped() as go_on:
        handle = rankless.save_checkpoint(tmp_path, "s", {"w": torch.ones(3)}, async_save=True)
        with gc_paused():
            message, collects = run_in_fork(look)
        go_on.set()
        handle.wait()
    assert "runs in the process that this one was forked from" in message
    assert collects


def save_in_fork(directory: rankless.RunDirectory, tags: dict[str, float]) -> None:
    for tag, value in tags.items():
        directory.save(tag, {"w": torch.full((3,), value)}, step=value)
    directory.wait()


def latest(run: Path) -> tuple[str, float]:
    state = {"w": torch.zeros(3)}
    loaded = rankless.restore(run, None, state)
    return loaded.tag, float(state["w"][0])


class TestLocalTier:
    """A forked process saves into the tier as a part of the job."""

    def test_numbers_go_on_although_the_folder_was_removed(self, tmp_path: Path) -> None:
        run, folder = tmp_path / "run", tmp_path / "tier"
        directory = rankless.RunDirectory(run, local=rankless.LocalTier(folder, drain_every=1), keep=1)
        save_in_fork(directory, {"step_1": 1.0})
        run_in_fork(lambda: save_in_fork(directory, {"step_2": 2.0, "step_3": 3.0}))
        shutil.rmtree(folder)
        save_in_fork(directory, {"step_4": 4.0})
        assert latest(run) == ("step_4", 4.0)

    def test_the_end_of_the_job_drains_what_a_forked_process_has_saved(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        directory = rankless.RunDirectory(run, local=rankless.LocalTier(tmp_path / "tier", drain_every=100))
        save_in_fork(directory, {"step_1": 1.0})
        run_in_fork(lambda: save_in_fork(directory, {"step_2": 2.0}))
        directory.finalize()
        assert latest(run) == ("step_2", 2.0)


def test_a_follower_of_weights_does_not_follow_in_place_of_its_parent(tmp_path: Path) -> None:
    """Both would write into one folder: the lock is the parent's."""
    model, weights = {"w": torch.zeros(3)}, tmp_path / "weights"

    def follow() -> str:
        with pytest.raises(rankless.StateError) as caught:
            follower.update()
        return str(caught.value)

    with rankless.WeightPublisher(weights, async_save=False) as publisher:
        publisher.publish(model)
        with rankless.WeightFollower(weights, tmp_path / "followed", process_group="self") as follower:
            follower.update()
            publisher.publish(model)
            assert "of the parent process" in run_in_fork(follow)
            assert follower.update() is not None
