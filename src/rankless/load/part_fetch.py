"""Transfers between hosts in a load: the bytes that the ranks of a host need, from the parts that other hosts have.

They are put into files of the tier at the same offsets. After that, the load is an ordinary one, from files of the
host. The parts are verified meanwhile: a verification needs the processors, a transfer the network.

:mod:`rankless.load.tier_load` runs it on every rank after the vote "matching …", before anything of the caller's has
changed. A second thread of each rank verifies meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from rankless.engine.comm.daemon_executor import DaemonExecutor
from rankless.engine.comm.session import RankGroup, Session
from rankless.engine.io.p2p import P2PExchange
from rankless.engine.plan.number_ranges import merge_spans
from rankless.errors import StorageError
from rankless.load.rank_reads import Reads
from rankless.storage.aligned_memory import Bytes
from rankless.storage.mapped_file import map_to_read, require_free_bytes
from rankless.storage.sparse_file import SparseFile
from rankless.tier.assembled_generation import Assembly
from rankless.tier.part_transfers import Transfer, TransferEnds, plan_transfers, run_transfers

_encode = msgspec.msgpack.Encoder().encode

#: The bytes that ranks need, by the part.
_Needed = dict[int, list[tuple[int, int]]]


class PartFetch:
    """The transfers of one load."""

    def __init__(self, ranks: RankGroup, session: Session, assembly: Assembly) -> None:
        self._ranks, self._session, self._assembly = ranks, session, assembly

    def run(self, plan: Reads, verify: Callable[[], bool] | None) -> bool:
        """Get the bytes that the ranks of this host will read, and call ``verify`` meanwhile.

        It is ``None`` if the parts were verified before. Return whether they are intact on all ranks, and all bytes
        are here.
        """
        transfers = self._plan(plan) if self._assembly.is_spread else []
        sources = self._open_sources(transfers, is_verified=verify is None) if transfers else {}

        def work() -> bool:
            verify_once = verify or _return_true
            can_transfer = transfers and sources is not None
            return self._transfer(transfers, sources or {}, verify_once) if can_transfer else verify_once()

        _, decision = self._session.vote("verifying the local tier", work, _encode_bool, _encode_all)
        return bool(decision) and sources is not None

    def _open_sources(self, transfers: Sequence[Transfer], *, is_verified: bool) -> Mapping[int, Bytes] | None:
        """Map the parts that this rank sends, after checking that its host has memory for the parts that it gets.

        Return ``None`` if a rank cannot map one: it may be cut or lost. To verify the parts tells which, unless it was
        done before.
        """
        assembly, rank = self._assembly, self._session.rank
        coming = sum(one.nbytes for one in transfers if assembly.host_of[one.receiver] == assembly.host)

        def open_own() -> Mapping[int, Bytes] | None:
            require_free_bytes(assembly.folder, coming)
            tables = assembly.generation.tables
            try:
                return {
                    part: map_to_read(assembly.path_of(part), tables[part].nbytes)
                    for part in {one.part for one in transfers if one.sender == rank}
                }
            except StorageError:
                if is_verified:
                    raise
                return None

        def encode(sources: Mapping[int, Bytes] | None) -> bytes:
            return _encode_bool(sources is not None)

        phase = "opening what hosts send to each other"
        sources, are_open = self._session.vote(phase, open_own, encode, _encode_all)
        return sources if are_open else None

    def _plan(self, plan: Reads) -> list[Transfer]:
        """Return the transfers between all ranks."""
        assembly = self._assembly

        def plan_all(posted: list[bytes]) -> bytes:
            needed = [msgspec.msgpack.decode(raw, type=_Needed) for raw in posted]
            places = {part: sorted(on_hosts) for part, on_hosts in assembly.places.items()}
            return _encode(plan_transfers(needed, assembly.host_of, places))

        def list_needed() -> _Needed:
            return _list_needed(plan, assembly.fetched)

        phase = "planning what hosts send to each other"
        _, raw = self._session.vote(phase, list_needed, _encode, plan_all)
        return msgspec.msgpack.decode(raw, type=list[Transfer])

    def _transfer(
        self, transfers: Sequence[Transfer], sources: Mapping[int, Bytes], verify: Callable[[], bool]
    ) -> bool:
        rank, assembly = self._session.rank, self._assembly
        received = {one.part for one in transfers if one.receiver == rank}
        verifier = DaemonExecutor("rankless verify")
        with ExitStack() as stack:
            stack.callback(verifier.close)
            files = {part: stack.enter_context(SparseFile(assembly.fetched[part])) for part in received}
            p2p = stack.enter_context(P2PExchange(self._ranks.gloo_group(self._session.timeout), self._session))
            is_intact = verifier.submit(verify)

            def store(transfer: Transfer, data: Bytes) -> None:
                files[transfer.part].write(transfer.start, data)

            run_transfers(transfers, p2p, TransferEnds(sources.__getitem__, on_received=store))
            return is_intact.result()


def _return_true() -> bool:
    return True


def _encode_bool(value: bool) -> bytes:
    return b"true" if value else b""


def _encode_all(posted: list[bytes]) -> bytes:
    return _encode_bool(all(posted))


def _list_needed(plan: Reads, fetched: Mapping[int, Path]) -> _Needed:
    """Return the bytes that this rank will read of parts that are not on its host."""
    parts_by_path = {path: part for part, path in fetched.items()}
    spans: _Needed = {}
    for file_range in plan.iter_file_ranges():
        path = plan.files[file_range.file]
        part = parts_by_path.get(path) if isinstance(path, Path) else None
        if part is not None:
            stop = file_range.offset + file_range.stop - file_range.start
            spans.setdefault(part, []).append((file_range.offset, stop))
    return {part: merge_spans(of_part) for part, of_part in spans.items()}
