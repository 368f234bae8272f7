"""The thread that posts the heartbeats of this rank and looks for the loss of others.

:class:`~rankless.liveness.watch.Watch` starts and stops one on each rank, in the main thread. The thread must never
wait for the training, and raises an error in it only by its :class:`~rankless.liveness.rank_loss_reaction.Reaction`.

Processes of one host observe each other (:mod:`rankless.process.local_processes`). So heartbeats matter for lost hosts
only, and their timeout can be long. The thread has a connection of its own, which is opened in the background: to open
one may take 5 s. In an interval it makes two calls of the store, whatever the number of ranks: it posts its heartbeat,
and reads the heartbeat of its successor with the number of notices.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist

from rankless.engine.comm.polling import poll_until
from rankless.engine.comm.vote import COORDINATOR_RANK, describe_error
from rankless.errors import RanklessError
from rankless.liveness.heartbeats import Ring, SilenceMeter, find_unchanged
from rankless.liveness.rank_loss import LossEvidence, RankLoss
from rankless.liveness.rank_loss_reaction import Reaction
from rankless.liveness.watch_store import FAREWELL, Notice, WatchStore
from rankless.process.local_processes import LocalProcesses

#: Seconds between two attempts to begin, until all ranks have.
_BEGIN_INTERVAL = 0.1

#: Other processes that end within so many seconds are counted in, too.
_SETTLE_SECONDS = 0.005

#: The number of intervals that the ranks after a silent one are observed for, too.
_SWEEP_INTERVALS = 3

#: The most characters of the message of an error that every rank logs.
_MOST_DETAIL = 1000

_log = logging.getLogger("rankless")


@dataclass(frozen=True)
class WatchTimes:
    """Seconds between two heartbeats, of silence that counts as a loss, and for one call of the store."""

    interval: float
    timeout: float

    @property
    def call_seconds(self) -> float:
        """The deadline of one call of the store."""
        return max(1.0, min(5.0, self.timeout / 3))

    @property
    def farewell_seconds(self) -> float:
        """The most seconds that rank 0 waits for others at its end. They look once in an interval."""
        return 2 * self.interval + 1.0


@dataclass(frozen=True)
class Member:
    """A rank of a group, and the numbers of all its ranks in the default group, which messages use."""

    rank: int
    global_ranks: Sequence[int]


class Watcher:
    """The watch of one rank over the others of its group."""

    def __init__(
        self,
        board: WatchStore,
        member: Member,
        times: WatchTimes,
        reaction: Reaction,
        has_group: Callable[[], bool],
    ) -> None:
        self._board, self._times = board, times
        self._rank, self._names = member.rank, member.global_ranks
        self._reaction, self._has_group = reaction, has_group
        self._ring, self._processes = Ring(self._rank, len(self._names)), LocalProcesses()
        self._silence, self._outage = self._new_meter(), SilenceMeter(times.call_seconds + 2 * times.interval)
        self._has_joined, self._answers, self._next_look = False, 0, 0.0
        self._ended: list[int] = []
        self._may_lose_store = False
        self._closing = threading.Event()
        self._error: BaseException | None = None
        #: Set when a loss is known.
        self.has_loss = threading.Event()
        self._loss: RankLoss | None = None
        self._thread = threading.Thread(target=self._run, name="rankless watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, error: BaseException | None = None) -> None:
        """Leave the job, normally or with an error that the others learn of. Wait for that.

        The main thread calls it, at the end of the block or of the process.
        """
        if not self._closing.is_set():
            self._error = error
            self._closing.set()
            self._processes.wake_up()
        self._thread.join(2 * self._times.call_seconds + self._times.farewell_seconds)

    @property
    def is_running(self) -> bool:
        """True if others are still watched.

        The main thread asks it before a second watch of a group begins.
        """
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._loss is None and not self._closing.is_set() and self._has_group():
                self._ended += self._processes.wait(self._next_look - time.monotonic())
                if not self._closing.is_set() and (loss := self._look()) is not None:
                    self._react(loss)
            with suppress(TimeoutError, dist.DistError, RanklessError):
                self._leave()
        except Exception:  # noqa: BLE001 - the training goes on
            _log.exception("the watch for dead ranks has failed; ranks that die are no longer noticed")
        finally:
            self._processes.close()

    def _look(self) -> RankLoss | None:
        """Look for losses. The store may fail, too."""
        try:
            loss = self._find_ended() or (self._take_turn() if time.monotonic() >= self._next_look else None)
            self._answers += 1
            self._outage.observe(b"%d" % self._answers, time.monotonic())
        except TimeoutError:
            return self._count_outage()
        except dist.DistError as error:
            if self._may_lose_store:
                _log.info("rank 0 has ended, and the key-value store with it: dead ranks are no longer noticed")
                self._closing.set()
                return None
            return self._find_lost_store(str(error))
        return loss

    def _take_turn(self) -> RankLoss | None:
        """Post a heartbeat, and look at the posts of others."""
        is_begun = self._has_joined and self._board.has_met_all()
        self._next_look = time.monotonic() + (self._times.interval if is_begun else _BEGIN_INTERVAL)
        if not self._has_joined:
            if not self._board.is_open():
                return None
            self._board.join(os.getpid())
            self._has_joined = True
        self._board.beat()
        notices, processes, beat = self._board.look(self._ring.observed)
        for process in self._board.read_processes(processes):
            self._processes.add(process.rank, process.pid)
        for notice in self._board.read_notices(notices):
            if notice.loss is not None:
                return notice.loss
            self._may_lose_store = True
            self._board.settle()
        return self._judge_beat(beat)

    def _judge_beat(self, beat: bytes | None) -> RankLoss | None:
        """Return the loss of the observed rank if it has been silent for too long."""
        if beat is None or self._ring.observed is None:
            return None
        if beat == FAREWELL:
            self._ring.skip()
            self._silence = self._new_meter()
            return None
        if self._silence.observe(beat, time.monotonic()) < self._times.timeout:
            return None
        return self._sweep_ring(self._ring.observed)

    def _sweep_ring(self, silent: int) -> RankLoss | None:
        """Look which ranks after a silent one are silent, too: all ranks of its host are if it is down."""
        ranks = [silent, *self._ring.successors]
        before = self._board.read_beats(ranks)
        for _ in range(_SWEEP_INTERVALS):
            self._board.beat()
            if self._closing.wait(self._times.interval):
                return None
        unchanged = find_unchanged(before, self._board.read_beats(ranks))
        lost = [silent, *(rank for rank in unchanged if rank != silent and before[rank] != FAREWELL)]
        if silent not in unchanged:
            self._silence = self._new_meter()
            return None
        return self._loss_of(lost, LossEvidence.SILENT, self._describe_silence(lost))

    def _describe_silence(self, lost: Sequence[int]) -> str:
        pid = self._processes.pid_of(lost[0])
        reason = (
            "its host is down or cannot be reached, or its process is stopped or stuck in native code"
            if pid is None
            else f"its process {pid} exists, but is stopped or stuck in native code"
        )
        others = f" (rank {self._names[lost[0]]}; the others for a shorter time)" if len(lost) > 1 else ""
        return f"for {self._silence.seconds:.0f} s{others}: {reason}"

    def _find_ended(self) -> RankLoss | None:
        """Return the loss of ranks of this host that have ended without a farewell."""
        if not self._ended:
            return None
        if not self._closing.wait(_SETTLE_SECONDS):
            self._ended += self._processes.wait(0)
        dead = sorted(rank for rank in self._ended if not self._board.has_left(rank))
        self._ended, self._next_look = [], 0.0  # the others may have left a notice
        return self._loss_of_ended(dead) if dead else None

    def _loss_of_ended(self, dead: Sequence[int]) -> RankLoss:
        pids = ", ".join(str(self._processes.pid_of(rank)) for rank in dead)
        return self._loss_of(
            dead, LossEvidence.ENDED, f"process{'es' if len(dead) > 1 else ''} {pids} on {os.uname().nodename}"
        )

    def _count_outage(self) -> RankLoss | None:
        """Return a loss if the store has not answered for too long, or probably died with rank 0."""
        if COORDINATOR_RANK in self._ended:
            return self._loss_of_ended([COORDINATOR_RANK])
        seconds = self._outage.observe(b"%d" % self._answers, time.monotonic())
        return None if seconds < self._times.timeout else self._loss_of_store(f"has not answered for {seconds:.0f} s")

    def _find_lost_store(self, error: str) -> RankLoss:
        """Return the loss of ranks of this host that ended with the store, or of rank 0, which may have hosted it."""
        self._ended += self._processes.wait(_SETTLE_SECONDS)
        return self._loss_of_ended(sorted(self._ended)) if self._ended else self._loss_of_store(f"was lost ({error})")

    def _loss_of_store(self, state: str) -> RankLoss:
        detail = f"the ranks' key-value store {state}; it runs in that rank's process, or under torchrun in its agent's"
        return self._loss_of([COORDINATOR_RANK], LossEvidence.STORE, detail)

    def _loss_of(self, ranks: Sequence[int], evidence: LossEvidence, detail: str) -> RankLoss:
        return RankLoss(tuple(self._names[rank] for rank in ranks), evidence, self._names[self._rank], detail)

    def _react(self, loss: RankLoss) -> None:
        self._loss = loss
        self._reaction.begin(loss)
        self.has_loss.set()
        with suppress(TimeoutError, dist.DistError, RanklessError):
            if loss.finder == self._names[self._rank]:
                self._board.post_notice(Notice(loss))
            self._board.settle()
        self._reaction.finish(self._closing)

    def _leave(self) -> None:
        """Say farewell. Rank 0 stays until the others have read it: the store may end with its process."""
        if not self._has_joined:
            return
        if self._error is not None and self._loss is None:
            detail = describe_error(self._error)[:_MOST_DETAIL]
            self._board.post_notice(Notice(self._loss_of([self._rank], LossEvidence.RAISED, detail)))
        poll_until(self._has_said_farewell, self._times.farewell_seconds, lambda: "")
        self._board.settle()
        if self._rank != COORDINATOR_RANK:
            return
        if self._error is None and self._loss is None:
            self._board.post_notice(Notice())
        others = len(self._names) - (len(self._loss.ranks) if self._loss is not None else 0)
        poll_until(lambda: self._board.count_settled() >= others, self._times.farewell_seconds, lambda: "")

    def _has_said_farewell(self) -> bool:
        """Post the farewell, without which the end of this process is a failure. Return whether the store answered."""
        try:
            self._board.leave()
        except TimeoutError:
            return False
        return True

    def _new_meter(self) -> SilenceMeter:
        return SilenceMeter(2 * self._times.interval)
