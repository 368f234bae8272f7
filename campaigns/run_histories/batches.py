"""Histories that a worker makes one after the other."""

from __future__ import annotations

import gc
import importlib
import logging
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from campaigns.common.fork_server import CONTEXT
from campaigns.run_histories.draws import draw_at_random, draw_from
from campaigns.run_histories.history import History
from campaigns.run_histories.hosts import OneMachine
from campaigns.run_histories.modules import MODULES
from campaigns.run_histories.places import FolderPlace, Place, open_kind
from campaigns.run_histories.state import Counts, ViolationError
from campaigns.run_histories.trainer import Trainer
from rankless.errors import EmptyRunError


@dataclass(frozen=True)
class Batch:
    """Some histories: the kind of place, the first seed, their number, and the events of each.

    ``rare`` are the events that followed each event too seldom in earlier batches. With a ``script``, the events are
    those of it.
    """

    kind: str
    first: int
    count: int
    events: int
    rare: Mapping[str, Sequence[str]] = field(default_factory=dict)
    script: tuple[str, ...] = ()


@dataclass
class BatchResult:
    """The results of some histories."""

    counts: Counts = field(default_factory=Counts)
    histories: int = 0
    violations: list[str] = field(default_factory=list)


def run_batch(batch: Batch, *, prints: bool = False) -> BatchResult:
    """Make some histories one after the other."""
    result = BatchResult()
    with _scratch() as folders, open_kind(batch.kind, folders, CONTEXT) as make:
        prepare((FolderPlace(folders["tmpfs"], "warm"), make("warm")))
        for seed in range(batch.first, batch.first + batch.count):
            base = Path(tempfile.mkdtemp(dir="/dev/shm"))
            history = History(make, OneMachine(), base, seed, result.counts)
            result.histories += 1
            try:
                history.run(batch.events, draw_from(batch.script) if batch.script else draw_at_random(seed, batch.rare))
            except ViolationError as error:
                result.violations.append(_describe(batch.kind, seed, history, error))
            finally:
                shutil.rmtree(base, ignore_errors=True)
            if prints:
                print("\n".join(history.log))
    return result


def _describe(kind: str, seed: int, history: History, error: ViolationError) -> str:
    again = f'--only --kinds "{kind}" --seed {seed} --script "{"; ".join(history.events)}"'
    return "\n".join([f"{kind}, seed {seed}: {error}", again, *history.log, ""])


def prepare(places: Iterable[Place]) -> None:
    """Import and make what jobs have in common, in these places, before they are forked from this process."""
    torch.set_num_threads(1)
    logging.getLogger("rankless").addHandler(logging.NullHandler())
    for name in MODULES:
        importlib.import_module(name)
    for place in places:
        _warm_up(place)
    gc.freeze()


def _warm_up(place: Place) -> None:
    """Do once what jobs do."""
    for steps in ((1,), (1, 2)):
        trainer = Trainer(place, None, "a", 1)
        with suppress(EmptyRunError):
            trainer.resume()
        trainer.save(steps)
    trainer.read()
    trainer.command("prune", "--keep", "9")
    trainer.command("rollback", "s1")
    place.remove()


class _scratch:  # noqa: N801 - a context manager
    """Folders for the kinds of file systems."""

    def __enter__(self) -> dict[str, Path]:
        self._folders = {"ext4": Path(tempfile.mkdtemp()), "tmpfs": Path(tempfile.mkdtemp(dir="/dev/shm"))}
        return self._folders

    def __exit__(self, *_: object) -> None:
        for folder in self._folders.values():
            shutil.rmtree(folder, ignore_errors=True)
