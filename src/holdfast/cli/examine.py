"""Reading all of a checkpoint, and telling everything that is wrong with it, not just the first."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import holdfast
from holdfast.cli.output import message
from holdfast.cli.target import load
from holdfast.errors import DamagedError, HoldfastError, NoCheckpointError
from holdfast.terminal import progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was found in one checkpoint.

    ``status`` is ``"unchecked"`` where all could be read, but not all has checksums; ``"unreadable"`` where it
    could not even be opened, for another reason than damage. ``tensors`` and ``bytes`` are those that are sound,
    read in ``seconds``; ``checksummed`` of all tensors have checksums. ``problems`` name files and tensors, ``notes``
    what lies beside them without harm.
    """

    path: str
    status: Literal["verified", "unchecked", "damaged", "unreadable"]
    tensors: int = 0
    checksummed: int = 0
    bytes: int = 0
    seconds: float = 0.0
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was found wrong."""
        return not self.problems


def examine(path: Path) -> Verdict:
    """Read a checkpoint from its first byte to its last. Raises ``NoCheckpointError`` where it is gone."""
    try:
        target = load(path)
        checksummed = sum(target.reader.crcs(group, name) is not None for group, name, _ in target.entries())
    except NoCheckpointError:
        raise
    except HoldfastError as error:
        status: Literal["damaged", "unreadable"] = "damaged" if isinstance(error, DamagedError) else "unreadable"
        return Verdict(path=str(path), status=status, problems=tuple(message(error).splitlines()))
    with progress(f"verifying {path.name}", target.nbytes) as done:
        checkpoint = holdfast.Checkpoint(target.reader)
        started = time.perf_counter()  # torch is imported now
        sound, problems = _check(checkpoint, done)
        seconds = time.perf_counter() - started
    return Verdict(
        path=str(path),
        status="damaged" if problems else "verified" if checksummed == target.tensors else "unchecked",
        tensors=len(sound),
        checksummed=checksummed,
        bytes=sum(sound.values()),
        seconds=seconds,
        problems=tuple(problems),
        notes=target.notes,
    )


def _check(checkpoint: holdfast.Checkpoint, done: Callable[[int], None]) -> tuple[dict[str, int], list[str]]:
    """The sizes of the sound tensors, and what is wrong with the others and with other files."""
    sizes: Counter[str] = Counter()
    problems: dict[str, str] = {}
    for name, nbytes, problem in checkpoint.verify():
        sizes[name] += nbytes
        done(nbytes)
        if problem:
            problems[name] = problem
    return {name: size for name, size in sizes.items() if name not in problems}, list(problems.values())
