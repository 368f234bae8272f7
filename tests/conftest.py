from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.pool import Ranks

settings.register_profile(
    "holdfast", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("holdfast")

# As in the ranks of the pool: sums over threads round otherwise.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()
