"""Containers: mounts, processes and an ``/dev/shm`` of their own, on one kernel and one disk."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rankless

PROGRAM = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
import rankless

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
assert not list(Path("/dev/shm").iterdir()) and not dist.barrier()
model, other = torch.nn.Linear(300, 300), torch.nn.Linear(300, 300)
dist.broadcast(model.weight.data, 0), dist.broadcast(model.bias.data, 0)

with rankless.Checkpointer(
    folder / "run", model=model, save_every=1, async_save=True, local=rankless.LocalTier("/dev/shm/tier", drain_every=2)
) as checkpointer:
    for step in (1, 2, 3):
        checkpointer.step(step)
resumed = rankless.Checkpointer(folder / "run", model=other, local="/dev/shm/tier").resume()
assert (resumed, torch.equal(other.weight, model.weight)) == (3, True), resumed

with (
    rankless.WeightPublisher(folder / "weights") as publisher,
    rankless.WeightFollower(folder / "weights", into=other) as follower,
):
    for step in (1, 2):
        model.weight.data += 1
        publisher.publish(model, step=step).wait()
        assert follower.update().step == step
        assert torch.equal(other.weight, model.weight)
        assert len(list(Path("/dev/shm").glob("rankless-weights-*"))) == 1
print("finished", rank, flush=True)
"""


SMALL = """
import sys
from pathlib import Path
import pytest, torch
import rankless

folder, model = Path(sys.argv[1]), torch.nn.Linear(300, 300)
rankless.WeightPublisher(folder / "weights", async_save=False).publish(model)
with rankless.WeightFollower(folder / "weights", into=model) as follower:
    with pytest.raises(rankless.StorageError, match="/dev/shm has no room for two versions of the model: pass folder="):
        follower.update()
with rankless.WeightFollower(folder / "weights", into=model, folder=folder / "followed") as follower:
    assert follower.update().number == 1
with pytest.warns(UserWarning, match="more are needed in the folder of the tier"):
    rankless.save_checkpoint(folder / "run", "step_1", model=model, local=rankless.LocalTier("/dev/shm/tier"))
assert rankless.load_checkpoint(folder / "run", model=model) is None
"""

needs_mounts = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounts need root, and unshare"
)


@needs_mounts
def test_a_small_memory_is_named_and_what_to_do(tmp_path: Path) -> None:
    script = tmp_path / "small.py"
    script.write_text(SMALL)
    start = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", start, "sh", sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@needs_mounts
def test_a_job_in_two_containers_saves_resumes_and_follows(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    start = 'mount -t tmpfs none /dev/shm && exec "$@"'
    ranks = [
        subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", start, "sh", sys.executable, str(script), str(tmp_path), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    assert ["finished" in output for output in outputs] == [True, True]


POD = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import rankless

dist.init_process_group("gloo")
torch.manual_seed(0)
model, folder = torch.nn.Linear(64, 64), Path("/mnt")
local = rankless.LocalTier("/dev/shm/tier", drain_every=100)
with rankless.Checkpointer(folder / "run", model=model, save_every=5, async_save=True, local=local) as checkpointer:
    start = checkpointer.resume()
    for step in range(start + 1, 1000):
        time.sleep(0.05)
        (folder / f"step_{step}").touch()
        if checkpointer.step(step):
            print(f"rank {dist.get_rank()} went on from {start}, and stopped at {step}", flush=True)
            sys.exit(1)
"""

#: A read-only root, folders in memory, and a volume that outlives the pod.
START_POD = """
root=$1 volume=$2
mount --bind / "$root" && mount -o remount,bind,ro "$root"
mount --rbind /dev "$root/dev" && mount -t proc proc "$root/proc"
mount -t tmpfs -o size=64m none "$root/dev/shm" && mount -t tmpfs none "$root/tmp" && mount --bind "$volume" "$root/mnt"
exec chroot "$root" "$3" -m torch.distributed.run --standalone --nproc-per-node 2 /mnt/train.py
"""


def run_pod(root: Path, volume: Path) -> str:
    """Run a pod until it has trained for some steps, then end it as Kubernetes does. Return what it printed."""
    root.mkdir()
    before = len(list(volume.glob("step_*")))
    namespaces = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--uts")
    command = (*namespaces, "sh", "-c", START_POD, "sh", str(root), str(volume), sys.executable)
    pod = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 90
    while len(list(volume.glob("step_*"))) < before + 12 and pod.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert pod.poll() is None, pod.communicate()[0]
    first = Path(f"/proc/{pod.pid}/task/{pod.pid}/children").read_text()
    os.kill(int(first), signal.SIGTERM)
    output = pod.communicate(timeout=30)[0]
    assert pod.returncode == 1, output
    return output


@needs_mounts
def test_the_life_of_a_pod(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / "train.py").write_text(POD)
    resumed = 0
    for number in range(2):
        output = run_pod(tmp_path / f"root_{number}", volume)
        found = re.findall(r"went on from (\d+), and stopped at (\d+)", output)
        assert len(found) == 2, output
        assert len(set(found)) == 1, "both ranks stop at the same step"
        start, stop = map(int, found[0])
        assert start == resumed
        assert [info.step for info in rankless.list_checkpoints(volume / "run")][-1] == stop
        resumed = stop
