"""Functions for evaluators and servers: they read a run while another job saves into it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from os import PathLike
from pathlib import Path

from holdfast import view
from holdfast.errors import CheckpointReplacedError, InvalidArgumentError, NoCheckpointError
from holdfast.formats.native import holds_checkpoint
from holdfast.run.catalog import list_checkpoints
from holdfast.run.pin import held_pin, is_being_removed
from holdfast.run.scan import CheckpointInfo
from holdfast.run.tags import Best, TagArgument
from holdfast.storage.posix import list_names, local_path
from holdfast.view import Checkpoint

#: How often :func:`pin` tries again while a process removes the checkpoint, and the seconds between: that process may
#: see the pin, and leave the checkpoint.
_ATTEMPTS, _RETRY_SECONDS = 40, 0.05


@contextmanager
def pin(path: str | PathLike[str], tag: TagArgument = None) -> Iterator[Checkpoint]:
    """Open a checkpoint, and keep retention from removing it until the end of the ``with`` block.

    Retention of any job and ``holdfast prune`` leave it, also on other hosts of a shared file system. A save with
    ``overwrite=True`` under this tag replaces it nevertheless. If the process dies, the pin ends by itself.

    Args:
        path: A run directory, or a checkpoint in one.
        tag: As in :func:`holdfast.open`.

    Yields:
        The open checkpoint. ``path`` of it can be passed to :func:`holdfast.load_checkpoint`.

    Raises:
        NoCheckpointError: There is no checkpoint, or none with the tag; and all other errors of :func:`holdfast.open`.
        InvalidArgumentError: The checkpoint is not one of holdfast, so no retention removes it.
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
            raise InvalidArgumentError(f"{checkpoint.path} is no checkpoint of holdfast: open it without a pin")
        with ExitStack() as pinned:
            pinned.enter_context(held_pin(checkpoint.path.parent, checkpoint.path.name, identity.run))
            parent, name = checkpoint.path.parent, checkpoint.path.name
            names = list_names(parent)
            # A lock of a host that has died may stay: after some attempts it counts no more.
            waits = attempt < _ATTEMPTS // 2 and is_being_removed(parent, name, identity.run, names)
            if name in names and not waits and holds_checkpoint(checkpoint.path, identity.id):
                stack.push(pinned.pop_all())
                return checkpoint
        time.sleep(_RETRY_SECONDS)
    raise CheckpointReplacedError(f"{checkpoint.path} was replaced or removed while it was being pinned")


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
    if (timeout is not None and timeout < 0) or poll_seconds <= 0:
        raise InvalidArgumentError(
            f"timeout must not be negative, and poll_seconds must be above 0; got {timeout!r} and {poll_seconds!r}"
        )
    run = local_path(path)
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

    The arguments and errors are those of :func:`wait_for_new`; the iteration ends if no new checkpoint appears within
    ``timeout`` seconds. Retention may remove a checkpoint before the loop has opened it, unless it is pinned: see
    :func:`iterate_pinned`.

    Yields:
        The latest checkpoint. If the loop is slower than the training, checkpoints are left out.
    """
    while (latest := wait_for_new(path, after, timeout=timeout, poll_seconds=poll_seconds)) is not None:
        yield latest
        after = latest


def iterate_pinned(
    path: str | PathLike[str],
    after: str | CheckpointInfo | None = None,
    *,
    timeout: float | None = None,
    poll_seconds: float = 1.0,
) -> Iterator[Checkpoint]:
    """Yield what :func:`iterate_new` does, opened, and pinned until the loop asks for the next one.

    A checkpoint that is removed before it is pinned is left out. The arguments and errors are those of
    :func:`wait_for_new` and :func:`pin`.

    Yields:
        The open checkpoint. ``path`` of it can be passed to :func:`holdfast.load_checkpoint`.
    """
    for info in iterate_new(path, after, timeout=timeout, poll_seconds=poll_seconds):
        with ExitStack() as stack:
            try:
                checkpoint = _open_pinned(path, info.tag, stack)
            except NoCheckpointError:
                continue
            yield checkpoint


def _find_new(run: Path, after: str | CheckpointInfo | None) -> CheckpointInfo | None:
    """Return the latest complete checkpoint if it is newer than ``after``, else ``None``."""
    complete = [info for info in list_checkpoints(run) if info.status == "complete"]
    if not complete:
        return None
    latest = complete[-1]
    if isinstance(after, str):
        after = next((info for info in complete if info.tag == after), None)
    return latest if after is None or latest.age > after.age else None
