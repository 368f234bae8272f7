"""Decisions that all ranks of a job make together, with a deadline. If one rank fails, all ranks fail.

There is one primitive: each rank does some work that may fail, and posts its outcome. Rank 0 reads all outcomes and
decides. Every rank gets the decision or raises the same error. It uses the key-value store of the default process
group: no collectives, any backend, and a rank that does not come is named.

A save, a load, a live copy, a conversion and ``open_weights`` open one :class:`Session` each, on every rank, in the
thread of the caller. The votes of an asynchronous save continue in its background thread: no two threads vote in one
session at a time. The order of the votes of a session must be the same on all ranks, and may only depend on decisions
that all ranks have.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec

from rankless.engine.comm.daemon_executor import DaemonExecutor
from rankless.engine.comm.host_map import HostAgreement, HostMap
from rankless.engine.comm.host_messages import HostMessages
from rankless.engine.comm.host_vote_channel import HostVoteChannel
from rankless.engine.comm.job_store import DeadlineStore
from rankless.engine.comm.known_failures import known_failures
from rankless.engine.comm.polling import Deadline, poll_until
from rankless.engine.comm.process_group_argument import ProcessGroupArgument, current_process_group, loaded_distributed
from rankless.engine.comm.rendezvous import SessionStore, rendezvous_of
from rankless.engine.comm.vote import (
    COORDINATOR_RANK,
    GRACE_SECONDS,
    Decide,
    RankFailure,
    VoteOutcome,
    VoteRound,
    format_ranks,
)
from rankless.engine.comm.vote_channel import VoteChannel
from rankless.engine.plan.tensor_specs import digest_bytes
from rankless.errors import (
    InvalidArgumentError,
    PeerFailedError,
    RankFailedError,
    RanklessError,
    RankMismatchError,
    RankTimeoutError,
)
from rankless.observe.spans import span, traced
from rankless.storage.host_mailbox import HostMailbox, reachable_id, remove_stale_boards

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import Store

#: The size in bytes of the digest of a host's id.
_HOST_BYTES = 8

#: Seconds between two checks whether the process group has been made.
_POLL_SECONDS = 0.25

#: If a rank did not come to a vote, rank 0 waits this many seconds for the ranks that got the error of the vote.
_LAST_SECONDS = 1.5

T = TypeVar("T")


class _ThreadState(threading.local):
    """Sessions of a thread, as :mod:`rankless.engine.comm.collective_call` counts them."""

    opened_sessions = 0


this_thread = _ThreadState()


class RankGroup:
    """The ranks of a process group, and the own rank; a single rank if there is no group.

    Each call makes one from its argument ``process_group``, on each rank; ``RunDirectory`` and the components keep
    theirs. It sends nothing before a session is opened.
    """

    def __init__(self, process_group: ProcessGroupArgument = None) -> None:
        self.process_group = current_process_group(process_group)
        self.rank, self.size = 0, 1
        self._store: Store | None = None
        self._name = ""
        self._executor: DaemonExecutor | None = None
        self._gloo: dist.ProcessGroup | None = None
        if self.process_group is not None:
            self._join(self.process_group)

    def _join(self, process_group: dist.ProcessGroup) -> None:
        dist = loaded_distributed()
        if dist.get_rank(process_group) < 0:
            raise InvalidArgumentError(
                "this rank is not in the process group that was passed; only its members save and load"
            )
        if dist.get_world_size(process_group) > 1:
            self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
            members = digest_bytes(",".join(map(str, self.global_ranks())).encode(), 8).hex()
            self._name = f"rankless/{process_group.group_name}/{members}"
            c10d = dist.distributed_c10d
            self._store = c10d.PrefixStore(self._name, c10d._get_default_store())  # noqa: SLF001
            self._executor = DaemonExecutor("rankless store")

    def global_ranks(self) -> list[int]:
        """Return the global rank of each rank of the group."""
        if self.process_group is None:
            return [0]
        ranks: list[int] = loaded_distributed().get_process_group_ranks(self.process_group)
        return ranks

    @traced("open the session", "vote")
    def open_session(self, timeout: float) -> Session:
        """Return a session for one save or load. The n-th session of each rank is the same one.

        Every rank calls it, in the same order as all others. It waits for no other rank.
        """
        this_thread.opened_sessions += 1
        if self.process_group is None or self._store is None or self._executor is None:
            return Session(None, 0, 1, timeout)
        rendezvous = rendezvous_of(self.process_group, self._name)
        number = rendezvous.next_session_number()
        raise_if_failed = partial(known_failures.raise_if_member_failed, self.process_group)
        store = SessionStore(self._store, self._executor, timeout, rendezvous, number, raise_if_failed=raise_if_failed)
        with translate_store_errors("beginning"):
            store.is_open()  # mostly not yet, but this announces the rank to the others
        return Session(store, self.rank, self.size, timeout, number, agreement=rendezvous.agreement)

    def open_background_store(self, seconds: float, connect: Callable[[Store], Store]) -> SessionStore | None:
        """Return the store of a session for a thread next to the training, over a connection of its own.

        It counts as a session: every rank must call it. Nothing is sent yet. A single rank has no store. ``connect``
        returns the connection, given the connection of the training.

        ``rankless.watch`` calls it on every rank, in the thread of the caller.
        """
        if self.process_group is None or self._store is None:
            return None
        rendezvous = rendezvous_of(self.process_group, self._name)
        number = rendezvous.next_session_number()
        return SessionStore(connect(self._store), DaemonExecutor("rankless watch store"), seconds, rendezvous, number)

    def gloo_group(self, seconds: float) -> dist.ProcessGroup | None:
        """Return a process group that can send CPU memory between these ranks; ``None`` if a process has none.

        It is the process group itself if that has gloo; otherwise all ranks make another one, once. Raises
        ``RankTimeoutError`` if not all of them come to make it within ``seconds``.

        Saves and loads that exchange bytes call it on all ranks, in the thread that exchanges.
        """
        if self.process_group is None:
            return None
        if self._gloo is None:
            has_gloo = "cpu:gloo" in str(loaded_distributed().get_backend_config(self.process_group))
            self._gloo = self.process_group if has_gloo else _make_gloo_group(self.global_ranks(), seconds)
        return self._gloo


def _make_gloo_group(global_ranks: list[int], seconds: float) -> dist.ProcessGroup:
    dist = loaded_distributed()
    make = partial(
        dist.new_group,
        global_ranks,
        timeout=timedelta(seconds=seconds),
        backend="gloo",
        use_local_synchronization=True,
    )
    deadline = Deadline(seconds + GRACE_SECONDS / 2)
    executor = DaemonExecutor("rankless group")
    future = executor.submit(make)
    try:
        while not future.done() and not deadline.is_over:
            concurrent.futures.wait([future], _POLL_SECONDS)
            deadline.warn_if_slow(lambda: "other ranks while making a group to exchange over")
        process_group = future.result(0)
    except (TimeoutError, RuntimeError) as error:
        if deadline.elapsed_seconds < seconds:
            raise
        raise RankTimeoutError("another rank did not come to make a group to exchange over") from error
    if not isinstance(process_group, dist.ProcessGroup):
        raise InvalidArgumentError("this rank is not in the process group that was passed")
    return process_group  # type: ignore[no-any-return]


class Session:
    """The votes of one save or load, in an order that is the same on every rank.

    ``number`` distinguishes it from other sessions. ``store`` has its keys; a single rank has none. ``agreement`` has
    the hosts, once the ranks have agreed on them.
    """

    def __init__(
        self,
        store: DeadlineStore | None,
        rank: int,
        size: int,
        timeout: float,
        number: int = 0,
        *,
        agreement: HostAgreement | None = None,
    ) -> None:
        self.rank, self.size, self.timeout, self.number = rank, size, timeout, number
        self.store, self._votes = store, 0
        self._agreement = agreement or HostAgreement()
        self._channel: VoteChannel | None = None
        #: Whether the last vote ended because ranks waited in vain: who did not come will not leave either.
        self._lacks_ranks = False

    def vote(self, phase: str, work: Callable[[], T], encode: Callable[[T], bytes], decide: Decide) -> tuple[T, bytes]:
        """Do ``work`` on this rank, and ``decide`` on rank 0 over the results of all ranks. Return result and decision.

        If work fails on any rank, or the decision fails, every rank raises the error, which names the ranks where it
        happened. Raises ``RankTimeoutError`` naming the ranks that did not come within the timeout.
        """
        with span(phase, "step"):
            return self.begin_vote(phase, work, encode, decide)()

    def begin_vote(
        self, phase: str, work: Callable[[], T], encode: Callable[[T], bytes], decide: Decide
    ) -> Callable[[], tuple[T, bytes]]:
        """Do the first half of a vote: do ``work`` and post the outcome.

        The returned function does the second half. A single rank raises errors at once.

        :class:`~rankless.save.save_operation.SaveOperation` splits its vote on the copies so: an asynchronous save
        posts in the call, and finishes the vote in the background.
        """
        if self.store is None:
            result = work()
            return lambda: (result, decide([encode(result)]))
        self._votes += 1
        self._channel = self._open_channel(self.store, self._votes)
        vote_round = VoteRound(self._channel, phase, self._agreement)
        attempt, outcome, error = _run_work(work, encode)
        if self._votes == 1:
            outcome = msgspec.structs.replace(outcome, phase=phase)
        if self._agreement.hosts is None:
            outcome = msgspec.structs.replace(outcome, host=digest_bytes(reachable_id().encode(), _HOST_BYTES))
        # A rank that has waited for another one in vain has no time left: that one may host the store.
        waits = self.store.limited_waits(GRACE_SECONDS) if isinstance(error, RankTimeoutError) else nullcontext()
        with translate_store_errors(phase), waits:
            vote_round.post_outcome(self.rank, outcome)
        finish = partial(self._finish_vote, vote_round, decide, attempt, error)
        if not isinstance(error, Exception | None):
            finish()  # raises the interrupt on the rank that got it
        return finish

    def _finish_vote(
        self, vote_round: VoteRound, decide: Decide, attempt: tuple[T] | None, error: BaseException | None
    ) -> tuple[T, bytes]:
        """Collect or await the decision. Return the own result and the decision, or raise the error."""
        collect = vote_round.collect_and_decide if self.rank == COORDINATOR_RANK else vote_round.await_decision
        with span("vote", "vote", vote_round.phase), translate_store_errors(vote_round.phase):
            # A rank that already timed out waits only for the grace period.
            decision = collect(GRACE_SECONDS if isinstance(error, RankTimeoutError) else self.timeout, decide)
            self._lacks_ranks = decision.failure is not None and decision.failure.kind == RankTimeoutError.__name__
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise error
        if decision.failure is not None:
            raise decision.failure.to_error() from error
        if attempt is None:
            raise RankFailedError(f"rank {self.rank} lost its own result while {vote_round.phase}") from error
        return attempt[0], decision.payload

    def raise_if_peer_failed(self) -> None:
        """Raise an error if another rank has failed in the work of the current vote. Call it during that work.

        Raises ``RankTimeoutError`` if the other rank timed out waiting for a third one, otherwise ``PeerFailedError``.

        :class:`~rankless.engine.io.p2p.P2PExchange` and :class:`~rankless.engine.comm.store_messages.StoreMessages` ask
        while they wait for bytes.
        """
        if self._channel is None:
            return
        with translate_store_errors("checking for failures of other ranks"):
            failed = self._channel.read_failure()
        if failed == RankTimeoutError.__name__:
            raise RankTimeoutError("another rank timed out in work that all ranks do together")
        if failed:
            raise PeerFailedError("another rank failed in work that all ranks do together")

    def leave(self) -> None:
        """Leave the session.

        Rank 0 waits for all other ranks first, because its process may host the key-value store. If a rank did not come
        to the last vote, it waits only for those that get the error of that.

        A save that has committed calls it on every rank, in the thread that has committed
        (:mod:`rankless.save.background`), and so do the searches in local tiers. A load of a run directory does not.
        """
        if self.store is None:
            return
        with span("leave", "vote"), suppress(loaded_distributed().DistError, TimeoutError, RankFailedError):
            channel = self._open_channel(self.store, "parted")
            channel.depart(self.rank)
            if self.rank == COORDINATOR_RANK:
                have_departed = partial(self.store.check, channel.outcome_keys)
                seconds = min(_LAST_SECONDS, self.timeout) if self._lacks_ranks else self.timeout
                if poll_until(have_departed, seconds, partial(_describe_staying_ranks, channel)):
                    last_vote = self._channel.published_keys if self._channel is not None else ()
                    self.store.delete_keys(*channel.departure_keys, *last_vote)  # nobody reads them any more

    def _open_channel(self, store: DeadlineStore, vote: int | str) -> VoteChannel:
        """Return the messages of a vote: of each host if that are fewer than of each rank."""
        hosts = self._agreement.hosts
        if hosts is None or not hosts.can_combine:
            return VoteChannel(store, vote, self.size)
        if vote == 1:
            remove_stale_boards()
        return HostVoteChannel(store, vote, hosts, self.rank, self._open_mailbox(store, hosts, str(vote)))

    def _open_mailbox(self, store: DeadlineStore, hosts: HostMap, name: str) -> HostMailbox:
        return HostMailbox(f"{store.prefix()}{hosts.host_of[self.rank]}/{name}".replace("/", "-"))

    def open_host_messages(self, name: str) -> HostMessages | None:
        """Return the messages of this vote between the ranks of each host, under a name; ``None`` without such hosts.

        :mod:`rankless.engine.integrity.crc_gather` calls it on all ranks in the work of a vote.
        """
        hosts = self._agreement.hosts
        if self.store is None or hosts is None or not hosts.can_combine:
            return None
        return HostMessages(self._open_mailbox(self.store, hosts, f"{self._votes}-{name}"), hosts, self.rank)

    @property
    def hosts(self) -> HostMap | None:
        """The hosts of all ranks, once they are known."""
        return self._agreement.hosts

    @property
    def vote_number(self) -> int:
        """The number of the latest vote, which is equal on all ranks during its work."""
        return self._votes

    def run_on_all(self, phase: str, work: Callable[[], T]) -> T:
        """Do ``work`` on every rank; all succeed, or all raise the same error.

        Call it on all ranks. ``work`` may fail on one of them alone.
        """
        return self.vote(phase, work, lambda _: b"", lambda _: b"")[0]

    def begin_on_all(self, phase: str, work: Callable[[], T]) -> Callable[[], T]:
        """Do the first half of :meth:`run_on_all`. The returned function waits until all ranks have done the work."""
        with span(phase, "step"):
            finish = self.begin_vote(phase, work, lambda _: b"", lambda _: b"")
        return lambda: finish()[0]


def _describe_staying_ranks(channel: VoteChannel) -> str:
    """Describe the ranks that have not departed."""
    ranks = channel.find_unposted()
    among = "" if channel.names_each_departure else "one or more of "
    return f"{among}{format_ranks(ranks)} while reporting the outcome to all ranks" if ranks else ""


def _run_work(
    work: Callable[[], T], encode: Callable[[T], bytes]
) -> tuple[tuple[T] | None, VoteOutcome, BaseException | None]:
    try:
        result = work()
        return (result,), VoteOutcome(encode(result)), None
    except BaseException as error:  # noqa: BLE001 - the other ranks must learn of any error
        return None, VoteOutcome(failure=RankFailure.from_error(error)), error


class WritingRanks(msgspec.Struct, frozen=True):
    """The ranks that write an output together. ``attempt`` counts the attempts in their session, from 0 on.

    Saves, drains, components and conversions pass it to their outputs.
    """

    group: RankGroup
    session: Session
    attempt: int = 0


@contextmanager
def translate_store_errors(phase: str) -> Iterator[None]:
    """Raise ``RankFailedError`` if the store is lost meanwhile, ``RankTimeoutError`` if it does not answer."""
    store_location = f"it runs in rank {COORDINATOR_RANK}'s process, or under torchrun in its agent's"
    try:
        yield
    except RanklessError:
        raise
    except TimeoutError as error:
        raise RankTimeoutError(
            f"the ranks' key-value store did not answer while {phase}; {store_location}: {error}"
        ) from error
    except RuntimeError as error:
        dist = loaded_distributed()
        if dist is None or not isinstance(error, dist.DistError):
            raise
        raise RankFailedError(
            f"the ranks' key-value store was lost while {phase}; {store_location}: {error}"
        ) from error


def require_equal(subject: str, values: Sequence[str]) -> str:
    """Return the value that all ranks passed. Raises ``RankMismatchError`` naming both sides if they differ.

    Rank 0 calls it in decisions.
    """
    for rank, value in enumerate(values):
        if value != values[0]:
            raise RankMismatchError(f"ranks disagree about {subject}: rank 0 has {values[0]}, rank {rank} has {value}")
    return values[0]
