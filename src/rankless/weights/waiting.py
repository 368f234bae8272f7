"""Listing the versions of a weights directory, and waiting for new ones. Evaluations call it, in one process."""

from __future__ import annotations

import time
from contextlib import suppress
from os import PathLike

from rankless.errors import InvalidArgumentError, NoCheckpointError
from rankless.formats.weights.version_files import list_numbers, read_manifest
from rankless.ondisk.validation import check_integer
from rankless.storage.location import parse_location
from rankless.weights.directory_check import check_weights_directory
from rankless.weights.publication import WeightVersion


def list_weight_versions(path: str | PathLike[str]) -> list[WeightVersion]:
    """Return the published versions of a weights directory, oldest first.

    Args:
        path: The weights directory, or its URL in an object store. It need not exist.

    Raises:
        CorruptCheckpointError: The manifest of a version is corrupt.
        InvalidArgumentError: The path is a file, or has checkpoints and no versions.
    """
    directory = parse_location(path)
    check_weights_directory(directory)
    versions = []
    for number in list_numbers(directory):
        with suppress(NoCheckpointError):  # it was removed meanwhile
            versions.append(WeightVersion.of(directory, read_manifest(directory, number)))
    return versions


def wait_for_weights(
    path: str | PathLike[str],
    after: int | WeightVersion | None = None,
    *,
    timeout: float | None = None,
    poll_seconds: float = 0.5,
) -> WeightVersion | None:
    """Wait until a weights directory has a version that is newer than another one, and return the newest.

    Args:
        path: The weights directory, or its URL in an object store. It need not exist yet.
        after: The version that was seen last, or its number; by default any version is new.
        timeout: The number of seconds to wait. ``None`` means no limit.
        poll_seconds: The number of seconds between two looks at the directory.

    Returns:
        The newest version, or ``None`` if there was no newer one in time.

    Raises:
        InvalidArgumentError: ``timeout`` is negative, ``poll_seconds`` is not above 0, ``after`` is no version, or the
            path is a file, or has checkpoints and no versions.
    """
    if not poll_seconds > 0 or (timeout is not None and not timeout >= 0):
        raise InvalidArgumentError(
            f"timeout must not be negative, and poll_seconds must be above 0; got {timeout!r} and {poll_seconds!r}"
        )
    directory = parse_location(path)
    check_weights_directory(directory)
    seen = after.number if isinstance(after, WeightVersion) else check_integer("after", after or 0, smallest=0)
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        newest = max(list_numbers(directory), default=0)
        if newest > seen:
            with suppress(NoCheckpointError):  # it was removed meanwhile, because there are newer ones
                return WeightVersion.of(directory, read_manifest(directory, newest))
        remaining = poll_seconds if deadline is None else deadline - time.monotonic()
        if remaining <= 0:
            return None
        time.sleep(min(poll_seconds, remaining))
