from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.helpers.pool import Ranks
from tests.helpers.torch_limits import HAS_PYTHON_DEVICES


class DeviceRanks:
    """Ranks that have a simulated accelerator. They are not those of other tests: they have it for good."""

    def __init__(self) -> None:
        self.pool = Ranks()

    def __call__(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self.pool(world_size, on_device, function, *args)

    def outcomes(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self.pool.outcomes(world_size, on_device, function, *args)


def on_device(function: Callable[..., Any], *args: Any) -> Any:
    from tests.helpers.simulated import device

    device.reset()
    return function(*args)


@pytest.fixture(scope="module")
def device_ranks() -> Iterator[DeviceRanks]:
    if not HAS_PYTHON_DEVICES:
        pytest.skip("this version of torch has no devices that are written in Python")
    ranks = DeviceRanks()
    yield ranks
    ranks.pool.close()
