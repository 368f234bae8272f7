"""Tests whole jobs under ``torchrun`` whose run is in an object store, and whose hosts have a local tier.

Ranks play hosts: each has a folder of its own for the tier.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

import rankless
from tests.golden.reader import read
from tests.helpers.fake_http import BUCKET
from tests.helpers.fake_s3 import FakeS3
from tests.helpers.file_contents import read_state_files

RUN = f"s3://{BUCKET}/run"

#: A training that is equal on any number of ranks. A job that dies has its last step in the tier, with copies.
SCRIPT = """
import os, signal, sys
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import rankless

path, base, last, dies = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "dies"
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(300, 301), torch.nn.Linear(301, 3))
for module in (*model, model):
    fully_shard(module)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
local = rankless.LocalTier(f"{base}/host{os.environ['LOCAL_RANK']}", copies=1, drain_every=3) if base else None
directory = rankless.RunDirectory(path, local=local, async_save=True)
step = 0
try:
    restored = directory.restore(None, model, optimizer)
    step = restored.step
    print(f"loaded {step} from the {restored.source}", flush=True)
except rankless.NoCheckpointError:
    pass
handle = None
for step in range(step + 1, last + 1):
    for parameter in model.parameters():  # no sum over ranks, whose order would change the result
        parameter.grad = torch.ones_like(parameter) * (0.25 if step % 2 else -0.5)
    optimizer.step()
    handle = directory.save(f"s{step}", model, optimizer, step=step)
    if step == 3:
        handle.wait()
if dies:
    handle.wait()  # the copies are made, too
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
directory.finalize()
dist.destroy_process_group()
"""


def run_job(base: Path | None, ranks: int, last: int, *, path: str = RUN, dies: bool = False) -> str:
    script = (base or Path(path)).parent / "train.py"
    script.write_text(SCRIPT)
    arguments = [path, str(base or ""), str(last), "dies" if dies else "ends"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    job = subprocess.run([*command, str(script), *arguments], capture_output=True, text=True, timeout=240, check=False)
    assert (job.returncode != 0) == dies, job.stderr
    return job.stdout


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The folder with those of the hosts."""
    folder = tmp_path / "tier"
    folder.mkdir()
    return folder


@pytest.fixture
def fake() -> Iterator[FakeS3]:
    fake = FakeS3()
    with fake.served() as url:
        settings = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        with mock.patch.dict(os.environ, settings):
            yield fake


@pytest.mark.full
def test_a_killed_job_goes_on_from_memory_on_more_ranks(tmp_path: Path, fake: FakeS3, base: Path) -> None:
    run_job(base, 2, 5, dies=True)
    assert [info.tag for info in rankless.list_checkpoints(RUN)] == ["s3"]  # the third of five
    shutil.rmtree(base / "host1")  # the part on it is copied on the other host
    assert "loaded 5 from the local tier" in run_job(base, 3, 5)
    assert [info.tag for info in rankless.list_checkpoints(RUN)] == ["s3", "s5"]
    run_job(None, 2, 5, path=str(tmp_path / "run"))
    for tag in ("s3", "s5"):
        download(fake, tag, tmp_path / "objects" / tag)
        assert read_state_files(tmp_path / "objects" / tag) == read_state_files(tmp_path / "run" / tag)
    assert not fake.uploads


@pytest.mark.full
def test_a_killed_job_whose_memory_is_lost_goes_on_from_the_store(fake: FakeS3, base: Path) -> None:
    run_job(base, 2, 8, dies=True)
    shutil.rmtree(base)
    base.mkdir()
    durable = rankless.list_checkpoints(RUN)[-1].step
    assert f"loaded {durable} from the run directory" in run_job(base, 2, 9)
    assert rankless.list_checkpoints(RUN)[-1].tag == "s9"
    assert not fake.uploads


def download(fake: FakeS3, tag: str, folder: Path) -> None:
    for key, stored in fake.objects.items():
        if key.startswith(f"run/{tag}."):
            name = key.split("/", 2)[2]
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(stored.data)
    read(folder)
