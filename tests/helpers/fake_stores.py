"""The fakes of the kinds of stores by name, and what tests do to what is in them."""

from __future__ import annotations

from dataclasses import replace

from rankless.run import pointers
from tests.helpers.fake_azure import FakeAzure
from tests.helpers.fake_http import FakeStore
from tests.helpers.fake_s3 import AWS, GOOGLE, FakeS3

FAKES = {"aws": lambda: FakeS3(AWS), "google": lambda: FakeS3(GOOGLE), "azure": FakeAzure}


def age(fake: FakeStore) -> None:
    """Let all objects be two days old."""
    fake.objects = {key: replace(stored, time=stored.time - 2 * 86_400) for key, stored in fake.objects.items()}
    pointers._pointers.clear()
