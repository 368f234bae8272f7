"""Transfers between hosts in a load: the bytes that ranks of one need and that are in parts on others.

They are put into files of the tier at the same offsets. After that, the load is an ordinary one, from files of the
host. The parts are verified meanwhile: that keeps processors busy, and this the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from holdfast.engine.comm.daemon_executor import DaemonExecutor
from holdfast.engine.comm.session import RankGroup, Session
from holdfast.engine.io.p2p import P2PExchange
from holdfast.engine.plan.spans import merge_spans
from holdfast.load.read_plan import ReadPlan
from holdfast.storage.mapped_file import map_to_read, require_free_bytes
from holdfast.storage.memory import Bytes
from holdfast.storage.sparse_file import SparseFile
from holdfast.tier.assembly import Assembly
from holdfast.tier.transfers import Transfer, TransferEnds, plan_transfers, run_transfers

_encode = msgspec.msgpack.Encoder().encode

#: The bytes that ranks need, by the part.
_Needed = dict[int, list[tuple[int, int]]]


class PartFetch:
    """The transfers of one load."""

    def __init__(self, ranks: RankGroup, session: Session, assembly: Assembly) -> None:
        self._ranks, self._session, self._assembly = ranks, session, assembly

    def run(self, plan: ReadPlan, verify: Callable[[], bool]) -> bool:
        """Get the bytes that the ranks of this host will read, and call ``verify`` meanwhile.

        Return whether it returned true on all ranks.
        """
        transfers = self._plan(plan) if self._assembly.is_spread else []

        def decide(posted: list[bytes]) -> bytes:
            return b"intact" if all(posted) else b""

        def encode(is_intact: bool) -> bytes:
            return b"intact" if is_intact else b""

        work = verify if not transfers else lambda: self._transfer(transfers, verify)
        _, decision = self._session.vote("verifying the local tier", work, encode, decide)
        return bool(decision)

    def _plan(self, plan: ReadPlan) -> list[Transfer]:
        """Return what all ranks send to each other, after checking that this host has the memory for it."""
        assembly = self._assembly

        def plan_all(posted: list[bytes]) -> bytes:
            needed = [msgspec.msgpack.decode(raw, type=_Needed) for raw in posted]
            places = {part: sorted(on_hosts) for part, on_hosts in assembly.places.items()}
            return _encode(plan_transfers(needed, assembly.host_of, places))

        def list_needed() -> _Needed:
            return _list_needed(plan, assembly.fetched)

        phase = "planning what hosts send to each other"
        _, raw = self._session.vote(phase, list_needed, _encode, plan_all)
        transfers = msgspec.msgpack.decode(raw, type=list[Transfer])
        coming = sum(one.nbytes for one in transfers if assembly.host_of[one.receiver] == assembly.host)
        if transfers:
            self._session.run_on_all(phase, lambda: require_free_bytes(assembly.folder, coming))
        return transfers

    def _transfer(self, transfers: Sequence[Transfer], verify: Callable[[], bool]) -> bool:
        rank, assembly = self._session.rank, self._assembly
        sizes = {part: table.nbytes for part, table in assembly.generation.tables.items()}
        sources = {
            part: map_to_read(assembly.path_of(part), sizes[part])
            for part in {one.part for one in transfers if one.sender == rank}
        }
        received = {one.part for one in transfers if one.receiver == rank}
        verifier = DaemonExecutor("holdfast verify")
        with ExitStack() as stack:
            stack.callback(verifier.close)
            files = {part: stack.enter_context(SparseFile(assembly.fetched[part])) for part in received}
            p2p = stack.enter_context(P2PExchange(self._ranks.gloo_group(self._session.timeout), self._session))
            is_intact = verifier.submit(verify)

            def store(transfer: Transfer, data: Bytes) -> None:
                files[transfer.part].write(transfer.start, data)

            run_transfers(transfers, p2p, TransferEnds(sources.__getitem__, on_received=store))
            return is_intact.result()


def _list_needed(plan: ReadPlan, fetched: Mapping[int, Path]) -> _Needed:
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
