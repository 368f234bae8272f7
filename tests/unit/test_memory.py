"""Tests that saving and loading need only a few buffers in addition to the state, whatever its size."""

import subprocess
import sys
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import rankless
from rankless.engine.io.staging_memory import StagingMemory
from rankless.save.save_operation import SaveOperation
from rankless.storage.aligned_memory import Bytes
from tests.helpers.pairwise import first_of

SCRIPT = """
import sys, threading, time
import torch, rankless
path, layout, *sizes = sys.argv[1:]
rankless.save_checkpoint(path + "/warm", "s", {"w": torch.ones(3)}, rng=False)
rankless.load_checkpoint(path + "/warm", model={"w": torch.ones(3)})

def resident():
    with open("/proc/self/status") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith(("RssAnon", "RssShmem"))) * 1024

def watch():
    global peak
    while running:
        peak = max(peak, resident())
        time.sleep(0.002)

for megabytes in map(int, sizes):
    state = {f"t{i}": torch.empty(megabytes * 2**20 // 4 // 4).fill_(i) for i in range(4)}
    if layout == "strided":
        state = {name: tensor.view(1024, -1).t() for name, tensor in state.items()}
    for action in ("save", "load"):
        before, peak, running = resident(), 0, True
        thread = threading.Thread(target=watch)
        thread.start()
        if action == "save":
            rankless.save_checkpoint(path, f"s{megabytes}", state)
        else:
            rankless.load_checkpoint(path, model=state)
        running = False
        thread.join()
        assert all((tensor == i).all() for i, tensor in enumerate(state.values()))
        print(peak - before)
        for tensor in state.values():
            tensor.zero_()
"""


@pytest.mark.parametrize("layout", ["plain", pytest.param("strided", marks=pytest.mark.full)])
def test_memory_beside_the_state_does_not_grow_with_it(tmp_path: Path, layout: str) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), layout, "64", "256"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    beside = [int(line) for line in done.stdout.split()]
    assert len(beside) == 4
    # Less than nothing, if what the save before had cached was released meanwhile.
    assert all(size < 64 * 2**20 for size in beside), beside
    assert max(beside) > 0


FLAT = """
import ctypes, sys, time, torch, rankless
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters())
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)

def resident():
    rankless.finalize()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what malloc keeps in its arenas for later varies by megabytes
    with open("/proc/self/status") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith(("RssAnon", "RssShmem"))) * 1024

for number in range(int(sys.argv[2])):
    optimizer.step()
    rankless.save_checkpoint(sys.argv[1], f"s{number}", model, optimizer, user_content={"losses": [0.5] * 1000},
                             async_save=True, staging=("eager", "overlapped")[number % 2], keep=1)
    if number == 10:
        before = resident()
growth = [resident() - before]
while growth[-1] > 5 * 2**20 and len(growth) < 20:  # the thread of the last save may not have ended
    time.sleep(0.1)
    growth.append(resident() - before)
print(growth[-1])
"""


@first_of(1, "saves", [30, 100])
def test_memory_is_flat_over_many_asynchronous_saves(tmp_path: Path, saves: int) -> None:
    """Each has 6 MiB; that one save in twenty, or in ninety, kept its memory would be seen."""
    command = [sys.executable, "-c", FLAT, str(tmp_path), str(saves)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(done.stdout) < 5 * 2**20


def test_staged_bytes_are_free_before_other_ranks_are_waited_for(tmp_path: Path) -> None:
    """A rank may leave the session long after this one has ended its save."""
    taken, may_leave = list[weakref.ref[Any]](), threading.Event()

    def take(memory: StagingMemory, nbytes: int) -> Bytes:
        buffer = take_buffer(memory, nbytes)
        taken.append(weakref.ref(buffer.base))
        return buffer

    take_buffer = StagingMemory.take_buffer
    with (
        mock.patch.object(StagingMemory, "take_buffer", take),
        mock.patch.object(SaveOperation, "leave_session", side_effect=partial(may_leave.wait, 60)),
    ):
        save = rankless.save_checkpoint(tmp_path, "s", {"w": torch.ones(2**20)}, async_save=True, staging="eager")
        save.wait()
        rankless.finalize()
        is_free = [reference() is None for reference in taken]
        may_leave.set()
    assert is_free == [True]
