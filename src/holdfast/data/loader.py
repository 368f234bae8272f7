"""A data loader that any number of ranks can take over in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from holdfast.data.batch_schedule import BatchSchedule, SchedulePosition
from holdfast.data.workers import shield_worker, signals_blocked_in_children
from holdfast.engine.comm.session import RankGroup
from holdfast.errors import InvalidArgumentError, MismatchError, StateError
from holdfast.state import rng

#: Options of ``DataLoader`` that say which samples come when.
_OURS = frozenset({"batch_sampler", "sampler"})


class _BatchRequest(NamedTuple):
    """One rank's batch on its way to a worker: its samples, and a text that no other batch has."""

    about: str
    samples: list[int]


class ResumableLoader:
    """Batches of a dataset for training, to be saved and resumed as ``dataloader=`` on any number of ranks.

    Iterating gives the batches of this rank from the current position to the end of the epoch; iterating again gives
    those of the next epoch. The position moves when a batch is given out, however far workers have read ahead.
    A loader has one position, so it has one iteration at a time: a new iteration, and ``load_state_dict``, end the one
    that is under way, which raises ``StateError`` if it is used again.

    Every sample of an epoch is seen once, by one rank, also where the number of ranks or the size of batches changes
    on the way. All ranks have the same number of batches, all of the same size: what an epoch leaves over is filled up
    with the first samples of the next one, which then has those behind it. With ``drop_last`` it is left out instead.

    Args:
        dataset: has a length and is read by index. The length must stay the same.
        batch_size: samples of one batch of one rank.
        shuffle: in a new order each epoch, else as the dataset has them.
        seed: the order depends on it and on the epoch, and on nothing else.
        drop_last: leave out what an epoch leaves over.
        process_group: the ranks that share the data: those of the data-parallel dimension, where there are others. The
            default group, or this process alone where there is none.
        options: those of ``torch.utils.data.DataLoader``: ``num_workers``, ``collate_fn``, ``pin_memory``, … but for
            ``in_order=False``: batches that come in another order have no position.

    Random numbers drawn by the dataset or by ``collate_fn`` within workers depend on the seed, the position and the
    rank: they too are the same after a resume on as many ranks. Workers are shielded from signals that tell the job to
    end (see :func:`holdfast.shield_worker`).

    Raises:
        InvalidArgumentError: sizes that are none, or options that decide about the order.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int = 1,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        process_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        ranks = RankGroup(process_group)
        self._rank, self._batch = ranks.rank, batch_size
        _check_loader(batch_size, seed, options)
        self._course = BatchSchedule(_length_of(dataset), batch_size * ranks.size, shuffle, seed, drop_last)
        if not self._course.batches():
            length, batch = self._course.length, self._course.batch
            raise InvalidArgumentError(f"a dataset of {length} samples has no batch of {batch} samples over all ranks")
        self._at = SchedulePosition()
        #: The number of the iteration that moves the position.
        self._iteration = 0
        # Its own generator: the seed of workers must not be drawn from the global one, which a resume puts back.
        options.setdefault("generator", torch.Generator())
        options["worker_init_fn"] = partial(_start_epoch, options.get("worker_init_fn"))
        self._loader = DataLoader(_SeededDataset(dataset), batch_sampler=_BatchRequests(self._draws), **options)
        self.dataset = dataset

    @property
    def epoch(self) -> int:
        """The epoch that the next batch begins in, from 0."""
        return self._at.epoch

    def __len__(self) -> int:
        """How many batches an epoch has, counted from its first sample."""
        return self._course.batches()

    def __iter__(self) -> Iterator[Any]:
        self._iteration += 1
        own = self._iteration
        with signals_blocked_in_children() if self._loader.num_workers else nullcontext():
            batches = iter(self._loader)
        for batch in batches:
            self._at = self._course.after(self._at)
            yield batch
            self._check_current(own)

    def _check_current(self, iteration: int) -> None:
        """Raise ``StateError`` if another iteration, or ``load_state_dict``, has taken the position over."""
        if iteration != self._iteration:
            raise StateError(
                "this iteration of the data loader is over: load_state_dict, or a new iteration, has moved the "
                "position; leave the loop, and iterate over the loader again to go on from there"
            )

    def _draws(self) -> Iterator[_BatchRequest]:
        mine = slice(self._rank * self._batch, (self._rank + 1) * self._batch)
        for at, samples in self._course.rest(self._at):
            about = f"{self._course.seed}/{at.epoch}/{at.consumed}/{self._rank}"
            yield _BatchRequest(about, samples[mine].tolist())

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch given out, the same on all ranks."""
        return self._course.state(self._at)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position, in the order that it was reached in. Ends the iteration that is under way.

        Raises ``MismatchError`` for another dataset.
        """
        self.check_states([state])
        self._course, self._at = self._course.resumed(state)
        self._iteration += 1

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on from the position that another number of ranks was at. Raises ``MismatchError`` where it is not one."""
        self.check_states(states)
        self.load_state_dict(states[0])

    def check_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Raise ``MismatchError`` if these are not one position in this dataset; before a load changes anything."""
        for rank, state in enumerate(states):
            if state != states[0]:
                raise MismatchError(
                    f"data loaders were saved at different positions: {states[0]}, rank {rank}: {state}"
                )
        if states[0]["length"] != self._course.length:
            raise MismatchError(
                f"the data loader was saved with {states[0]['length']} samples, and the dataset has "
                f"{self._course.length} now: its position means nothing there; load without dataloader= to begin anew"
            )


class _BatchRequests(Sampler[Any]):
    """What a ``DataLoader`` draws from: anew from the current position each time."""

    def __init__(self, draws: Callable[[], Iterator[_BatchRequest]]) -> None:
        self._draws = draws

    def __iter__(self) -> Iterator[_BatchRequest]:
        return self._draws()


class _SeededDataset(Dataset[Any]):
    """A dataset asked for whole batches, in workers with the generators started anew for each."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitems__(self, draw: _BatchRequest) -> list[Any]:
        if get_worker_info() is not None:
            for name in rng.EVERYWHERE:
                rng.seed_generators(name, f"{draw.about}/{name}")
        several = getattr(self.dataset, "__getitems__", None)
        if callable(several):
            return list(several(draw.samples))
        return [self.dataset[sample] for sample in draw.samples]


def _start_epoch(own: Callable[[int], object] | None, worker: int) -> None:
    """What a worker begins with."""
    shield_worker()
    if own is not None:
        own(worker)


def _length_of(dataset: Any) -> int:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise InvalidArgumentError(
            f"a ResumableLoader takes a dataset with a length and an index; {type(dataset).__qualname__} has none. "
            "A loader of a stream keeps its own position: see load_state_dicts in docs/exact-resume.md"
        )
    return len(dataset)


def _check_loader(batch_size: object, seed: object, options: dict[str, Any]) -> None:
    taken = _OURS & options.keys()
    if taken:
        raise InvalidArgumentError(f"{min(taken)}: a ResumableLoader itself decides which samples come when")
    if not options.get("in_order", True):
        raise InvalidArgumentError(
            "in_order=False: a ResumableLoader counts batches in their order, and would lose some and repeat others "
            "after a resume; leave in_order out"
        )
    if not isinstance(batch_size, int) or batch_size < 1:
        raise InvalidArgumentError(f"batch_size is a number of samples, at least 1, not {batch_size!r}")
    if not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise InvalidArgumentError(f"seed is a whole number from 0 to 2**64 - 1, not {seed!r}")
