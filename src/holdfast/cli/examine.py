"""Reading all of a checkpoint, and telling everything that is wrong with it, not just the first."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import holdfast
from holdfast.cli.output import message
from holdfast.cli.progress import progress
from holdfast.cli.target import Target, load
from holdfast.errors import DamagedError, HoldfastError, StorageError
from holdfast.layout.blocks import BLOCK
from holdfast.layout.dtypes import width


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was found in one checkpoint.

    ``status`` is ``"unchecked"`` where all could be read, but not all has checksums; ``"unreadable"`` where it
    could not even be opened, for another reason than damage. ``tensors`` and ``bytes`` are those that are sound,
    read in ``seconds``; ``checksummed`` of all tensors have checksums. ``problems`` name files and tensors.
    """

    path: str
    status: Literal["verified", "unchecked", "damaged", "unreadable"]
    tensors: int = 0
    checksummed: int = 0
    bytes: int = 0
    seconds: float = 0.0
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was found wrong."""
        return not self.problems


def examine(path: Path) -> Verdict:
    """Read a checkpoint from its first byte to its last."""
    try:
        target = load(path)
        checksummed = sum(target.reader.crcs(group, name) is not None for group, name, _ in target.entries())
    except HoldfastError as error:
        status: Literal["damaged", "unreadable"] = "damaged" if isinstance(error, DamagedError) else "unreadable"
        return Verdict(path=str(path), status=status, problems=(message(error),))
    with progress(f"verifying {path.name}", target.nbytes) as done:
        checkpoint = holdfast.Checkpoint(target.reader)
        started = time.perf_counter()  # torch is imported now
        sound, problems = _check(target, checkpoint, done)
        seconds = time.perf_counter() - started
    return Verdict(
        path=str(path),
        status="damaged" if problems else "verified" if checksummed == target.tensors else "unchecked",
        tensors=len(sound),
        checksummed=checksummed,
        bytes=sum(sound),
        seconds=seconds,
        problems=tuple(dict.fromkeys(problems)),
    )


def _check(target: Target, checkpoint: holdfast.Checkpoint, done: Callable[[int], None]) -> tuple[list[int], list[str]]:
    """The sizes of the sound tensors, and what is wrong, the first of it maybe twice."""
    sound: list[int] = []
    problems: list[str] = []
    rest = {f"{group}/{name}" for group, name, _ in target.entries()}
    try:
        for name, nbytes in checkpoint.verify():
            rest.discard(name)
            sound.append(nbytes)
            done(nbytes)
    except (DamagedError, StorageError) as error:
        problems.append(message(error))
    for name in sorted(rest):  # verify() ends at the first that is damaged
        try:
            _read(checkpoint, name)
            sound.append(checkpoint.info(name).nbytes)
        except (DamagedError, StorageError) as error:
            problems.append(message(error))
        done(checkpoint.info(name).nbytes)
    return sound, problems


def _read(checkpoint: holdfast.Checkpoint, name: str) -> None:
    info = checkpoint.info(name)
    size = width(info.dtype)
    for start in range(0, info.nbytes, BLOCK):
        checkpoint.read(name, start // size, min(start + BLOCK, info.nbytes) // size)
