"""Reading all of a checkpoint, and telling everything that is wrong with it, not just the first."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import holdfast
from holdfast.cli.output import format_error_message
from holdfast.cli.process import leave_on_interrupt
from holdfast.cli.stray_weights import list_unnamed_weights
from holdfast.cli.target import inspect_exact_path, raise_not_read
from holdfast.errors import CorruptCheckpointError, HoldfastError, NoCheckpointError
from holdfast.observe.terminal import show_progress


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """What was found in one checkpoint.

    ``status`` is ``"unchecked"`` if all could be read, but not all has checksums; ``"unreadable"`` if it could not
    even be opened, for another reason than damage. ``tensors`` and ``bytes`` are those that are sound,
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


def verify_checkpoint(path: Path) -> VerifyResult:
    """Read a checkpoint from its first byte to its last. Raises ``NoCheckpointError`` where it is gone."""
    try:
        target = inspect_exact_path(path)
    except NoCheckpointError:
        raise
    except CorruptCheckpointError as error:
        return VerifyResult(path=str(path), status="damaged", problems=tuple(_all_damage(path, error)))
    except HoldfastError as error:
        return VerifyResult(
            path=str(path), status="unreadable", problems=tuple(format_error_message(error).splitlines())
        )
    with leave_on_interrupt():  # imports torch, which is no part of what the bar shows
        checkpoint = holdfast.Checkpoint(target.reader)
    with show_progress(f"verifying {path.name}", target.nbytes) as done:
        started = time.perf_counter()
        tally = _check(checkpoint, done)
        seconds = time.perf_counter() - started
    checksummed = target.tensors - len(tally.unchecked)
    return VerifyResult(
        path=str(path),
        status="damaged" if tally.problems else "unchecked" if tally.unchecked else "verified",
        tensors=len(tally.sound),
        checksummed=checksummed,
        bytes=sum(tally.sound.values()),
        seconds=seconds,
        problems=tuple(tally.problems),
        notes=(
            *(note for note in target.notes if note not in raise_not_read(target.reader)),
            *list_unnamed_weights(target),
        ),
    )


def _all_damage(path: Path, error: CorruptCheckpointError) -> list[str]:
    with leave_on_interrupt():
        from holdfast.load.verification import find_all_corruption  # noqa: PLC0415 - torch takes its time
    return find_all_corruption(path, error)


@dataclass(frozen=True)
class _Tally:
    """The sizes of sound tensors, the names of those without checksums, and all that is wrong, each once."""

    sound: dict[str, int]
    unchecked: set[str]
    problems: list[str]


def _check(checkpoint: holdfast.Checkpoint, done: Callable[[int], None]) -> _Tally:
    sizes: Counter[str] = Counter()
    damaged: set[str] = set()
    unchecked: set[str] = set()
    problems: dict[str, None] = {}
    for name, nbytes, problem, checked in checkpoint.verify():
        done(nbytes)
        if name:
            sizes[name] += nbytes
        if problem:
            if not name or name not in damaged:  # a tensor is read in parts: the first says enough
                problems[problem] = None
            damaged.add(name)
        if not checked:
            unchecked.add(name)
    return _Tally({name: size for name, size in sizes.items() if name not in damaged}, unchecked, list(problems))
