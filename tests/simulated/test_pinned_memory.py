"""Tests of pinned memory: registered once, given back when it is freed, and not needed."""

from __future__ import annotations

import gc
import warnings
from contextlib import suppress
from pathlib import Path
from unittest import mock

import torch

import rankless
from rankless.save.background import background_saves
from tests.helpers.device_training import Training, find_differences, read_saved
from tests.simulated.conftest import DeviceRanks


def save_unpinned(path: str, staging: str) -> tuple[list[str], list[str]]:
    """No memory can be pinned."""
    from rankless.engine.io import pinned_memory
    from tests.helpers.simulated.device import RUNTIME

    background_saves.finalize()
    pinned_memory._memory._has_warned = False
    gc.collect()
    RUNTIME.refuses = True
    training = Training("sim")
    different = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(2):
            training.change_all(number)
            expected = training.copies()
            save = rankless.save_checkpoint(
                path, f"s{number}", training.net, training.optimizer, async_save=True, staging=staging
            )
            training.step()
            save.wait()
            different += find_differences(read_saved(Path(path) / f"s{number}"), expected)
    blank = Training("sim")
    rankless.load_checkpoint(path, model=blank.net, optimizer=blank.optimizer)
    different += find_differences(blank.tensors(), expected)
    background_saves.finalize()  # frees the memory
    return different, [str(warning.message) for warning in caught if "pinned" in str(warning.message)]


def test_without_pinned_memory_there_is_one_warning_and_the_same_result(
    device_ranks: DeviceRanks, tmp_path: Path
) -> None:
    for staging in ("eager", "overlapped"):
        ((different, messages),) = device_ranks(1, save_unpinned, str(tmp_path / staging), staging)
        assert different == []
        (message,) = messages
        assert "bytes) could not be pinned" in message
        assert "ulimit -l" in message


def count_registered(path: str) -> list[int]:
    from tests.helpers.simulated.device import RUNTIME

    background_saves.finalize()
    gc.collect()
    counts = [len(RUNTIME.registered)]
    training = Training("sim")
    for number in range(3):
        rankless.save_checkpoint(path, f"s{number}", training.net, training.optimizer, async_save=True).wait()
        counts.append(len(RUNTIME.registered))
    background_saves.finalize()
    gc.collect()
    counts.append(len(RUNTIME.registered))
    rankless.load_checkpoint(path, model=training.net, optimizer=training.optimizer)
    gc.collect()
    counts.append(len(RUNTIME.registered))
    return counts


def test_memory_is_registered_once_and_until_it_is_freed(device_ranks: DeviceRanks, tmp_path: Path) -> None:
    ((before, *during, freed, loaded),) = device_ranks(1, count_registered, str(tmp_path))
    assert during == [before + 1] * 3
    assert freed == loaded == before


def interrupt_registration() -> list[int]:
    """Return the number of registered buffers when an interrupt comes right after the registration, and later."""
    from rankless.engine.io.device_streams import copy_stream_of
    from rankless.engine.io.pinned_memory import pin_for
    from rankless.storage.aligned_memory import aligned_buffer
    from tests.helpers.simulated.device import RUNTIME, Runtime

    real = Runtime.cudaHostRegister

    def register(self: Runtime, address: int, nbytes: int, flags: int) -> int:
        real(self, address, nbytes, flags)
        raise KeyboardInterrupt

    stream = copy_stream_of(torch.device("sim:0"))
    assert stream is not None
    before = len(RUNTIME.registered)
    buffer = aligned_buffer(2**20)
    with mock.patch.object(Runtime, "cudaHostRegister", register), suppress(KeyboardInterrupt):
        pin_for([stream], buffer)
    counts = [len(RUNTIME.registered) - before]
    del buffer
    gc.collect()
    return [*counts, len(RUNTIME.registered) - before]


def test_memory_is_given_back_if_an_interrupt_comes_when_it_is_registered(device_ranks: DeviceRanks) -> None:
    """Otherwise the device would copy into pages that the process does not have any more."""
    assert device_ranks(1, interrupt_registration) == [[1, 0]]
