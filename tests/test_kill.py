"""SIGKILL at random moments, over saves of every kind: what is there afterwards is whole, and the run goes on."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.layout.hidden import parse
from holdfast.storage.local import hidden_folders
from holdfast.upkeep import clean_up

#: A run that saves as fast as it can: asynchronously, with retention, and over one tag again and again.
RUN = """
import sys, torch, holdfast
path, seed = sys.argv[1], int(sys.argv[2])
model = {f"w{n}": torch.zeros(50_000) for n in range(4)}
step = 0
if holdfast.has_checkpoint(path):
    step = holdfast.load_checkpoint(path, model=model)["step"]
    assert all((tensor == step).all() for tensor in model.values()), "torn"
print(step, flush=True)
while True:
    step += 1
    for tensor in model.values():
        tensor.fill_(step)
    last = step % 3 == 0
    holdfast.save_checkpoint(path, "last" if last else f"step_{step}", model, user_content={"step": step}, step=step,
                             async_save=(step + seed) % 2 == 0, overwrite=last, num_kept_ckpts=2)
    print(step, flush=True)
"""


def killed_run(path: Path, seed: int, seconds: float) -> list[int]:
    """The steps that a run told of, the first being where it began."""
    with subprocess.Popen([sys.executable, "-c", RUN, str(path), str(seed)], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        first = run.stdout.readline()
        assert first, "the run could not go on"
        more = [run.stdout.readline() for _ in range(2)]  # however slow the machine is
        time.sleep(seconds)
        run.send_signal(signal.SIGKILL)
        return [int(first), *map(int, more), *map(int, run.stdout.read().split())]


@pytest.mark.parametrize("seed", range(2))
def test_a_run_that_is_killed_again_and_again_loses_little_and_mixes_nothing(tmp_path: Path, seed: int) -> None:
    moments = random.Random(seed)
    done = 0
    for _ in range(6):
        steps = killed_run(tmp_path, seed, moments.uniform(0.0, 0.4))
        # A step is told of when its save was at least begun, before which the one before it was committed.
        assert done - 1 <= steps[0]
        done = steps[-1]
        for info in holdfast.list_checkpoints(tmp_path):
            assert info.status == "complete"
            model = {f"w{n}": torch.zeros(50_000) for n in range(4)}
            step = holdfast.load_checkpoint(tmp_path, info.tag, model=model)["step"]
            assert all((tensor == step).all() for tensor in model.values())
    assert done > 10
    holdfast.save_checkpoint(tmp_path, "end", {"w": torch.ones(1)}, num_kept_ckpts=1)
    (end,) = holdfast.list_checkpoints(tmp_path)
    assert end.tag == "end"
    # A first save that was killed was of a run that has nothing else: prune removes what it left.
    left = [parse(folder.name) for folder in hidden_folders(tmp_path)]
    assert not [hidden for hidden in left if hidden is None or hidden.run == end.run]
    clean_up(tmp_path, None)
    assert not hidden_folders(tmp_path)
