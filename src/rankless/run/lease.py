"""Leases in an object store, which has no locks: small objects that their holder renews as long as it lives.

A lease is over if its holder has removed it, or has not renewed it for an hour. Others wait for a removal, so its lease
is over after five minutes. A holder that was stopped for longer has lost its lease. A holder that may not delete writes
that the lease is over. The store's clock measures the time since the renewal, so clocks of hosts may differ.

:mod:`rankless.run.pin` and :mod:`rankless.run.cleanup` hold leases in object stores, in the process that evaluates or
removes. A thread of that process renews each. All processes must agree on the seconds after which a lease is over.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from rankless.errors import RanklessError, StorageError
from rankless.process.prepared_types import prepared
from rankless.storage.object_path import ObjectPath

#: Seconds between two renewals, and seconds without one after which a lease is over.
_RENEWAL_SECONDS, LEASE_SECONDS = 60.0, 3600.0

#: The same for the lock of a removal: others wait for it.
LOCK_SECONDS = 300.0

#: The most bytes of a lease.
_MAX_BYTES = 1000


@prepared
class _Lease(msgspec.Struct, frozen=True):
    """The content of a lease: when it was renewed, in seconds since 1970; 0 if it is over."""

    renewed: float


_OVER = _Lease(0.0)


@contextmanager
def held_lease(path: ObjectPath) -> Iterator[None]:
    """Hold a lease. No other process may use its name. Raises ``StorageError`` if it cannot be created."""
    owner, ended = os.getpid(), threading.Event()
    thread = threading.Thread(target=_renew_until, args=(path, ended), name="rankless-lease", daemon=True)
    _renew(path)
    try:
        thread.start()
        yield
    finally:
        ended.set()
        if os.getpid() == owner:  # a forked process does not hold it
            if thread.ident is not None:
                thread.join()
            _end(path)


def _renew(path: ObjectPath) -> None:
    path.store.replace_small(path, msgspec.json.encode(_Lease(time.time())))


def _end(path: ObjectPath) -> None:
    """Remove a lease. If that fails, it ends by itself; sooner if at least a write is allowed."""
    with suppress(StorageError):
        try:
            path.store.remove_file(path)
        except StorageError:
            path.store.replace_small(path, msgspec.json.encode(_OVER))


def _renew_until(path: ObjectPath, ended: threading.Event) -> None:
    while not ended.wait(_RENEWAL_SECONDS):
        with suppress(RanklessError):  # the next attempt may succeed, before the lease is over
            _renew(path)


def remove_if_over(path: ObjectPath, seconds: float = LEASE_SECONDS) -> bool:
    """Remove a lease that was not renewed for some seconds. Return whether it is over.

    If it cannot be removed, it is over all the same.
    """
    try:
        data, age = path.store.read_with_age(path, _MAX_BYTES)
        lease = msgspec.json.decode(data, type=_Lease)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        lease, age = _OVER, None  # it is no lease
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return True
        if error.errno != errno.EFBIG:
            raise
        lease, age = _OVER, None
    if age is None:
        age = time.time() - lease.renewed
    if lease != _OVER and age <= seconds:
        return False
    with suppress(StorageError):
        path.store.remove_file(path)
    return True
