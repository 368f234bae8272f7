"""``holdfast verify``: read every byte and check every CRC."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

import holdfast
from holdfast.cli.output import clean, console, count, human_size, print_json
from holdfast.cli.progress import progress
from holdfast.cli.target import checkpoints, load, one, place
from holdfast.errors import DamagedError, HoldfastError


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was found in one checkpoint.

    ``tensors`` and ``bytes`` were read in ``seconds``, ``checksummed`` of the tensors have CRCs. ``"unchecked"`` is
    a checkpoint whose format has no checksums for some or all of them. ``problem`` names the file or tensor.
    """

    path: str
    status: Literal["verified", "unchecked", "damaged", "unreadable"]
    tensors: int = 0
    checksummed: int = 0
    bytes: int = 0
    seconds: float = 0.0
    problem: str | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing was found wrong."""
        return self.status in {"verified", "unchecked"}


def verify(
    checkpoint: Annotated[str, typer.Argument(metavar="CKPT|RUN", help="A checkpoint, or a run's folder: its latest.")],
    check_all: Annotated[bool, typer.Option("--all", "-a", help="Every checkpoint of the run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON, for programs.")] = False,
) -> None:
    """Read every byte of a checkpoint, check every CRC, and name what is damaged.

    Exit code 1 where something is. Of a run, checkpoints whose manifest is damaged are always named, as one of
    them may be its latest.
    """
    verdicts = []
    for path in _places(place(checkpoint), check_all=check_all):
        verdicts.append(_examine(path))
        if not as_json:
            _print(verdicts[-1])
    if as_json:
        print_json({"ok": all(verdict.ok for verdict in verdicts), "checkpoints": [asdict(one) for one in verdicts]})
    raise typer.Exit(0 if all(verdict.ok for verdict in verdicts) else 1)


def _places(path: Path, *, check_all: bool) -> list[Path]:
    found = checkpoints(path)
    if not found:
        return [one(path)]
    return [info.path for info in found if check_all or info.status == "damaged" or info is found[-1]]


def _examine(path: Path) -> Verdict:
    tensors = nbytes = checksummed = 0
    started = time.perf_counter()
    try:
        target = load(path)
        checksummed = sum(
            target.reader.crcs(group, name) is not None for group, infos in target.reader.groups.items() for name in infos
        )
        with progress(path.name, target.nbytes) as done:
            view = holdfast.Checkpoint(target.reader)
            started = time.perf_counter()  # torch is there now
            for _, size in view.verify():
                tensors, nbytes = tensors + 1, nbytes + size
                done(size)
    except HoldfastError as error:
        ...
