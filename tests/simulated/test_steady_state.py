"""Tests of what a save of tensors on an accelerator costs: what it allocates there, and for what the caller waits."""

from __future__ import annotations

from pathlib import Path

import pytest

import rankless
from rankless.engine.io.device_streams import SCRATCH_BYTES
from tests.helpers.device_training import Training
from tests.helpers.simulated.streams import SCHEDULER
from tests.simulated.conftest import DeviceRanks


def measure_saves(path: str, staging: str, steps: bool) -> list[tuple[int, int, int]]:
    """For each save: the bytes allocated on the device, the waits of the caller, and those of its next step."""
    from tests.helpers.simulated.device import MEMORY

    training = Training("sim")
    del training.net.frozen  # bytes of frozen parameters are compared with the checkpoint before
    measured = []
    for number in range(3):
        if steps:
            training.step()
        SCHEDULER.waits, MEMORY.allocated = [], 0
        save = rankless.save_checkpoint(
            path, f"s{number}", training.net, training.optimizer, async_save=True, staging=staging
        )
        allocated, in_call = MEMORY.allocated, SCHEDULER.waits.count("MainThread")
        if steps:
            training.step()
        measured.append((allocated, in_call, SCHEDULER.waits.count("MainThread") - in_call))
        save.wait()
    return measured


@pytest.mark.parametrize("steps", [True, False])
@pytest.mark.parametrize(("staging", "waits"), [("eager", 1), ("overlapped", 0)])
def test_a_save_allocates_nothing_on_the_device_and_waits_once_or_never(
    device_ranks: DeviceRanks, tmp_path: Path, staging: str, waits: int, steps: bool
) -> None:
    ((first, *others),) = device_ranks(1, measure_saves, str(tmp_path), staging, steps)
    assert first[0] in {0, SCRATCH_BYTES}  # kept from the test before
    assert others == [(0, waits, 0)] * 2


def test_the_scratch_is_within_the_promise() -> None:
    assert SCRATCH_BYTES <= 64 * 2**20
