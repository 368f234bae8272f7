"""Two containers of one job on one host: one kernel and one disk, and an ``/dev/shm`` for each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
