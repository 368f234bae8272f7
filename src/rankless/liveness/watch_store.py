"""Messages in the job's key-value store between ranks that watch each other.

Keys: ``beat/RANK``, the heartbeat, or a farewell; ``host/HOST/NUMBER``, the processes of a host; ``notice/NUMBER``,
a message for all ranks: there is none as long as no rank is lost. For example, ``beat/3`` is rank 3's heartbeat. Their
numbers are in ``notices`` and ``host/HOST``. ``settled`` counts the ranks that do not need the store any more. In each
interval a rank makes two calls.

:class:`~rankless.liveness.watcher.Watcher` uses it in its thread, on each rank. A value is set before the number that
announces it is raised: readers rely on that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from rankless.engine.comm.job_store import DeadlineStore
from rankless.liveness.rank_loss import RankLoss

#: The heartbeat of a rank that has left.
FAREWELL = b"left"


class LocalProcess(msgspec.Struct, frozen=True, array_like=True):
    """The process of a rank, on a host that all readers are on."""

    rank: int
    pid: int


class Notice(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message to all ranks: ranks are lost or, without a loss, rank 0 has left and may take the store with it."""

    loss: RankLoss | None = None


_pack = msgspec.msgpack.Encoder().encode
_unpack_process = msgspec.msgpack.Decoder(LocalProcess).decode
_unpack_notice = msgspec.msgpack.Decoder(Notice).decode


class WatchStore:
    """The keys, as one rank uses them. Calls raise ``TimeoutError`` or ``DistError``, as ``DeadlineStore`` says."""

    def __init__(self, store: DeadlineStore, rank: int, host: str) -> None:
        self._store, self._rank, self._host = store, rank, f"host/{host}"
        self._beats = self._notices_read = self._locals_read = 0
        self._known: set[int] = set()
        self._has_settled = False

    def is_open(self) -> bool:
        """Return whether this rank can post. Rank 0 answers those that wait for that."""
        return self._store.has_met_all() or self._store.is_open()

    def has_met_all(self) -> bool:
        """Return whether all ranks can post, as far as this one has to help."""
        return self._store.has_met_all()

    def join(self, pid: int) -> None:
        """Post the process of this rank."""
        number = self._store.add(self._host, 1)
        self._store.set(f"{self._host}/{number}", _pack(LocalProcess(self._rank, pid)))
        self._store.add("notices", 0)

    def beat(self) -> None:
        """Post the next heartbeat."""
        self._beats += 1
        self._store.set(f"beat/{self._rank}", str(self._beats).encode())

    def leave(self) -> None:
        """Post the farewell instead of a heartbeat."""
        self._store.set(f"beat/{self._rank}", FAREWELL)

    def look(self, observed: int | None) -> tuple[int, int, bytes | None]:
        """Return the numbers of notices and of processes of this host, and the heartbeat of a rank if it has one."""
        keys = ["notices", self._host]
        if observed is not None and self._has_beaten(observed):
            keys.append(f"beat/{observed}")
        notices, processes, *beats = self._store.get(*keys)
        return int(notices), int(processes), beats[0] if beats else None

    def read_beats(self, ranks: Sequence[int]) -> dict[int, bytes]:
        """Return the heartbeats of those ranks that have one."""
        present = [rank for rank in ranks if self._has_beaten(rank)]
        return (
            dict(zip(present, self._store.get(*(f"beat/{rank}" for rank in present)), strict=True)) if present else {}
        )

    def has_left(self, rank: int) -> bool:
        """Return whether a rank has posted its farewell."""
        return self.read_beats([rank]).get(rank) == FAREWELL

    def read_processes(self, number: int) -> Iterator[LocalProcess]:
        """Yield the processes of this host up to a number that have not been read, without this one."""
        while self._locals_read < number and self._store.check([f"{self._host}/{self._locals_read + 1}"]):
            self._locals_read += 1
            process = _unpack_process(self._store.get(f"{self._host}/{self._locals_read}")[0])
            if process.rank != self._rank:
                yield process

    def read_notices(self, number: int) -> Iterator[Notice]:
        """Yield the notices up to a number that have not been read."""
        while self._notices_read < number and self._store.check([f"notice/{self._notices_read + 1}"]):
            self._notices_read += 1
            yield _unpack_notice(self._store.get(f"notice/{self._notices_read}")[0])

    def post_notice(self, notice: Notice) -> None:
        """Post a notice, unless another rank has posted the same loss."""
        ranks = "leave" if notice.loss is None else ",".join(map(str, notice.loss.ranks))
        if self._store.add(f"posted/{ranks}", 1) == 1:
            self._store.set(f"notice/{self._store.add('numbers', 1)}", _pack(notice))
            self._store.add("notices", 1)

    def settle(self) -> None:
        """Post, once, that this rank does not need the store any more."""
        if not self._has_settled:
            self._has_settled = True
            self._store.add("settled", 1)

    def count_settled(self) -> int:
        """Return the number of ranks that do not need the store any more."""
        return self._store.add("settled", 0)

    def _has_beaten(self, rank: int) -> bool:
        if rank not in self._known and self._store.check([f"beat/{rank}"]):
            self._known.add(rank)
        return rank in self._known
