"""Saves into an object store that die at each request, or are stopped there while another process goes on.

Whatever happens, a reader sees the old or the new checkpoint, and never a mixture; what was committed stays; and a
clean-up leaves nothing. Each case goes through some of the moments. ``python -m campaigns.object_histories`` does
it with all stores and operations.
"""

from __future__ import annotations

import itertools

from tests.helpers.fake_azure import FakeAzure
from tests.helpers.fake_s3 import AWS, GOOGLE, RGW_16, FakeS3
from tests.helpers.object_histories import (
    OPERATIONS,
    OUTCOMES,
    Start,
    check_crash,
    check_lost_reply,
    check_stop,
    choose_moments,
    every_moment,
    every_reply,
    store_with_two_checkpoints,
)
from tests.helpers.pairwise import each_value, first_of

FAKES = {
    "aws": lambda: FakeS3(AWS),
    "rgw-16": lambda: FakeS3(RGW_16),
    "google": lambda: FakeS3(GOOGLE),
    "azure": FakeAzure,
}


@each_value({"cloud": FAKES, "operation": OUTCOMES, "third": range(3)})
def test_a_save_that_dies_at_any_request_leaves_the_old_or_the_new_checkpoint(
    cloud: str, operation: str, third: int
) -> None:
    with store_with_two_checkpoints(FAKES[cloud]()) as fake:
        start = Start(fake)
        for moment in choose_moments(every_moment(start.count_requests(operation)), third):
            check_crash(start, operation, moment)


@each_value({"cloud": FAKES, "operation": OUTCOMES, "third": range(3)})
def test_a_lost_reply_of_any_request_changes_nothing(cloud: str, operation: str, third: int) -> None:
    with store_with_two_checkpoints(FAKES[cloud]()) as fake:
        start = Start(fake)
        for moment in choose_moments(every_reply(start.count_requests(operation)), third):
            check_lost_reply(start, operation, moment)


FIRST = [*itertools.product(["aws"], OUTCOMES), ("azure", "save"), ("azure", "overwrite")]

#: Each first operation with each second one, at some of the moments. The first five have all of both.
STOPS = [
    (*first, second, number % 3)
    for shift in range(len(OPERATIONS))
    for number, (first, second) in enumerate(zip(FIRST, [*OPERATIONS][shift:] + [*OPERATIONS][:shift], strict=True))
]


@first_of(5, ("cloud", "first", "second", "third"), STOPS)
def test_a_save_that_is_stopped_anywhere_while_another_process_goes_on(
    cloud: str, first: str, second: str, third: int
) -> None:
    """Among these: a writer that stops between its last upload and the pointer; two overwriters; a load during a
    retention; the clean-up of a save that wakes up afterwards."""
    with store_with_two_checkpoints(FAKES[cloud]()) as fake:
        start = Start(fake)
        for moment in choose_moments(every_moment(start.count_requests(first)), third):
            check_stop(start, first, second, moment)
