"""A loader of streams that any number of ranks can take over at any step, although no stream has an index.

A training iterates on each rank; :mod:`rankless.state.rank_states` takes and restores states, in the votes of saves and
loads. All ranks must divide the shards in the same way.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from rankless.data.loader_arguments import check_arguments, describe_members, init_worker
from rankless.data.stream_progress import (
    Shard,
    ShardProgress,
    StreamPlan,
    StreamProgress,
    select_one_of_each_rank,
)
from rankless.data.worker_signals import signals_blocked_in_children
from rankless.engine.comm.process_group_argument import ProcessGroupArgument
from rankless.engine.comm.session import RankGroup
from rankless.errors import InvalidArgumentError, MismatchError, StateError
from rankless.observe.warning import warn_caller
from rankless.state import rng

#: Yields the samples of a shard, from the sample with a number on.
ReadShard = Callable[[Any, int], Iterable[Any]]


#: So many shards without a sample, one after the other, mean that there is none: unless there are more shards.
_MOST_EMPTY = 1000


class _ShardSample(NamedTuple):
    """A sample, and which one it is: its shard, and its number in that."""

    shard: Shard
    number: int
    value: Any


class _Origin:
    """The samples of a batch, and the lengths of the shards that its worker has read to their ends meanwhile.

    It is no sequence: code that pins memory looks for tensors in these.
    """

    __slots__ = ("lengths", "used")

    def __init__(self, used: list[tuple[Shard, int]], lengths: list[tuple[Shard, int]]) -> None:
        self.used, self.lengths = used, lengths


class _TracedBatch(NamedTuple):
    """A collated batch, and where it comes from."""

    origin: _Origin
    value: Any


class _Work(NamedTuple):
    """The work of a rank from a position on: plain values, which are sent to the workers."""

    plan: StreamPlan
    base: StreamProgress
    own: StreamProgress
    rank: int
    size: int

    def describe(self) -> str:
        """Return a text that no other rank has, and that changes when samples are used.

        For example, ``0/3/1/40`` for the seed 0, rank 3 and epoch 1.
        """
        used = sum(progress.next + len(progress.ahead) for progress in self.own.shards.values())
        return f"{self.plan.seed}/{self.rank}/{self.own.epoch}/{used}"

    def iterate(self, worker: int, workers: int) -> Iterator[tuple[Shard, ShardProgress]]:
        """Yield the shards of a worker, without end, each with its progress.

        They change from epoch to epoch also if the order of shards does not: else a worker that has got short ones
        would be more and more epochs ahead of the others.
        """
        for epoch in itertools.count(self.own.epoch):
            shards = self.plan.assign_epoch(self.base, epoch, self.rank, self.size)
            for shard in shards[(worker + epoch // self.size) % workers :: workers]:
                progress = self.own.shards.get(shard) or self.base.of(shard)
                if not progress.is_finished:
                    yield shard, progress


class StreamLoader:
    """A loader of training batches from a stream, which can be resumed as ``dataloader=`` on any number of ranks.

    ::

        def read(file, start):  # the samples of a file, from the one with the number `start` on
            with open(file) as lines:
                yield from itertools.islice(lines, start, None)

        loader = rankless.StreamLoader(files, read, batch_size=8, num_workers=4)
        for step, batch in enumerate(loader, checkpointer.resume() + 1):
            ...

    A stream consists of shards, such as files. One worker of one rank reads each of them. In each epoch every sample is
    used once, also if the number of ranks, of workers or the batch size changes: the batches that the training has got
    count, however far workers have read ahead. The iteration does not end: after the last shard of an epoch a rank goes
    on with its shards of the next one, so that all ranks have a batch at each step. So it has no length.

    A loader has one position, so it has one iteration at a time: a new iteration, and ``load_state_dict``, end the
    current one, which raises ``StateError`` if it is used again.

    Random numbers that ``read`` and ``collate_fn`` draw within workers depend on the seed, the rank and the position.

    Args:
        shards: A value for each shard, which ``read`` gets: names of files, numbers, whatever can be pickled. All ranks
            pass the same, in the same order; a resumed training may not have others, but in another folder.
        read: Is called with a shard and a number, and yields the samples of the shard from the one with this number
            on: the same ones, in the same order, each time.
        batch_size: The number of samples of one batch of one rank.
        shuffle: Read the shards of each epoch in another order; else in their own.
        shuffle_buffer: The number of samples that each worker keeps, to take one at random; 0 leaves them in their
            order. It is emptied at the end of each epoch.
        seed: The order of shards depends only on the seed and the epoch.
        process_group: The ranks that share the data: the data-parallel dimension's ranks, if there are others. The
            default is the default group, or this process alone if there is none.
        options: Options of ``torch.utils.data.DataLoader``, such as ``num_workers``, ``collate_fn``, ``pin_memory``.

    Raises:
        InvalidArgumentError: There is no shard, a number is invalid, or an option decides the order of samples.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        read: ReadShard,
        batch_size: int = 1,
        *,
        shuffle: bool = True,
        shuffle_buffer: int = 0,
        seed: int = 0,
        process_group: ProcessGroupArgument = None,
        **options: Any,
    ) -> None:
        if not isinstance(shards, Sequence) or isinstance(shards, str | bytes) or not shards:
            raise InvalidArgumentError(f"shards must be a list with at least one shard; got {shards!r:.80}")
        if not isinstance(shuffle_buffer, int) or isinstance(shuffle_buffer, bool) or shuffle_buffer < 0:
            raise InvalidArgumentError(f"shuffle_buffer must be a number of samples; got {shuffle_buffer!r}")
        check_arguments(type(self).__name__, batch_size, seed, options)
        if options.get("persistent_workers"):
            raise InvalidArgumentError(
                "persistent_workers: workers of a StreamLoader begin at its position; leave it out"
            )
        if options.pop("drop_last", False):
            raise InvalidArgumentError("drop_last: a StreamLoader has no last batch, all are full; leave it out")
        if process_group is not None and not options.get("in_order", True):
            raise InvalidArgumentError(
                "in_order=False: ranks outside of process_group get the same data, and would get it in another order"
            )
        ranks = RankGroup(process_group)
        self._rank, self._size = ranks.rank, ranks.size
        self._names, self._relative_names = _digest_names(shards), _digest_names(_relative(shards))
        self._sharing_ranks = describe_members(ranks, process_group)
        self._plan = StreamPlan(len(shards), seed, shuffle)
        #: The common progress of all ranks when they began, or were resumed, and the progress of this one since.
        self._base, self._own = StreamProgress(), StreamProgress()
        #: The shards of this rank that are left of its epoch.
        self._left: set[Shard] = set()
        self._begin_epoch(0)
        #: The number of the current iteration, which alone moves the position.
        self._iteration = 0
        workers = max(1, options.get("num_workers", 0))
        if len(shards) < self._size * workers:
            warn_caller(
                f"{len(shards)} shards are fewer than the {self._size * workers} workers that read them: some read the "
                "next epoch meanwhile"
            )
        collate = options.pop("collate_fn", None) or default_collate
        # The loader's own generator: the workers' seed must not be drawn from the global one, which a resume restores.
        options.setdefault("generator", torch.Generator())
        options["worker_init_fn"] = partial(init_worker, options.get("worker_init_fn"))
        self._dataset = _ShardReader(shards, read, batch_size, shuffle_buffer, collate)
        self._loader = DataLoader(self._dataset, batch_size=None, collate_fn=_keep, **options)

    @property
    def needs_all_states(self) -> bool:
        """True if a load gives each rank the states of all ranks that saved, also if their number is the same."""
        return self._size > 1

    @property
    def epoch(self) -> int:
        """The first epoch, from 0, that this rank has not used all its shards of."""
        return self._own.epoch

    @property
    def common_settings(self) -> tuple[str, str]:
        """The ranks that share the data, and the settings that must be equal on all of them, as text."""
        if not self._sharing_ranks:  # this rank has the data for itself
            return "", ""
        plan = self._plan
        return self._sharing_ranks, f"{plan.count} shards{self._names}, shuffle={plan.shuffle}, seed={plan.seed}"

    def __iter__(self) -> Iterator[Any]:
        self._iteration += 1
        iteration = self._iteration
        self._dataset.work = _Work(self._plan, self._base, self._own.copy(), self._rank, self._size)
        with signals_blocked_in_children() if self._loader.num_workers else nullcontext():
            batches = iter(self._loader)
        for batch in batches:
            self._note(batch.origin)
            yield batch.value
            if iteration != self._iteration:
                raise StateError(
                    "this iteration of the data loader is over: load_state_dict, or a new iteration, has moved the "
                    "position; leave the loop, and iterate over the loader again to continue from there"
                )

    def _note(self, origin: _Origin) -> None:
        """Move the position: the training gets these samples now."""
        for shard, number in origin.used:
            self._progress_of(shard).note_used(number)
        # Of a shard that is finished, which a resume knew the length of, a worker tells the length once more.
        lengths = [(shard, length) for shard, length in origin.lengths if shard[0] >= self._own.epoch]
        for shard, length in lengths:
            self._progress_of(shard).length = length
        touched = {shard for shard, _ in (*origin.used, *lengths)}
        self._left -= {shard for shard in touched if self._progress_of(shard).is_finished}
        while not self._left:
            self._begin_epoch(self._own.epoch + 1)

    def _begin_epoch(self, epoch: int) -> None:
        self._own.begin_epoch(epoch)
        shards = self._plan.assign_epoch(self._base, epoch, self._rank, self._size)
        self._left = {shard for shard in shards if not self._progress_of(shard).is_finished}

    def _progress_of(self, shard: Shard) -> ShardProgress:
        if shard not in self._own.shards:
            self._own.shards[shard] = self._base.of(shard).copy()
        return self._own.shards[shard]

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch returned: this rank's, and the common one that all began from."""
        plan = self._plan
        settings = {"count": plan.count, "seed": plan.seed, "shuffle": plan.shuffle}
        own = {"rank": self._rank, "size": self._size, "own": self._own.to_state(), "names": self._relative_names}
        return {**own, "plan": settings, "base": self._base.to_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position of a training on one rank: :meth:`load_state_dicts` is for several ranks."""
        self.load_state_dicts([state])

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the positions of all ranks that saved. Ends the current iteration.

        Raises ``MismatchError`` if they are not positions of one stream, or if that has another number of shards.
        """
        self.check_states(states)
        parts = select_one_of_each_rank(states)
        saved = parts[0]["plan"]
        self._plan = StreamPlan(saved["count"], saved["seed"], saved["shuffle"])
        base = StreamProgress.from_state(parts[0]["base"])
        self._base = self._plan.join(base, [StreamProgress.from_state(part["own"]) for part in parts])
        self._own = StreamProgress()
        self._begin_epoch(self._base.epoch)
        self._iteration += 1

    def check_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Raise ``MismatchError`` if the states are not positions in this stream. It changes nothing."""
        for state in states:
            if not isinstance(state, Mapping) or "plan" not in state:
                raise MismatchError("the data loader that was saved is no StreamLoader")
            if any(state[key] != states[0][key] for key in ("plan", "base", "size")):
                raise MismatchError("the ranks that saved have read different streams")
        if states[0]["plan"]["count"] != self._plan.count:
            raise MismatchError(
                f"the stream was saved with {states[0]['plan']['count']} shards, and has {self._plan.count} now: its "
                "position is not valid"
            )
        if states[0].get("names", self._relative_names) != self._relative_names:
            raise MismatchError(
                "the stream was saved with other shards, or with the same in another order: its position is not valid. "
                "Sort the names"
            )
        select_one_of_each_rank(states)


def _shuffle(samples: Iterator[_ShardSample], size: int, seed: str) -> Iterator[_ShardSample]:
    """Yield samples in another order: each is drawn from so many of its epoch; in their own if that is 0.

    All samples of an epoch come before the first one of the next.
    """
    numbers = random.Random(seed)  # noqa: S311 - no secret
    for _, of_epoch in itertools.groupby(samples, lambda sample: sample.shard[0]):
        epoch = iter(of_epoch)
        buffer = list(itertools.islice(epoch, size))
        for sample in epoch:
            if not buffer:
                yield sample
                continue
            place = numbers.randrange(len(buffer))
            yield buffer[place]
            buffer[place] = sample
        numbers.shuffle(buffer)
        yield from buffer


class _ShardReader(IterableDataset[_TracedBatch]):
    """The reader of the shards of one rank: each worker reads some of them, and makes batches."""

    def __init__(
        self,
        shards: Sequence[Any],
        read: ReadShard,
        batch_size: int,
        buffer: int,
        collate: Callable[[list[Any]], Any],
    ) -> None:
        self._shards, self._read, self._batch_size = shards, read, batch_size
        self._buffer, self._collate = buffer, collate
        self.work: _Work | None = None
        #: The shards that were read to their ends, with their lengths, which no batch has told yet.
        self._lengths: list[tuple[Shard, int]] = []

    def __iter__(self) -> Iterator[_TracedBatch]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        if self.work is None:
            return
        self._lengths = []
        seed = f"{self.work.describe()}/{worker}"
        samples = _shuffle(self._iterate_samples(self.work.iterate(worker, workers)), self._buffer, seed)
        for place in itertools.count():
            if info is not None:  # the generators of the training process are its own
                for name in rng.EVERYWHERE:
                    rng.seed_generators(name, f"{seed}/{place}/{name}")
            batch = list(itertools.islice(samples, self._batch_size))
            lengths, self._lengths = self._lengths, []
            origin = _Origin([(sample.shard, sample.number) for sample in batch], lengths)
            yield _TracedBatch(origin, self._collate([sample.value for sample in batch]))

    def _iterate_samples(self, work: Iterable[tuple[Shard, ShardProgress]]) -> Iterator[_ShardSample]:
        empty = 0
        for shard, progress in work:
            number, ahead = progress.next, set(progress.ahead)
            held: _ShardSample | None = None
            for value in self._read(self._shards[shard[1]], number):
                if number not in ahead:
                    if held is not None:
                        yield held
                    held = _ShardSample(shard, number, value)
                number += 1
            # The length comes with the last sample: the training that has got it knows that the epoch has ended.
            self._lengths.append((shard, number))
            if held is not None:
                yield held
            empty = 0 if held is not None else empty + 1
            if empty > max(_MOST_EMPTY, 2 * len(self._shards)):
                raise StateError(
                    "no shard of the stream that this worker reads has a sample. If `read` uses a library that divides "
                    "what it yields among workers, switch that off: see the guide on streams"
                )


def _digest_names(shards: Sequence[Any]) -> str:
    """Return a text that differs for other names of shards, or for another order; nothing if they have no names."""
    if isinstance(shards, range) or not all(isinstance(shard, str | int | PathLike) for shard in shards):
        return ""
    return f" ({zlib.crc32(chr(10).join(map(str, shards)).encode(errors='surrogatepass')):08x})"


def _relative(shards: Sequence[Any]) -> Sequence[Any]:
    """Return the names of shards without the folders that all of them are in: data may be moved.

    For example, ``["0.tar", "1.tar"]`` for ``["/data/0.tar", "/data/1.tar"]``.
    """
    if not all(isinstance(shard, str | PathLike) for shard in shards):
        return shards
    parts = [str(shard).split("/") for shard in shards]
    levels = zip(*(folders[:-1] for folders in parts), strict=False)
    shared = len([*itertools.takewhile(lambda level: len(set(level)) == 1, levels)])
    return ["/".join(folders[shared:]) for folders in parts]


def _keep(batch: Any) -> Any:
    """Return a batch, which was collated where it was read."""
    return batch
