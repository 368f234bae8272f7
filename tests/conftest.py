import gc
import signal
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, settings

from campaigns.common.fork_server import CONTEXT
from rankless.storage import atomic_rename
from tests.helpers import suite
from tests.helpers.examples import ALL, DAY
from tests.helpers.pool import Ranks

# By day the examples are the same in each run, so that a commit which passed once passes again; the further ones of
# "make left-out" are drawn anew each time.
for profile, max_examples in ((DAY, 20), (ALL, 100)):
    settings.register_profile(
        profile,
        max_examples=max_examples,
        derandomize=profile == DAY,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )

CONTEXT.set_forkserver_preload(["campaigns.common.preloaded", "tests.preloaded"])

# A shell that runs tests in the background has them, and all that they start, ignore interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


# As in the ranks of the pool: sums over threads round otherwise.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    suite.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile(ALL if suite.has_more_cases(config) else DAY)
    if config.option.write_durations and not hasattr(config, "workerinput"):
        plugin = suite.DurationsFile(suite.durations_file(config), writes_slow_cases=not suite.has_more_cases(config))
        config.pluginmanager.register(plugin)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selected = suite.order(suite.select(items, config), suite.read_durations(suite.durations_file(config)))
    chosen = set(selected)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = selected


@pytest.fixture(params=["exchange", "two steps"])
def exchanging(request: pytest.FixtureRequest) -> Iterator[None]:
    """File systems that exchange two names, and those that cannot."""
    if request.param == "exchange":
        yield
        return
    with mock.patch.object(atomic_rename, "_renameat2", return_value=False):
        yield


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def use_one_thread() -> None:
    """Undo what an earlier test has changed: Accelerate sets the number of threads of its process."""
    torch.set_num_threads(1)


@pytest.fixture
def without_garbage() -> None:
    """For tests that decode values nested without end: a decoder that is deep in them allocates and so collects what
    earlier tests left, whose finalizers then have no frames to run in and are reported as errors of this test."""
    gc.collect()


@pytest.fixture(autouse=True)
def replace_old_ranks(request: pytest.FixtureRequest) -> None:
    pool = request.getfixturevalue("ranks") if "ranks" in request.fixturenames else None
    if isinstance(pool, Ranks):  # others have a parameter of this name
        pool.replace_old_ranks()
