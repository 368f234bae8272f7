"""Functions for evaluators and servers: they read a run while another job saves into it.

An evaluator calls them in a process of its own, outside of votes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from os import PathLike
from pathlib import Path
from queue import Empty, SimpleQueue

from rankless import view
from rankless.errors import CheckpointReplacedError, InvalidArgumentError, NoCheckpointError, RanklessError
from rankless.formats.native import holds_checkpoint
from rankless.observe.warning import warn_caller
from rankless.run.catalog import list_checkpoints
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.pin import held_pin, is_being_removed
from rankless.run.run_store import run_store_of, tag_of
from rankless.run.tag_arguments import Best, TagArgument
from rankless.storage.location import parse_location
from rankless.storage.store import store_of
from rankless.view import Checkpoint

_log = logging.getLogger("rankless")

#: How often :func:`pin` tries again while a process removes the checkpoint, and the seconds between: that process may
#: see the pin, and leave the checkpoint.
_ATTEMPTS, _RETRY_SECONDS = 40, 0.05


@contextmanager
def pin(path: str | PathLike[str], tag: TagArgument = None) -> Iterator[Checkpoint]:
    """Open a checkpoint, and keep retention from removing it until the end of the ``with`` block.

    Retention of any job and ``rankless prune`` leave it, also on other hosts of a shared file system. A save with
    ``overwrite=True`` under this tag replaces it nevertheless. If the process dies, the pin ends by itself.

    Args:
        path: A run directory, or a checkpoint in one, on a file system or in an object store.
        tag: As in :func:`rankless.open`.

    Yields:
        The open checkpoint. ``path`` of it can be passed to :func:`rankless.load_checkpoint`.

    Raises:
        NoCheckpointError: There is no checkpoint, or none with the tag; and all other errors of :func:`rankless.open`.
        InvalidArgumentError: The checkpoint is not one of rankless, so no retention removes it.
        CheckpointReplacedError: The checkpoint was replaced or removed meanwhile.
        StorageError: The pin, a small file in the run directory, cannot be created.
    """
    with ExitStack() as stack:
        yield _open_pinned(path, tag, stack)


def _open_pinned(path: str | PathLike[str], tag: TagArgument, stack: ExitStack) -> Checkpoint:
    for attempt in range(_ATTEMPTS):
        try:
            checkpoint = view.open(path, tag)
        except NoCheckpointError:
            if not isinstance(tag, Best) or attempt == _ATTEMPTS - 1:  # the best one may have been removed meanwhile
                raise
            time.sleep(_RETRY_SECONDS)
            continue
        identity = checkpoint.identity
        if identity is None:
            raise InvalidArgumentError(f"{checkpoint.path} is no checkpoint of rankless: open it without a pin")
        with ExitStack() as pinned:
            parent, name = checkpoint.path.parent, checkpoint.path.name
            pinned_tag = tag_of(checkpoint.path)
            pinned.enter_context(held_pin(parent, pinned_tag, identity.run))
            names = store_of(parent).list_names(parent)
            # The lock of a host that has died may stay: after some attempts it counts no more. A lock in an object
            # store ends by itself, and its holder looks for pins only once.
            counts = store_of(parent).is_remote or attempt < _ATTEMPTS // 2
            waits = counts and is_being_removed(parent, pinned_tag, identity.run, names)
            if name in names and not waits and holds_checkpoint(checkpoint.path, identity.id):
                pinned.callback(_warn_if_renamed, checkpoint.path, pinned_tag, identity.id)
                stack.push(pinned.pop_all())
                return checkpoint
        time.sleep(_RETRY_SECONDS)
    if waits:
        raise CheckpointReplacedError(
            f"{checkpoint.path} could not be pinned: another process is removing it, or has died while it did. Pin "
            "another one, or try again in some minutes"
        )
    raise CheckpointReplacedError(f"{checkpoint.path} was replaced or removed while it was being pinned")


def _warn_if_renamed(path: Path, tag: str, checkpoint_id: str) -> None:
    """Warn at the end of a pin if the tag, or the path, belongs to another checkpoint than the pinned one now."""
    try:
        has_tag = not run_store_of(path.parent).names_other(tag, checkpoint_id)
        if has_tag and (holds_checkpoint(path, checkpoint_id) or not store_of(path).path_exists(path)):
            return
    except RanklessError:  # all bytes that were read were verified; only the warning is lost
        return
    warn_caller(
        f"{tag!r} in {path.parent} was saved anew while this process had it pinned, because the training went back to "
        "an earlier checkpoint, or replaced it: what was loaded by this path since, and metrics that were added under "
        f"this tag since, are those of the new one. The pinned one has the id {checkpoint_id}"
    )


def wait_for_new(
    path: str | PathLike[str],
    after: str | CheckpointInfo | None = None,
    *,
    timeout: float | None = None,
    poll_seconds: float = 1.0,
) -> CheckpointInfo | None:
    """Wait until a run directory has a checkpoint that is newer than another one, and return the latest.

    Args:
        path: The run directory. It need not exist yet.
        after: The checkpoint that was seen last, or its tag; by default any checkpoint is new. If there is no
            checkpoint with this tag, because retention has removed it, the latest one is new.
        timeout: The number of seconds to wait. ``None`` means no limit.
        poll_seconds: The number of seconds between two looks at the directory.

    Returns:
        The latest checkpoint, or ``None`` if there was no new one in time. Checkpoints between ``after`` and the
        latest are left out.

    Raises:
        InvalidArgumentError: ``timeout`` is negative, or ``poll_seconds`` is not above 0.
    """
    _check_times(timeout, poll_seconds)
    run = parse_location(path)
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        if (latest := _find_new(run, after)) is not None:
            return latest
        remaining = poll_seconds if deadline is None else deadline - time.monotonic()
        if remaining <= 0:
            return None
        time.sleep(min(poll_seconds, remaining))


def iterate_new(
    path: str | PathLike[str],
    after: str | CheckpointInfo | None = None,
    *,
    timeout: float | None = None,
    poll_seconds: float = 1.0,
) -> Iterator[CheckpointInfo]:
    """Yield the latest checkpoint of a run directory, then each one that is the latest when the loop comes back.

    The arguments and errors are as in :func:`wait_for_new`; the iteration ends if no new checkpoint appears within
    ``timeout`` seconds. Retention may remove a checkpoint before the loop has opened it, unless it is pinned: see
    :func:`iterate_pinned`. At its end it says why: in the log, or by a warning if there was no checkpoint at all.

    Yields:
        The latest checkpoint. If the loop is slower than the training, checkpoints are left out.
    """
    last: CheckpointInfo | None = None
    while (latest := wait_for_new(path, after, timeout=timeout, poll_seconds=poll_seconds)) is not None:
        yield latest
        last = after = latest
    _explain_end(path, None if last is None else last.tag, timeout)


def _explain_end(path: str | PathLike[str], tag: str | None, seconds: float | None) -> None:
    """Say why an iteration ends, with a warning if it has yielded nothing. It has yielded ``tag`` last."""
    if tag is None:
        warn_caller(
            f"no new checkpoint appeared in {path} within {seconds} s, so the loop over its checkpoints ends before it "
            "has begun: to wait for longer, pass another timeout=, or none"
        )
    else:
        _log.info("no checkpoint after %r appeared in %s within %s s: the loop ends", tag, path, seconds)


def iterate_pinned(
    path: str | PathLike[str],
    after: str | CheckpointInfo | None = None,
    *,
    every: bool = False,
    timeout: float | None = None,
    poll_seconds: float = 1.0,
) -> Iterator[Checkpoint]:
    """Yield checkpoints as :func:`iterate_new` does, but opened, and pinned until the loop asks for the next one.

    A checkpoint that is removed before it is pinned is left out. The arguments and errors are as in
    :func:`wait_for_new` and :func:`pin`.

    Args:
        path: As in :func:`wait_for_new`.
        after: As in :func:`wait_for_new`.
        every: Yield each checkpoint, the oldest first, also if the loop is slower than the training. A thread pins new
            ones when they appear. So all that wait for the loop need disk space, whatever the retention policy is.
        timeout: As in :func:`wait_for_new`, from the moment when the loop asks for the next one.
        poll_seconds: As in :func:`wait_for_new`.

    Yields:
        The open checkpoint. ``path`` of it can be passed to :func:`rankless.load_checkpoint`.
    """
    if every:
        _check_times(timeout, poll_seconds)
        last = None
        with closing(_PinCollector(parse_location(path), after, poll_seconds)) as collector:
            while (taken := collector.take(timeout)) is not None:
                checkpoint, pinned = taken
                last = checkpoint.tag
                with pinned:
                    yield checkpoint
        _explain_end(path, last, timeout)
        return
    for info in iterate_new(path, after, timeout=timeout, poll_seconds=poll_seconds):
        with ExitStack() as stack:
            try:
                checkpoint = _open_pinned(path, info.tag, stack)
            except NoCheckpointError:
                continue
            yield checkpoint


class _PinCollector:
    """Opens and pins the checkpoints of a run directory in a thread as they appear, until they are taken."""

    def __init__(self, run: Path, after: str | CheckpointInfo | None, poll_seconds: float) -> None:
        self._run, self._after, self._poll_seconds = run, after, poll_seconds
        #: Open checkpoints with the exit stacks that end their pins, or the error that ended the thread.
        self._found: SimpleQueue[tuple[Checkpoint, ExitStack] | Exception] = SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._collect, name="rankless-pins", daemon=True)
        self._thread.start()

    def _collect(self) -> None:
        try:
            while not self._stopped.is_set():
                for info in _list_new(self._run, self._after):
                    self._after = info
                    with ExitStack() as stack:
                        try:
                            checkpoint = _open_pinned(self._run, info.tag, stack)
                        except NoCheckpointError:
                            continue
                        self._found.put((checkpoint, stack.pop_all()))
                self._stopped.wait(self._poll_seconds)
        except Exception as error:  # noqa: BLE001 - the loop raises it
            self._found.put(error)

    def take(self, timeout: float | None) -> tuple[Checkpoint, ExitStack] | None:
        """Return the next checkpoint, with the exit stack that ends its pin; ``None`` if there is none in time."""
        try:
            found = self._found.get(timeout=timeout)
        except Empty:
            return None
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        """End the thread, and all pins that were not taken."""
        self._stopped.set()
        self._thread.join()
        while not self._found.empty():
            if not isinstance(found := self._found.get(), Exception):
                found[1].close()


def _check_times(timeout: float | None, poll_seconds: float) -> None:
    if (timeout is not None and timeout < 0) or poll_seconds <= 0:
        raise InvalidArgumentError(
            f"timeout must not be negative, and poll_seconds must be above 0; got {timeout!r} and {poll_seconds!r}"
        )


def _find_new(run: Path, after: str | CheckpointInfo | None) -> CheckpointInfo | None:
    """Return the latest complete checkpoint if it is newer than ``after``, else ``None``."""
    return next(reversed(_list_new(run, after)), None)


def _list_new(run: Path, after: str | CheckpointInfo | None) -> list[CheckpointInfo]:
    """Return the complete checkpoints that are newer than ``after``, oldest first."""
    complete = [info for info in list_checkpoints(run) if info.status == "complete"]
    if isinstance(after, str):
        after = next((info for info in complete if info.tag == after), None)
    return [info for info in complete if after is None or info.age > after.age]
