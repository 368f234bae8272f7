"""Drains of a local tier into an object store that die at any request, or are stopped there while another job goes on.

Whatever happens, the next job loads the newest checkpoint that was complete in the tier, or the one before, and makes
it durable; a job that wakes up publishes nothing of an abandoned branch; and a clean-up leaves nothing. Each case goes
through some of the moments. ``python -m campaigns.object_histories`` goes through all.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from tests.helpers.fake_azure import FakeAzure
from tests.helpers.fake_s3 import AWS, GOOGLE, FakeS3
from tests.helpers.object_histories import Start, choose_moments, state, store_with_two_checkpoints
from tests.helpers.object_tier_histories import OPERATIONS, check_crash, check_stop, list_crashes, list_stops
from tests.helpers.pairwise import each_value

#: Of how many moments one is tried: all of them take minutes.
STEPS = {"aws": 3, "google": 9, "azure": 7}

FAKES = {"aws": lambda: FakeS3(AWS), "google": lambda: FakeS3(GOOGLE), "azure": FakeAzure}


@pytest.fixture(autouse=True, scope="module")
def fast_collection() -> None:
    """The end of each job collects garbage, but not what earlier tests have imported.

    It stays frozen: all objects of torch and of the modules of tests would be collected again and again otherwise.
    """
    gc.collect()
    gc.freeze()


@each_value({"cloud": FAKES, "operation": OPERATIONS, "third": range(3)})
def test_a_job_that_dies_at_any_request_loses_nothing(cloud: str, operation: str, third: int, tmp_path: Path) -> None:
    with store_with_two_checkpoints(FAKES[cloud]()) as fake:
        start = Start(fake)
        for moment in choose_moments(list_crashes(start, tmp_path, operation)[:: STEPS[cloud]], third):
            check_crash(start, tmp_path, operation, moment)


@each_value({"cloud": ["aws", "azure"], "operation": ["save", "load"], "third": range(3)})
def test_a_job_that_is_stopped_while_another_one_goes_on_publishes_no_abandoned_branch(
    cloud: str, operation: str, third: int, tmp_path: Path
) -> None:
    with store_with_two_checkpoints(FAKES[cloud]()) as fake:
        start = Start(fake)
        for moment in choose_moments(list_stops(start, tmp_path, operation)[:: STEPS[cloud]], third):
            check_stop(start, tmp_path, operation, moment)


def test_the_states_of_the_histories_differ() -> None:
    assert not torch.equal(state(3)["big"], state(4)["big"])
