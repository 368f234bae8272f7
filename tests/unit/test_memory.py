"""Tests that saving and loading need only a few buffers in addition to the state, whatever its size."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, threading, time
import torch, rankless
path, megabytes, layout = sys.argv[1:]
state = {f"t{i}": torch.empty(int(megabytes) * 2**20 // 4 // 4).fill_(i) for i in range(4)}
if layout == "strided":
    state = {name: tensor.view(1024, -1).t() for name, tensor in state.items()}
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

for action in ("save", "load"):
    before, peak, running = resident(), 0, True
    thread = threading.Thread(target=watch)
    thread.start()
    if action == "save":
        rankless.save_checkpoint(path, "s", state)
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
    for megabytes in (128, 512):
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / str(megabytes)), str(megabytes), layout]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        for beside in map(int, done.stdout.split()):
            assert 0 < beside < 64 * 2**20, megabytes


FLAT = """
import sys, torch, rankless
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters())
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)

def resident():
    with open("/proc/self/status") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith(("RssAnon", "RssShmem"))) * 1024

for number in range(100):
    optimizer.step()
    rankless.save_checkpoint(sys.argv[1], f"s{number}", model, optimizer, user_content={"losses": [0.5] * 1000},
                             async_save=True, staging=("eager", "overlapped")[number % 2], keep=1)
    if number == 20:
        before = resident()
rankless.finalize()
print(resident() - before)
"""


def test_memory_is_flat_over_a_hundred_asynchronous_saves(tmp_path: Path) -> None:
    """Each has 6 MiB; that one save in eighty kept its memory would be seen."""
    done = subprocess.run([sys.executable, "-c", FLAT, str(tmp_path)], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 5 * 2**20
