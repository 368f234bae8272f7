"""``LocalTier``: the options of the local tier of a run.

:class:`~rankless.run_directory.RunDirectory` passes the options to saves and drains on each rank, and
:func:`~rankless.named_checkpoints.has_checkpoint` takes them there; a drain without a job takes them on each host
(:mod:`rankless.save.offline_drain`). Ranks compare :meth:`LocalTier.describe` in the first vote of a save, and of
a load.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from rankless.errors import InvalidArgumentError
from rankless.ondisk.validation import check_choice
from rankless.storage.posix import local_path

#: The reaction to a drain that has failed too often: let the next save raise its error, or only warn.
ON_FAILURE = ("raise", "warn")


@dataclass(frozen=True)
class LocalTier:
    """The options of a local tier: each host keeps the newest checkpoints in its own memory, or on its own disk.

    Each save is complete when it is in the tier. Every ``drain_every``-th one is then *drained*: written to the run
    directory, in the background. A job that is started again loads the newest checkpoint that the tier or the run
    directory has, on any number of ranks, and drains it.

    Args:
        folder: A folder of each host: in memory, such as ``/dev/shm/NAME``, or on a local disk. It belongs to one run
            directory. It takes three times the bytes that the host's ranks write, and as much for each copy.
        copies: On how many other hosts each part is copied, so that as many hosts may be lost.
        parity: Over how many hosts parity is computed, instead of copies: that takes one ``parity - 1``-th of the
            memory of a copy, and one host of so many may be lost.
        drain_every: Of how many saves one is drained. Saves at a signal and at the end of a training always are, and so
            are those that the retention policy keeps for their step or metric. If a drain is still in progress, the
            next save after it is drained.
        on_failure: The reaction if a drain has failed several times: the next save raises the error (``"raise"``), or
            there is a warning (``"warn"``) and the next save is drained. The end of a ``with`` block, and
            :meth:`rankless.RunDirectory.finalize`, raise the error of the last drain in any case.
        max_undrained_seconds: A save raises ``StorageError`` if nothing was drained for so many seconds.
        failure_domain: The name of the unit that may fail as a whole with this host, such as its rack. Copies go to
            hosts of other domains. It may differ from host to host.
        copy_rate: The most bytes a second that a rank sends for copies.

    Raises:
        InvalidArgumentError: An argument is invalid.
    """

    folder: str | PathLike[str]
    copies: int = 1
    parity: int = 0
    drain_every: int = 1
    on_failure: str = "raise"
    max_undrained_seconds: float | None = None
    failure_domain: str = ""
    copy_rate: float | None = None

    def __post_init__(self) -> None:
        local_path(self.folder)
        _check_number("copies", self.copies, smallest=0)
        _check_number("parity", self.parity, smallest=0)
        if self.parity == 1:
            raise InvalidArgumentError("parity must be 0 or a number of at least 2 hosts; got 1")
        _check_number("drain_every", self.drain_every, smallest=1)
        check_choice("on_failure", self.on_failure, ON_FAILURE)
        for name in ("max_undrained_seconds", "copy_rate"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidArgumentError(f"{name} must be a number above 0, or None; got {value!r}")

    def describe(self) -> str:
        """Return the options that must be equal on all ranks, as text.

        Saves and loads compare it in their first vote. An option that may differ between hosts is left out.
        """
        return (
            f"{self.copies} copies, parity={self.parity}, drain_every={self.drain_every}, "
            f"on_failure={self.on_failure}, max_undrained_seconds={self.max_undrained_seconds}"
        )

    @property
    def path(self) -> Path:
        """The absolute path of the folder."""
        return local_path(self.folder)


def as_local_tier(local: LocalTier | str | PathLike[str] | None) -> LocalTier | None:
    """Return the options of a local tier that is given by its folder or as such."""
    return local if local is None or isinstance(local, LocalTier) else LocalTier(local)


def _check_number(name: str, value: object, *, smallest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
        raise InvalidArgumentError(f"{name} must be a whole number of at least {smallest}; got {value!r:.80}")
