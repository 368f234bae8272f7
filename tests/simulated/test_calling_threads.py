"""Tests of the state of the thread that calls: its device, its inference mode, and a graph that it captures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import rankless
from tests.helpers.device_training import Training, find_differences, read_saved
from tests.helpers.simulated.streams import DEFAULT, SCHEDULER
from tests.simulated.conftest import DeviceRanks

OPTIONS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "eager": {"async_save": True, "staging": "eager"},
    "overlapped": {"async_save": True, "staging": "overlapped"},
}


def save_and_load(path: str) -> list[str]:
    """Return the threads that called the runtime of the device while another device was the current one."""
    training = Training("sim")
    whole = DTensor.from_local(torch.zeros(300, 5, device="sim"), DeviceMesh("sim", [0, 1]), [Shard(1)])
    for number, options in enumerate([*OPTIONS.values(), OPTIONS["overlapped"]]):
        training.step()
        rankless.save_checkpoint(f"{path}/run", f"s{number}", training.net, training.optimizer, **options)
        rankless.save_checkpoint(f"{path}/stripes", f"s{number}", {"w": whole}, **options)
        rankless.finalize()
    for share_reads in ("never", "always"):
        rankless.load_checkpoint(
            f"{path}/run", model=training.net, optimizer=training.optimizer, share_reads=share_reads
        )
        rankless.load_checkpoint(f"{path}/stripes", model={"w": whole}, share_reads=share_reads)
    return sorted(SCHEDULER.without_device)


def test_every_thread_selects_the_device_first(device_ranks: DeviceRanks, tmp_path: Path) -> None:
    """Otherwise each rank of a host would have a context on the GPU of the first one."""
    assert device_ranks(2, save_and_load, str(tmp_path)) == [[], []]


def save_in_both_modes(path: str, kind: str) -> list[str]:
    """The first save is made in inference mode, and the next one is not."""
    from rankless.engine.io import device_streams

    device_streams._streams.clear()
    different = []
    for number, mode in enumerate([True, False, True]):
        training = Training("sim")
        with torch.inference_mode(mode=mode):
            expected = training.copies()
            save = rankless.save_checkpoint(path, f"s{number}", training.net, training.optimizer, **OPTIONS[kind])
            save.wait()
        different += find_differences(read_saved(Path(path) / f"s{number}"), expected)
    return different


@pytest.mark.parametrize("kind", OPTIONS)
def test_saves_may_be_made_in_inference_mode(device_ranks: DeviceRanks, tmp_path: Path, kind: str) -> None:
    assert device_ranks(1, save_in_both_modes, str(tmp_path), kind) == [[]]


def load_in_inference_mode(path: str, device: str, dtype: torch.dtype) -> list[str]:
    """Load into tensors that were made in inference mode, outside of it and in it."""
    values = {"w": torch.randn(1100, 1000), "rows": torch.randn(40, 90), "b": torch.randn(7)}
    rankless.save_checkpoint(path, "s", values)
    different = []
    for mode in (True, False):
        with torch.inference_mode():
            targets = {name: torch.zeros(value.shape, dtype=dtype, device=device) for name, value in values.items()}
            targets["rows"] = torch.zeros(90, 40, dtype=dtype, device=device).t()
        with torch.inference_mode(mode=mode):
            rankless.load_checkpoint(path, model=targets, cast_dtype=True)
            different += [name for name in values if not torch.equal(targets[name].cpu(), values[name].to(dtype))]
    return different


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["sim", "cpu"])
def test_tensors_that_were_made_in_inference_mode_can_be_filled(
    device_ranks: DeviceRanks, tmp_path: Path, device: str, dtype: torch.dtype
) -> None:
    assert device_ranks(1, load_in_inference_mode, str(tmp_path), device, dtype) == [[]]


def save_in_capture(path: str, options: dict[str, Any], rng: bool) -> tuple[list[str], list[str]]:
    """Return the errors of a save and a load in a capture, and what is different after a save that follows it."""
    training = Training("sim")
    rankless.save_checkpoint(path, "before", training.net, training.optimizer, rng=rng)
    errors = []
    DEFAULT.is_capturing = True
    for call in (
        lambda: rankless.save_checkpoint(path, "s", training.net, training.optimizer, rng=rng, **options).wait(),
        lambda: rankless.load_checkpoint(path, model=training.net, optimizer=training.optimizer),
    ):
        try:
            call()
        except rankless.StateError as error:
            errors.append(str(error))
    enqueued = len(DEFAULT.graph)
    DEFAULT.is_capturing = False
    training.change_all(3)
    expected = training.copies()
    rankless.save_checkpoint(path, "s", training.net, training.optimizer, rng=False, **options).wait()
    return [*errors, str(enqueued)], find_differences(read_saved(Path(path) / "s"), expected)


@pytest.mark.parametrize("rng", [True, False])
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_capture_of_a_graph_is_not_touched(device_ranks: DeviceRanks, tmp_path: Path, kind: str, rng: bool) -> None:
    (((saving, loading, enqueued), different),) = device_ranks(1, save_in_capture, str(tmp_path), OPTIONS[kind], rng)
    assert "captures a graph" in saving
    assert "captures a graph" in loading
    assert (enqueued, different) == ("0", [])


def capture_step(path: str) -> list[str]:
    """Capture a step while an overlapped save copies: it does not run now, so nothing changes."""
    training = Training("sim")
    SCHEDULER.run_all()
    training.change_all(3)
    expected = training.copies()
    SCHEDULER.saves_go_on.clear()
    save = rankless.save_checkpoint(
        path, "s", training.net, training.optimizer, rng=False, async_save=True, staging="overlapped"
    )
    DEFAULT.is_capturing = True
    for parameter in training.net.parameters():
        parameter.grad = torch.ones_like(parameter)
    training.optimizer.step()
    DEFAULT.is_capturing = False
    SCHEDULER.saves_go_on.set()
    save.wait()
    return find_differences(read_saved(Path(path) / "s"), expected)


def test_a_captured_step_waits_for_nothing(device_ranks: DeviceRanks, tmp_path: Path) -> None:
    assert device_ranks(1, capture_step, str(tmp_path)) == [[]]
