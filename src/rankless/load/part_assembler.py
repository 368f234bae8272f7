"""Assembles a generation from the files of all hosts: intact parts and copies, and parts computed from parity.

At first only the tables are read. The bytes of the parts are verified later, while hosts send each other missing bytes
(:mod:`rankless.load.part_fetch`), or before a part is computed from others. Then the generation is assembled again
without corrupt parts.

:mod:`rankless.load.tier_load` calls it on every rank, in sessions of a load or a drain. Rank 0 merges the reports that
all have posted; all ranks must assemble the same generation, because they plan reads and transfers from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

import msgspec

from rankless.engine.comm.session import RankGroup, Session
from rankless.engine.comm.vote import format_ranks
from rankless.errors import CorruptCheckpointError, RanklessError
from rankless.load.tier_generations import TierHosts
from rankless.process.prepared_types import prepared
from rankless.storage.mapped_file import map_to_read
from rankless.tier.assembled_generation import Assembly
from rankless.tier.generation import Common, Generation
from rankless.tier.host_folder import DATA_SUFFIX
from rankless.tier.job import TierJob
from rankless.tier.parity import check_parity
from rankless.tier.part import PartTable, decode_checked, encode_checked, find_corrupt_range
from rankless.tier.part_names import GenerationKey, PartName
from rankless.tier.rebuild import Rebuilding, plan_rebuildings, rebuild_parts

_encode = msgspec.msgpack.Encoder().encode

_TABLE = "a table of the local tier"


@prepared
class _RankParts(msgspec.Struct, frozen=True, array_like=True):
    """The tables of the parts and parities that a rank looks after, the corrupt ones, and the common, if any.

    Parities have the rank that keeps each.
    """

    tables: list[bytes]
    parities: list[tuple[int, bytes]]
    problems: list[str]
    common: bytes


@prepared
class _AssembledParts(msgspec.Struct, frozen=True, array_like=True):
    """The decision of rank 0: the common, and all tables with the number of the host of each."""

    common: bytes
    tables: list[tuple[int, bytes]]
    problems: list[str]
    rebuildings: list[Rebuilding] = []


class PartAssembler:
    """Assembles one generation. Each rank looks after a share of the parts and parities of its host."""

    def __init__(self, tier: TierJob, ranks: RankGroup, hosts: TierHosts, key: GenerationKey) -> None:
        self._tier, self._ranks, self._hosts, self.key = tier, ranks, hosts, key
        #: Whether the parts were verified, and why parts of this rank's share are not used.
        self.is_verified = False
        self._corrupt: dict[str, str] = {}

    def assemble(self, session: Session) -> Assembly:
        """Collect the tables of all parts. Raises ``CorruptCheckpointError`` on all ranks.

        That is if a part is neither on the hosts nor copied.

        It ends in votes. All ranks call it, again after a part was found corrupt.
        """

        def merge(posted: list[bytes]) -> bytes:
            return _encode(self._merge_parts([msgspec.msgpack.decode(raw, type=_RankParts) for raw in posted]))

        while True:
            _, raw = session.vote("assembling the local checkpoint", self._read_share, _encode, merge)
            merged = msgspec.msgpack.decode(raw, type=_AssembledParts)
            if not merged.rebuildings:
                return self._build_assembly(merged, self._hosts.host_of[session.rank])
            if not self.is_verified:  # no part may be computed from corrupt ones
                session.run_on_all("verifying the local tier", self.verify_share)
                self.is_verified = True
                continue
            rebuild_parts(self._ranks, session, self._tier, self.key, merged.rebuildings)

    def verify_share(self) -> bool:
        """Verify the bytes of this rank's share. Return whether all of them are intact.

        Each rank calls it for itself: in a thread next to the transfers of a load (:mod:`rankless.load.part_fetch`), or
        in a vote before a drain.
        """
        folder, count = self._tier.folder, len(self._corrupt)
        for name in self._list_share("part"):
            with self._noting_problem(name.name):
                table = folder.read_part(name)
                path = folder.path / table.data
                if found := find_corrupt_range(table, map_to_read(path, table.nbytes)):
                    self._corrupt[name.name] = (
                        f"{path}, with the part of rank {name.rank}, is corrupt in bytes "
                        f"{found.local} to {found.local + found.stop - found.start}"
                    )
        for name in self._list_share("parity"):
            with self._noting_problem(name.parity_name):
                parity = folder.read_parity(name)
                path = folder.path / parity.data
                check_parity(parity, map_to_read(path, parity.chunk), str(path))
        return len(self._corrupt) == count

    def _list_share(self, kind: Literal["part", "parity"]) -> list[PartName]:
        """Return the parts or parities that this rank looks after, without the corrupt ones."""
        on_host, rank = self._hosts.ranks_on_host_of(self._ranks.rank), self._ranks.rank
        names = self._tier.folder.list_parts(kind).get(self.key, ())[on_host.index(rank) :: len(on_host)]
        return [one for one in names if (one.name if kind == "part" else one.parity_name) not in self._corrupt]

    @contextmanager
    def _noting_problem(self, name: str) -> Iterator[None]:
        try:
            yield
        except RanklessError as error:
            self._corrupt[name] = str(error.args[-1])

    def _read_share(self) -> _RankParts:
        folder = self._tier.folder
        tables, parities = [], []
        for name in self._list_share("part"):
            with self._noting_problem(name.name):
                tables.append(folder.read_part(name).encode())
        for name in self._list_share("parity"):
            with self._noting_problem(name.parity_name):
                parities.append((name.rank, encode_checked(folder.read_parity(name))))
        common = None
        with suppress(RanklessError):
            common = folder.read_common(self.key)
        encoded = b"" if common is None else encode_checked(common)
        return _RankParts(tables, parities, list(self._corrupt.values()), encoded)

    def _merge_parts(self, posted: Sequence[_RankParts]) -> _AssembledParts:
        tables = [(self._hosts.host_of[rank], raw) for rank, parts in enumerate(posted) for raw in parts.tables]
        problems = [problem for parts in posted for problem in parts.problems]
        names = [PartTable.decode(raw, _TABLE).name for _, raw in tables]
        size = max((name.size for name in names), default=1)
        lost = sorted(set(range(size)) - {name.rank for name in names})
        common = next((parts.common for parts in posted if parts.common), b"")
        rebuildings = _plan_rebuildings(lost, posted)
        if common and len(rebuildings) == len(lost):
            return _AssembledParts(common, tables, problems, rebuildings)
        missing = f"the parts of {format_ranks(lost)} are lost" if lost else "its label is lost"
        raise CorruptCheckpointError(
            f"the generation {self.key.name} of the local tier is incomplete: {missing}"
            + "".join(f"; {problem}" for problem in problems)
        )

    def _build_assembly(self, merged: _AssembledParts, host: int) -> Assembly:
        tables: dict[int, PartTable] = {}
        places: dict[int, dict[int, str]] = {}
        for at, raw in merged.tables:
            table = PartTable.decode(raw, _TABLE)
            tables.setdefault(table.name.rank, table)
            places.setdefault(table.name.rank, {})[at] = table.data
        common = decode_checked(merged.common, Common, "a label of the local tier")
        folder = self._tier.folder.path
        fetched = {
            part: folder / f"{self._hosts.writers[host]}-of-{part:06d}{DATA_SUFFIX}"
            for part, on_hosts in places.items()
            if host not in on_hosts
        }
        generation = Generation(common, dict(sorted(tables.items())))
        return Assembly(generation, places, self._hosts.host_of, host, fetched, folder, merged.problems)


def _plan_rebuildings(lost: Sequence[int], posted: Sequence[_RankParts]) -> list[Rebuilding]:
    """Return how the lost parts are computed that can be. ``posted`` are the parts and parities of all ranks."""
    senders: dict[int, int] = {}
    parities: dict[int, tuple[bytes, int]] = {}
    for rank, parts in enumerate(posted):
        for raw in parts.tables:
            senders.setdefault(PartTable.decode(raw, _TABLE).name.rank, rank)
        for keeper, raw in parts.parities:
            parities.setdefault(keeper, (raw, rank))
    return plan_rebuildings(lost, senders, parities)
