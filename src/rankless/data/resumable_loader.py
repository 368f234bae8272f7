"""A data loader that any number of ranks can take over in the middle of an epoch.

A training iterates on each rank; :mod:`rankless.state.rank_states` takes and restores states, in the votes of saves and
loads. A state of an earlier version must still be loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from rankless.data.batch_schedule import BatchSchedule, SchedulePosition
from rankless.data.loader_arguments import check_arguments, describe_members, init_worker
from rankless.data.worker_signals import signals_blocked_in_children
from rankless.engine.comm.process_group_argument import ProcessGroupArgument
from rankless.engine.comm.session import RankGroup
from rankless.errors import InvalidArgumentError, MismatchError, StateError
from rankless.state import rng


class _BatchRequest(NamedTuple):
    """The samples of one rank's batch, as sent to a worker, and a text that no other batch has."""

    seed_text: str
    samples: list[int]


class ResumableLoader:
    """A loader of training batches that can be saved, and resumed as ``dataloader=`` on any number of ranks.

    Iterating gives the batches of this rank from the current position to the end of the epoch; iterating again gives
    the batches of the next epoch. The position moves when a batch is returned, however far workers have read ahead. A
    loader has one position, so it has one iteration at a time: a new iteration, and ``load_state_dict``, end the
    current one, which raises ``StateError`` if it is used again.

    Every sample of an epoch is used once, by one rank, also if the number of ranks or the batch size changes during the
    epoch. All ranks have the same number of batches, all of the same size: if the last batch of an epoch is not full,
    it is completed with the first samples of the next epoch, which then starts after them. With ``drop_last`` it is
    left out instead. ``batch_size`` and the other settings must be equal on all ranks: a save or load raises
    ``RankMismatchError`` otherwise.

    Args:
        dataset: has a length and is read by index. The length must stay the same.
        batch_size: samples of one batch of one rank.
        shuffle: use a new order in each epoch; else the order of the dataset.
        seed: the order depends only on the seed and on the epoch.
        drop_last: leave out the last batch of an epoch if it is not full.
        process_group: the ranks that share the data: the data-parallel dimension's ranks, if there are others. The
            default is the default group, or this process alone if there is none.
        options: options of ``torch.utils.data.DataLoader``, such as ``num_workers``, ``collate_fn``, ``pin_memory``.
            ``in_order=False`` is refused: batches that come in another order have no position.

    Random numbers drawn by the dataset or by ``collate_fn`` within workers depend on the seed, the position and the
    rank: they too are the same after a resume on as many ranks. Workers are protected from signals that tell the job to
    end (see :func:`rankless.shield_worker`).

    Raises:
        InvalidArgumentError: a size or the seed is invalid, or an option decides the order of samples.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int = 1,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        process_group: ProcessGroupArgument = None,
        **options: Any,
    ) -> None:
        ranks = RankGroup(process_group)
        self._rank, self._batch_size = ranks.rank, batch_size
        self._sharing_ranks = describe_members(ranks, process_group)
        check_arguments(type(self).__name__, batch_size, seed, options)
        if not options.get("in_order", True):
            raise InvalidArgumentError(
                "in_order=False: a ResumableLoader counts batches in their order, and would lose some and repeat "
                "others after a resume; leave in_order out"
            )
        self._schedule = BatchSchedule(_length_of(dataset), batch_size * ranks.size, shuffle, seed, drop_last)
        if not self._schedule.count_batches():
            length, batch = self._schedule.length, self._schedule.batch
            raise InvalidArgumentError(f"a dataset of {length} samples has no batch of {batch} samples over all ranks")
        self._position = SchedulePosition()
        #: The number of the current iteration, which alone moves the position.
        self._iteration = 0
        # The loader's own generator: the workers' seed must not be drawn from the global one, which a resume restores.
        options.setdefault("generator", torch.Generator())
        options["worker_init_fn"] = partial(init_worker, options.get("worker_init_fn"))
        self._loader = DataLoader(
            _SeededDataset(dataset), batch_sampler=_BatchRequests(self._iterate_requests), **options
        )
        self.dataset = dataset

    @property
    def epoch(self) -> int:
        """The epoch of the first sample of the next batch, from 0."""
        return self._position.epoch

    @property
    def common_settings(self) -> tuple[str, str]:
        """The ranks that share the data, and the settings that must be equal on all of them, as text.

        Saves and loads compare it: with other settings on a rank, samples would be used twice, or not at all.
        """
        schedule = self._schedule
        if not self._sharing_ranks:  # this rank has the data for itself
            return "", ""
        return (
            self._sharing_ranks,
            (
                f"batch_size={self._batch_size}, {schedule.length} samples, shuffle={schedule.shuffle}, "
                f"seed={schedule.seed}, drop_last={schedule.drop_last}"
            ),
        )

    def __len__(self) -> int:
        """Return the number of batches of an epoch, counted from its first sample."""
        return self._schedule.count_batches()

    def __iter__(self) -> Iterator[Any]:
        self._iteration += 1
        iteration = self._iteration
        with signals_blocked_in_children() if self._loader.num_workers else nullcontext():
            batches = iter(self._loader)
        for batch in batches:
            self._position = self._schedule.position_after(self._position)
            yield batch
            self._check_current(iteration)

    def _check_current(self, iteration: int) -> None:
        """Raise ``StateError`` if another iteration, or ``load_state_dict``, has taken over the position."""
        if iteration != self._iteration:
            raise StateError(
                "this iteration of the data loader is over: load_state_dict, or a new iteration, has moved the "
                "position; leave the loop, and iterate over the loader again to continue from there"
            )

    def _iterate_requests(self) -> Iterator[_BatchRequest]:
        own_samples = slice(self._rank * self._batch_size, (self._rank + 1) * self._batch_size)
        for position, samples in self._schedule.batches_from(self._position):
            seed_text = f"{self._schedule.seed}/{position.epoch}/{position.consumed}/{self._rank}"
            yield _BatchRequest(seed_text, samples[own_samples].tolist())

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch returned. It is the same on all ranks."""
        return self._schedule.to_state(self._position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position, in the order that was saved with it. Ends the current iteration.

        Raises ``MismatchError`` for another dataset.
        """
        self.check_states([state])
        self._schedule, self._position = self._schedule.resume_from(state)
        self._iteration += 1

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Continue from the position that another number of ranks saved.

        Raises ``MismatchError`` if the ranks saved different positions, or for another dataset.
        """
        self.check_states(states)
        self.load_state_dict(states[0])

    def check_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Raise ``MismatchError`` if the states are not one position in this dataset.

        It is called before a load changes anything.
        """
        for rank, state in enumerate(states):
            if state != states[0]:
                raise MismatchError(
                    f"data loaders were saved at different positions: {states[0]}, rank {rank}: {state}"
                )
        if "length" not in states[0]:
            raise MismatchError("the data loader that was saved is no ResumableLoader")
        if states[0]["length"] != self._schedule.length:
            raise MismatchError(
                f"the data loader was saved with {states[0]['length']} samples, and the dataset has "
                f"{self._schedule.length} now: its position is not valid"
            )


class _BatchRequests(Sampler[Any]):
    """A batch sampler for ``DataLoader`` that starts from the current position each time."""

    def __init__(self, make_requests: Callable[[], Iterator[_BatchRequest]]) -> None:
        self._make_requests = make_requests

    def __iter__(self) -> Iterator[_BatchRequest]:
        return self._make_requests()


class _SeededDataset(Dataset[Any]):
    """A dataset that is read by whole batches. In workers the random number generators are seeded for each batch."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitems__(self, request: _BatchRequest) -> list[Any]:
        if get_worker_info() is not None:
            for name in rng.EVERYWHERE:
                rng.seed_generators(name, f"{request.seed_text}/{name}")
        getitems = getattr(self.dataset, "__getitems__", None)
        if callable(getitems):
            return list(getitems(request.samples))
        return [self.dataset[sample] for sample in request.samples]


def _length_of(dataset: Any) -> int:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise InvalidArgumentError(
            f"a ResumableLoader takes a dataset with a length and an index; {type(dataset).__qualname__} has none. "
            "For streams there is rankless.StreamLoader"
        )
    return len(dataset)
