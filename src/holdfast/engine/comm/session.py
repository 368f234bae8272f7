"""How the ranks of a job decide things together, with a deadline, and fail together.

One primitive: each rank does a piece of work that may fail and posts its outcome, rank 0 looks at all
outcomes and decides, and every rank gets the decision or raises the same error. It runs over the key-value
store of the default process group: no collective, any backend, and a rank that does not come is named.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from holdfast.engine.comm.daemon_executor import DaemonExecutor
from holdfast.engine.comm.polling import Deadline, poll_until
from holdfast.engine.comm.rendezvous import ConversationStore, rendezvous_of
from holdfast.engine.comm.store import DeadlineStore
from holdfast.engine.comm.vote import (
    COORDINATOR_RANK,
    GRACE_SECONDS,
    Decide,
    RankFailure,
    VoteOutcome,
    VoteRound,
    failed_key,
    format_ranks,
)
from holdfast.engine.plan.spec import digest_spec
from holdfast.errors import (
    HoldfastError,
    InvalidArgumentError,
    PeerFailedError,
    RankFailedError,
    RankMismatchError,
    RankTimeoutError,
)

#: Seconds between looks at whether a group is made.
_LOOK = 0.25

T = TypeVar("T")


class RankGroup:
    """The ranks of a process group, and which of them this process is; alone when there is no group."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.group = current_process_group(process_group)
        self.rank, self.size = 0, 1
        self._store: Store | None = None
        self._name = ""
        self._aside: DaemonExecutor | None = None
        self._gloo: dist.ProcessGroup | None = None
        if self.group is not None and dist.get_rank(self.group) < 0:
            raise InvalidArgumentError(
                "this rank is not in the process group that was passed; only its members save and load"
            )
        if self.group is not None and dist.get_world_size(self.group) > 1:
            self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
            members = digest_spec(",".join(map(str, self.global_ranks())).encode(), 8).hex()
            self._name = f"holdfast/{self.group.group_name}/{members}"
            self._store = PrefixStore(self._name, _get_default_store())
            self._aside = DaemonExecutor("holdfast store")

    def global_ranks(self) -> list[int]:
        """The global rank of each rank of the group."""
        return [0] if self.group is None else dist.get_process_group_ranks(self.group)

    def session(self, timeout: float) -> Session:
        """A conversation about one save or load. The n-th session of each rank is the same conversation."""
        if self.group is None or self._store is None or self._aside is None:
            return Session(None, 0, 1, timeout)
        meeting = rendezvous_of(self.group, self._name)
        number = meeting.next_number()
        store = ConversationStore(self._store, self._aside, timeout, meeting, number)
        with translate_store_errors("beginning"):
            store.is_open()  # it is not yet, mostly; but the other ranks see that this one is there
        return Session(store, self.rank, self.size, timeout, number)

    def gloo(self, seconds: float) -> dist.ProcessGroup:
        """A group that moves CPU memory between these ranks: the group itself if it can, else one made once, by all.

        Raises ``RankTimeoutError`` where they do not all come to make it within so many seconds.
        """
        if self.group is None:
            raise InvalidArgumentError("there is no process group, and nothing to exchange")
        if self._gloo is None:
            able = "cpu:gloo" in str(dist.get_backend_config(self.group))
            self._gloo = self.group if able else _gloo_beside(self.global_ranks(), seconds)
        return self._gloo


def current_process_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group given, else the default one, else ``None``."""
    if process_group is not None or not (dist.is_available() and dist.is_initialized()):
        return process_group
    return dist.group.WORLD


def _gloo_beside(global_ranks: list[int], seconds: float) -> dist.ProcessGroup:
    make = partial(
        dist.new_group,
        global_ranks,
        timeout=timedelta(seconds=seconds),
        backend="gloo",
        use_local_synchronization=True,
    )
    wait = Deadline(seconds + GRACE_SECONDS / 2)
    aside = DaemonExecutor("holdfast group")
    making = aside.begin(make)
    try:
        while not making.done() and not wait.is_over:
            concurrent.futures.wait([making], _LOOK)
            wait.tell(lambda: "other ranks while making a group to exchange over")
        made = making.result(0)
    except (TimeoutError, RuntimeError) as error:
        if wait.seconds < seconds:
            raise
        raise RankTimeoutError("another rank did not come to make a group to exchange over") from error
    if not isinstance(made, dist.ProcessGroup):
        raise InvalidArgumentError("this rank is not in the process group that was passed")
    return made


class Session:
    """The votes of one save or load, in an order that is the same on every rank. ``number`` tells it from others.

    ``store`` holds what the ranks tell each other in it; a rank that is alone has none.
    """

    def __init__(self, store: DeadlineStore | None, rank: int, size: int, timeout: float, number: int = 0) -> None:
        self.rank, self.size, self.timeout, self.number = rank, size, timeout, number
        self.store, self._votes = store, 0

    def vote(self, phase: str, work: Callable[[], T], encode: Callable[[T], bytes], decide: Decide) -> tuple[T, bytes]:
        """Do ``work`` here; ``decide`` on rank 0 over what all ranks' work gave; return both results.

        An error in anybody's work, or in the decision, is raised by every rank, naming the ranks it
        happened on. Raises ``RankTimeoutError`` naming ranks that did not come within the timeout.
        """
        return self.begin(phase, work, encode, decide)()

    def begin(
        self, phase: str, work: Callable[[], T], encode: Callable[[T], bytes], decide: Decide
    ) -> Callable[[], tuple[T, bytes]]:
        """The first half of a vote: do ``work`` here, and tell the others. What is returned does the other half.

        A rank that is alone raises what goes wrong at once.
        """
        if self.store is None:
            result = work()
            return lambda: (result, decide([encode(result)]))
        self._votes += 1
        ballot = VoteRound(self.store, self._votes, self.size, phase)
        attempt, mine, error = _attempt(work, encode)
        with translate_store_errors(phase):
            ballot.post(self.rank, mine)
        settle = partial(self._settle, ballot, decide, attempt, error)
        if not isinstance(error, Exception | None):
            settle()  # raises the interrupt, where it came
        return settle

    def _settle(
        self, ballot: VoteRound, decide: Decide, attempt: tuple[T] | None, error: BaseException | None
    ) -> tuple[T, bytes]:
        lead = ballot.collect_and_decide if self.rank == COORDINATOR_RANK else ballot.follow
        with translate_store_errors(ballot.phase):
            # Who has waited in vain for others already need not wait as long again.
            decision = lead(GRACE_SECONDS if isinstance(error, RankTimeoutError) else self.timeout, decide)
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise error
        if decision.failure is not None:
            raise decision.failure.rebuild() from error
        if attempt is None:
            raise RankFailedError(f"rank {self.rank} lost its own result while {ballot.phase}") from error
        return attempt[0], decision.payload

    def check_others(self) -> None:
        """Inside the work of a vote that ranks do together: raise where another has failed at it.

        ``RankTimeoutError`` where it has waited in vain for a third one, else ``PeerFailedError``.
        """
        if self.store is None:
            return
        with translate_store_errors("looking whether all go on"):
            key = failed_key(self._votes)
            failed = self.store.get(key) if self.store.check([key]) else None
        if failed == [RankTimeoutError.__name__.encode()]:
            raise RankTimeoutError("another rank has waited in vain for what all do together")
        if failed:
            raise PeerFailedError("another rank failed at what all do together")

    def part(self) -> None:
        """The last word: rank 0, in whose process the store may live, waits until all others have come to it, too."""
        if self.store is None:
            return
        with suppress(dist.DistError, TimeoutError):
            self.store.set(f"parted/{self.rank}")
            if self.rank == COORDINATOR_RANK:
                everyone = [f"parted/{rank}" for rank in range(self.size)]
                poll_until(partial(self.store.check, everyone), self.timeout, partial(self._missing, everyone))

    def _missing(self, keys: Sequence[str]) -> str:
        """The ranks whose keys are not there."""
        absent = [] if self.store is None else [rank for rank, key in enumerate(keys) if not self.store.check([key])]
        return f"{format_ranks(absent)} while telling all ranks how it ended" if absent else ""

    def all(self, phase: str, work: Callable[[], T]) -> T:
        """Do ``work`` on every rank; all succeed, or all raise the same error."""
        return self.vote(phase, work, lambda _: b"", lambda _: b"")[0]

    def begin_all(self, phase: str, work: Callable[[], T]) -> Callable[[], T]:
        """As :meth:`all`, in two halves: what is returned tells whether all have succeeded."""
        settle = self.begin(phase, work, lambda _: b"", lambda _: b"")
        return lambda: settle()[0]


def _attempt(
    work: Callable[[], T], encode: Callable[[T], bytes]
) -> tuple[tuple[T] | None, VoteOutcome, BaseException | None]:
    try:
        result = work()
        return (result,), VoteOutcome(encode(result)), None
    except BaseException as error:  # noqa: BLE001 - the other ranks must hear of it, whatever it is
        return None, VoteOutcome(failure=RankFailure.of(error)), error


@contextmanager
def translate_store_errors(phase: str) -> Iterator[None]:
    """Raise ``RankFailedError`` where the store is lost meanwhile, ``RankTimeoutError`` where it does not answer."""
    where = f"it lives in rank {COORDINATOR_RANK}'s process, or under torchrun in its agent's"
    try:
        yield
    except HoldfastError:
        raise
    except TimeoutError as error:
        raise RankTimeoutError(f"the ranks' key-value store did not answer while {phase}; {where}: {error}") from error
    except dist.DistError as error:
        raise RankFailedError(f"the ranks' key-value store was lost while {phase}; {where}: {error}") from error


def require_equal(what: str, said: Sequence[str]) -> str:
    """What all ranks said of one thing. Raises ``RankMismatchError`` naming both sides."""
    for rank, word in enumerate(said):
        if word != said[0]:
            raise RankMismatchError(f"ranks disagree about {what}: rank 0 has {said[0]}, rank {rank} has {word}")
    return said[0]
