"""The part of a load that concerns the local tier: what the hosts have, and the bytes that they send to each other.

1. All ranks tell what their hosts have. Rank 0 knows then which generations are complete, and selects.
2. The ranks of each host verify the parts of the selected generation that are there, and send their tables to all.
   A part that is corrupt is left out, and a copy on another host takes its place.
3. When the reads are planned, each host gets the bytes that its ranks need and that are in parts on other hosts. They
   are put into files of the tier at the same offsets. After that, the load is an ordinary one, from files of the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from holdfast.engine.comm.session import RankGroup, Session
from holdfast.engine.comm.spec_exchange import deduplicate
from holdfast.engine.comm.vote import COORDINATOR_RANK, format_ranks
from holdfast.engine.io.p2p import P2PExchange
from holdfast.errors import CorruptCheckpointError, HoldfastError, StorageError
from holdfast.load.read_plan import ReadPlan
from holdfast.observe.warning import warn_caller
from holdfast.ondisk.manifest import Manifest
from holdfast.run.scan import CheckpointInfo
from holdfast.storage.mapped_file import map_to_read, map_to_write, reserve_span
from holdfast.storage.memory import Bytes
from holdfast.storage.posix import remove_file
from holdfast.tier.assembly import Assembly
from holdfast.tier.catalog import HostOffer, LocalCheckpoint, find_complete, list_offers
from holdfast.tier.collected import CollectedParts
from holdfast.tier.epochs import read_epochs
from holdfast.tier.folder import DATA_SUFFIX
from holdfast.tier.generation import Common, Generation
from holdfast.tier.parity import check_parity
from holdfast.tier.part import (
    GenerationKey,
    PartTable,
    decode_checked,
    encode_checked,
    find_corrupt_range,
)
from holdfast.tier.reader import GenerationReader
from holdfast.tier.rebuild import Rebuilding, plan_rebuildings, rebuild_parts
from holdfast.tier.state import TierState
from holdfast.tier.transfers import Transfer, TransferEnds, merge_spans, plan_transfers, run_transfers

_encode = msgspec.msgpack.Encoder().encode


class _RankParts(msgspec.Struct, frozen=True, array_like=True):
    """The tables of the intact parts and parities that a rank has verified, the corrupt ones, and the common, if any.

    Parities have the rank that keeps each.
    """

    tables: list[bytes]
    parities: list[tuple[int, bytes]]
    problems: list[str]
    common: bytes


class _AssembledParts(msgspec.Struct, frozen=True, array_like=True):
    """The decision of rank 0: the common, and all tables with the number of the host of each."""

    common: bytes
    tables: list[tuple[int, bytes]]
    problems: list[str]
    rebuildings: list[Rebuilding] = []


class _Hosts(msgspec.Struct, frozen=True, array_like=True):
    """The hosts of the ranks, and the beginnings of the names of their files.

    The run directory lacks the parts of ``ranks`` of the generation ``lacking``.
    """

    host_of: list[int]
    writers: list[str]
    lacking: GenerationKey | None
    ranks: list[int]


class TierLoad:
    """The local tier in one load, over all attempts."""

    def __init__(self, tier: TierState, ranks: RankGroup, timeout: float) -> None:
        self.tier, self._ranks, self._timeout = tier, ranks, timeout
        #: On rank 0, the complete generations, oldest first.
        self.local: Sequence[LocalCheckpoint] = ()
        #: On rank 0, why labels of generations could not be read.
        self._unreadable: Sequence[str] = ()
        self._host_of: Sequence[int] = ()
        self._writers: Sequence[str] = ()
        self._assembly: Assembly | None = None

    @property
    def reads_again(self) -> bool:
        """True if this rank can read each byte of the checkpoint."""
        return self._assembly is None or not self._assembly.is_spread

    def gather(self) -> None:
        """Let all ranks tell which generations their hosts have.

        From now on, an earlier job that is still alive changes none of them.
        """
        session = self._ranks.open_session(self._timeout)

        def find_newest_epoch() -> int:
            return self.tier.folder.find_newest_epoch()  # the folder may be refused

        _, raw = session.vote(
            "beginning to look into the local tier",
            find_newest_epoch,
            _encode,
            lambda posted: self.tier.reserve_epoch(max(map(msgspec.msgpack.decode, posted))).encode(),
        )
        # On all hosts before any of them looks: else an earlier job may complete one and remove another meanwhile.
        session.run_on_all("taking over the local tier", lambda: self.tier.take_over(raw.decode()))
        self._gather(session)
        session.leave()

    def _gather(self, session: Session) -> None:
        """Exchange what the hosts have."""

        def list_own() -> HostOffer:
            folder = self.tier.folder
            return HostOffer(folder.identity, self.tier.slots.writer, list_offers(folder))

        def decide(posted: list[bytes]) -> bytes:
            offers = [msgspec.msgpack.decode(raw, type=HostOffer) for raw in posted]
            epochs = read_epochs(self.tier.run)
            self.local = find_complete(offers, epochs)
            self._unreadable = [one.problem for offer in offers for one in offer.generations if one.problem]
            host_of, first_ranks = deduplicate([offer.host.encode() for offer in offers])
            writers = [offers[rank].writer for rank in first_ranks]
            return _encode(_Hosts(host_of, writers, *self._find_lacking(offers, epochs)))

        _, raw = session.vote("looking into the local tier", list_own, _encode, decide)
        hosts: _Hosts = msgspec.msgpack.decode(raw, type=_Hosts)
        self._host_of, self._writers = hosts.host_of, hosts.writers
        if hosts.lacking is not None:
            self._complete_collected(session, hosts.lacking, hosts.ranks)

    def _find_lacking(
        self, offers: Sequence[HostOffer], epochs: Mapping[int, int]
    ) -> tuple[GenerationKey | None, list[int]]:
        """Return the newest generation that only hosts and the run directory have together, and what this one lacks."""
        collected = CollectedParts.of(self.tier.run)
        shared = list_offers(collected.folder) if collected.exist else []
        together = find_complete([*offers, HostOffer("", "", shared)], epochs)
        newest = together[-1].key if shared and together else None
        if newest is None or newest in {one.key for one in self.local}:
            return None, []
        size = together[-1].manifest.provenance.world_size
        return newest, sorted(set(range(size)) - {rank for one in shared if one.key == newest for rank in one.ranks})

    def _complete_collected(self, session: Session, key: GenerationKey, ranks: Sequence[int]) -> None:
        """Put parts of the hosts into the run directory, from where rank 0 writes the checkpoint."""
        host = self._host_of[session.rank]
        on_host = [rank for rank, of_rank in enumerate(self._host_of) if of_rank == host]
        share = ranks[on_host.index(session.rank) :: len(on_host)]
        collected = CollectedParts.of(self.tier.run)
        session.run_on_all(
            "putting parts of the local tier into the run directory",
            lambda: collected.put_host_parts(self.tier.folder, key, share),
        )

    def assemble(self, session: Session, key: GenerationKey) -> Assembly:
        """Verify the parts of a generation, and collect their tables. Raises ``CorruptCheckpointError`` on all ranks.

        That is if a part is neither on the hosts nor copied.
        """
        host = self._host_of[session.rank]
        ranks = [rank for rank, of_rank in enumerate(self._host_of) if of_rank == host]

        def verify_share() -> _RankParts:
            return self._verify_parts(key, ranks.index(session.rank), len(ranks))

        def merge(posted: list[bytes]) -> bytes:
            return _encode(self._merge_parts(key, [msgspec.msgpack.decode(raw, type=_RankParts) for raw in posted]))

        problems: list[str] = []
        while True:
            _, raw = session.vote("verifying the local tier", verify_share, _encode, merge)
            merged = msgspec.msgpack.decode(raw, type=_AssembledParts)
            problems += [problem for problem in merged.problems if problem not in problems]
            if not merged.rebuildings:
                return self._build_assembly(merged, host, problems)
            rebuild_parts(self._ranks, session, self.tier, key, merged.rebuildings)

    def assemble_newest(self, key: GenerationKey) -> None:
        """Assemble the generation that this job has saved last."""
        session = self._ranks.open_session(self._timeout)
        self._gather(session)
        self.assemble(session, key)
        session.leave()

    def _verify_parts(self, key: GenerationKey, first: int, step: int) -> _RankParts:
        folder = self.tier.folder
        tables, problems = [], []
        for name in folder.list_parts().get(key, ())[first::step]:
            try:
                table = folder.read_part(name)
                corrupt = find_corrupt_range(table, map_to_read(folder.path / table.data, table.nbytes))
            except HoldfastError as error:
                problems.append(str(error.args[-1]))
                continue
            if corrupt is None:
                tables.append(table.encode())
            else:
                problems.append(
                    f"{folder.path / table.data}, with the part of rank {name.rank}, is corrupt in bytes "
                    f"{corrupt.local} to {corrupt.local + corrupt.stop - corrupt.start}"
                )
        common = None
        with suppress(HoldfastError):
            common = folder.read_common(key)
        parities = []
        for name in folder.list_parts("parity").get(key, ())[first::step]:
            try:
                parity = folder.read_parity(name)
                path = folder.path / parity.data
                check_parity(parity, map_to_read(path, parity.chunk), str(path))
            except HoldfastError as error:
                problems.append(str(error.args[-1]))
            else:
                parities.append((name.rank, encode_checked(parity)))
        return _RankParts(tables, parities, problems, b"" if common is None else encode_checked(common))

    def _merge_parts(self, key: GenerationKey, posted: Sequence[_RankParts]) -> _AssembledParts:
        tables = [(self._host_of[rank], raw) for rank, parts in enumerate(posted) for raw in parts.tables]
        problems = [problem for parts in posted for problem in parts.problems]
        names = [PartTable.decode(raw, "a table of the local tier").name for _, raw in tables]
        size = max((name.size for name in names), default=1)
        lost = sorted(set(range(size)) - {name.rank for name in names})
        common = next((parts.common for parts in posted if parts.common), b"")
        rebuildings = _plan_rebuildings(lost, posted)
        if common and len(rebuildings) == len(lost):
            return _AssembledParts(common, tables, problems, rebuildings)
        if lost or not common:
            missing = f"the parts of {format_ranks(lost)} are lost" if lost else "its label is lost"
            raise CorruptCheckpointError(
                f"the generation {key.name} of the local tier is incomplete: {missing}"
                + "".join(f"; {problem}" for problem in problems)
            )
        return _AssembledParts(common, tables, problems)

    def _build_assembly(self, merged: _AssembledParts, host: int, problems: Sequence[str]) -> Assembly:
        tables: dict[int, PartTable] = {}
        places: dict[int, dict[int, str]] = {}
        for at, raw in merged.tables:
            table = PartTable.decode(raw, "a table of the local tier")
            tables.setdefault(table.name.rank, table)
            places.setdefault(table.name.rank, {})[at] = table.data
        common = decode_checked(merged.common, Common, "a label of the local tier")
        folder = self.tier.folder.path
        fetched = {
            part: folder / f"{self._writers[host]}-of-{part:06d}{DATA_SUFFIX}"
            for part, on_hosts in places.items()
            if host not in on_hosts
        }
        generation = Generation(common, dict(sorted(tables.items())))
        self._assembly = Assembly(generation, places, self._host_of, host, fetched, folder, problems)
        return self._assembly

    def open_reader(self, path: Path, keys: Mapping[str, str]) -> GenerationReader:
        """Return the reader of the assembled generation."""
        assembly = self._require_assembly()
        paths = {part: assembly.path_of(part) for part in assembly.places}
        return GenerationReader(path, assembly.generation, paths, keys=keys)

    def fetch(self, session: Session, plan: ReadPlan) -> None:
        """Get the bytes that the ranks of this host will read and that are in parts on other hosts."""
        assembly = self._require_assembly()
        if not assembly.is_spread:
            return
        parts_by_path = {path: part for part, path in assembly.fetched.items()}

        def list_needed() -> Mapping[int, Sequence[tuple[int, int]]]:
            spans: dict[int, list[tuple[int, int]]] = {}
            for file_range in plan.iter_file_ranges():
                path = plan.files[file_range.file]
                part = parts_by_path.get(path) if isinstance(path, Path) else None
                if part is not None:
                    stop = file_range.offset + file_range.stop - file_range.start
                    spans.setdefault(part, []).append((file_range.offset, stop))
            return {part: merge_spans(of_part) for part, of_part in spans.items()}

        def plan_all(posted: list[bytes]) -> bytes:
            needed = [msgspec.msgpack.decode(raw, type=dict[int, list[tuple[int, int]]]) for raw in posted]
            places = {part: sorted(on_hosts) for part, on_hosts in assembly.places.items()}
            return _encode(plan_transfers(needed, assembly.host_of, places))

        _, raw = session.vote("planning what hosts send to each other", list_needed, _encode, plan_all)
        transfers = msgspec.msgpack.decode(raw, type=list[Transfer])
        if transfers:
            self._run(session, assembly, transfers)

    def _run(self, session: Session, assembly: Assembly, transfers: Sequence[Transfer]) -> None:
        sizes = {part: table.nbytes for part, table in assembly.generation.tables.items()}
        sources: dict[int, Bytes] = {}
        sinks: dict[int, Bytes] = {}

        def map_memory() -> None:
            for transfer in transfers:
                if transfer.sender == session.rank and transfer.part not in sources:
                    sources[transfer.part] = map_to_read(assembly.path_of(transfer.part), sizes[transfer.part])
                if transfer.receiver == session.rank:
                    path, size = assembly.fetched[transfer.part], sizes[transfer.part]
                    reserve_span(path, size, transfer.start, transfer.nbytes)
                    if transfer.part not in sinks:
                        sinks[transfer.part] = map_to_write(path)

        def sink_of(transfer: Transfer) -> Bytes:
            return sinks[transfer.part][transfer.start : transfer.stop]

        session.run_on_all("reserving memory for bytes of other hosts", map_memory)
        with P2PExchange(self._ranks.gloo_group(session.timeout), session) as p2p:
            session.run_on_all(
                "sending bytes between hosts",
                lambda: run_transfers(transfers, p2p, TransferEnds(sources.__getitem__, sink_of)),
            )

    def remove_fetched(self) -> None:
        """Remove the bytes that this host got from others. All its ranks have read them."""
        for path in {} if self._assembly is None else self._assembly.fetched.values():
            with suppress(StorageError):  # another rank of this host has removed it
                remove_file(path)

    def finish(self, session: Session, manifest: Manifest | None, key: GenerationKey | None) -> None:
        """Begin an epoch that continues from the loaded checkpoint, and remove all other generations."""
        self.remove_fetched()

        def begin_epoch(_: list[bytes]) -> bytes:
            start, run_id = (0, "") if manifest is None else (manifest.sequence, manifest.run)
            is_local = manifest is not None and key is not None
            loaded = CheckpointInfo.of(self.tier.run / manifest.tag, manifest) if is_local and manifest else None
            self.tier.begin_epoch(start, run_id, loaded)
            CollectedParts.of(self.tier.run).remove_outdated(self.tier.run)
            return b""

        session.vote("beginning an epoch", lambda: None, lambda _: b"", begin_epoch)
        self.tier.forget_newest()
        self.tier.remove_generations(lambda one: one == key)
        if self._unreadable:
            warn_caller(f"ignored in the local tier: {'; '.join(dict.fromkeys(self._unreadable))}")
        problems = () if self._assembly is None or key is None else self._assembly.problems
        if problems and session.rank == COORDINATOR_RANK:
            warn_caller(f"copies of other hosts were used in place of corrupt parts: {'; '.join(problems)}")

    @property
    def problems(self) -> tuple[str, ...]:
        """Descriptions of the corrupt parts that were not used."""
        return () if self._assembly is None else tuple(self._assembly.problems)

    def _require_assembly(self) -> Assembly:
        if self._assembly is None:
            raise StorageError(None, "no generation was assembled: this is a bug of holdfast")
        return self._assembly

    @property
    def assembly(self) -> Assembly | None:
        """The generation that was loaded last, or tried."""
        return self._assembly


def _plan_rebuildings(lost: Sequence[int], posted: Sequence[_RankParts]) -> list[Rebuilding]:
    """Return how the lost parts are computed that can be. ``posted`` are the parts and parities of all ranks."""
    senders: dict[int, int] = {}
    parities: dict[int, tuple[bytes, int]] = {}
    for rank, parts in enumerate(posted):
        for raw in parts.tables:
            senders.setdefault(PartTable.decode(raw, "a table of the local tier").name.rank, rank)
        for keeper, raw in parts.parities:
            parities.setdefault(keeper, (raw, rank))
    return plan_rebuildings(lost, senders, parities)
