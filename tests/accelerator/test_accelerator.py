"""Tests on the accelerator of this machine, if it has one: saves while it is busy, changes at once, and loads.

The orders in which a device may run are tested on a simulated one, in ``tests/simulated``. Here slow kernels before and
after the calls make the usual mistakes visible.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rankless
from rankless.engine.io.device_streams import SCRATCH_BYTES
from tests.helpers.device_training import Training, find_differences, read_saved

OPTIONS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "eager": {"async_save": True, "staging": "eager"},
    "overlapped": {"async_save": True, "staging": "overlapped"},
    "overlapped, full check": {"async_save": True, "staging": "overlapped", "staging_check": "full"},
}


def keep_busy(device: str) -> None:
    """Enqueue kernels that take some tenths of a second."""
    matrix = torch.ones(4096, 4096, device=device)
    for _ in range(100):
        matrix = matrix @ matrix / 4096


def step_slowly(training: Training, device: str) -> None:
    training.step()
    keep_busy(device)


def change_all(training: Training, device: str) -> None:
    training.change_all(-1)


CHANGES: dict[str, Callable[[Training, str], None]] = {"step": step_slowly, "change": change_all}


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_save_has_what_was_enqueued_before_it(device: str, tmp_path: Path, kind: str) -> None:
    training = Training(device)
    for number in range(3):
        keep_busy(device)
        training.change_all(number + 1)
        expected = training.copies()
        save = rankless.save_checkpoint(tmp_path, f"s{number}", training.net, training.optimizer, **OPTIONS[kind])
        CHANGES["step" if kind == "overlapped" else "change"](training, device)
        save.wait()
        assert find_differences(read_saved(tmp_path / f"s{number}"), expected) == []


def test_what_no_step_changes_may_change_after_an_overlapped_save(device: str, tmp_path: Path) -> None:
    training = Training(device)
    keep_busy(device)
    expected = training.copies()
    save = rankless.save_checkpoint(
        tmp_path, "s", training.net, training.optimizer, async_save=True, staging="overlapped"
    )
    training.net.statistics.fill_(-1)
    training.net.frozen.data.fill_(-1)
    save.wait()
    assert find_differences(read_saved(tmp_path / "s"), expected) == []


def test_a_load_comes_after_what_was_enqueued_before_and_before_what_follows(device: str, tmp_path: Path) -> None:
    saved, training = Training("cpu"), Training(device)
    saved.change_all(4)
    rankless.save_checkpoint(tmp_path, "s", saved.net, saved.optimizer)
    keep_busy(device)
    training.change_all(-1)
    rankless.load_checkpoint(tmp_path, model=training.net, optimizer=training.optimizer)
    assert find_differences(training.copies(), saved.tensors()) == []


def test_a_stream_of_the_caller_is_followed(device: str, tmp_path: Path) -> None:
    module = torch.get_device_module(device)
    if not hasattr(module, "Stream"):
        pytest.skip("this accelerator has no streams")
    training = Training(device)
    before = module.current_stream()
    with module.stream(module.Stream()):
        module.current_stream().wait_stream(before)
        keep_busy(device)
        training.change_all(5)
        expected = training.copies()
        save = rankless.save_checkpoint(
            tmp_path, "s", training.net, training.optimizer, async_save=True, staging="overlapped"
        )
        training.step()
        save.wait()
        module.current_stream().synchronize()
    assert find_differences(read_saved(tmp_path / "s"), expected) == []


@pytest.mark.parametrize("staging", ["eager", "overlapped"])
def test_saves_need_no_memory_on_the_device_but_the_scratch(device: str, tmp_path: Path, staging: str) -> None:
    module = torch.get_device_module(device)
    if not hasattr(module, "reset_peak_memory_stats"):
        pytest.skip("torch does not count the memory of this accelerator")
    training = Training(device)
    before = module.memory_allocated()
    peaks = []
    for number in range(3):
        module.synchronize()
        module.reset_peak_memory_stats()
        rankless.save_checkpoint(
            tmp_path, f"s{number}", training.net, training.optimizer, async_save=True, staging=staging
        ).wait()
        peaks.append(module.max_memory_allocated() - before)
    assert max(peaks) <= SCRATCH_BYTES
    assert module.memory_allocated() - before <= SCRATCH_BYTES


def test_a_capture_of_a_graph_is_not_touched(device: str, tmp_path: Path) -> None:
    if not device.startswith("cuda"):
        pytest.skip("graphs are for CUDA and HIP")
    training, count, graph = Training(device), torch.zeros(1, device=device), torch.cuda.CUDAGraph()
    rankless.save_checkpoint(tmp_path, "before", training.net, training.optimizer)
    with torch.cuda.graph(graph):
        count.add_(1)
        with pytest.raises(rankless.StateError, match="captures a graph"):
            rankless.save_checkpoint(tmp_path, "s", training.net, training.optimizer, rng=False)
        with pytest.raises(rankless.StateError, match="captures a graph"):
            rankless.load_checkpoint(tmp_path, model=training.net)
        count.add_(1)
    graph.replay()
    assert count.item() == 2


SECOND_GPU = """
import sys, torch, rankless
from tests.helpers.device_training import Training
torch.cuda.set_device(1)
training = Training("cuda:1")
for number, options in enumerate([{}, {"staging": "eager"}, {"staging": "overlapped"}, {"staging": "overlapped"}]):
    training.step()
    options |= {"async_save": True} if options else {}
    rankless.save_checkpoint(sys.argv[1], f"s{number}", training.net, training.optimizer, **options)
    rankless.finalize()
rankless.load_checkpoint(sys.argv[1], model=training.net, optimizer=training.optimizer)
assert torch._C._cuda_hasPrimaryContext(1)
assert not torch._C._cuda_hasPrimaryContext(0), "a context was made on the first GPU"
"""


def test_no_context_is_made_on_another_gpu(device: str, tmp_path: Path) -> None:
    if not device.startswith("cuda") or torch.cuda.device_count() < 2:
        pytest.skip("this machine does not have two GPUs")
    subprocess.run([sys.executable, "-c", SECOND_GPU, str(tmp_path)], check=True, cwd=Path(__file__).parents[2])


@pytest.fixture
def nccl_group(device: str) -> Iterator[None]:
    if not device.startswith("cuda"):
        pytest.skip("NCCL is for CUDA and HIP")
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("nccl_group")
def test_a_process_group_needs_no_gloo(device: str, tmp_path: Path) -> None:
    training, blank = Training(device), Training(device)
    expected = training.copies()
    rankless.save_checkpoint(tmp_path, "s", training.net, training.optimizer, async_save=True).wait()
    blank.change_all(-1)
    rankless.load_checkpoint(tmp_path, model=blank.net, optimizer=blank.optimizer)
    assert find_differences(blank.copies(), expected) == []
