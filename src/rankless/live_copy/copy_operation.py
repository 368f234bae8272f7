"""The steps of one copy between running ranks, on all of them together.

As in a load, everything that can be checked is checked before any tensor of the caller is changed.

:func:`rankless.copy_state` makes one on every rank, in the thread of the caller. The order of the votes must be the
same on all ranks, also on one that neither gives nor gets.

It is a save and a load without files. Values travel as the bytes of ``state.json`` and ``ranks.json``. Replicas are
hashed whole: a copy is rare, and hashing is ten times as fast as sending. With ``sources``, the other source ranks keep
their state, so what a rank that joins must get is exactly the tensors of some source: a pipeline stage that comes back
needs only a part. Hooks of state dicts play no part.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import msgspec

from rankless.engine.comm.session import RankGroup
from rankless.engine.comm.spec_directory import SpecDigests, SpecDirectory, digest_specs
from rankless.engine.integrity import replica_comparison
from rankless.engine.io.copy_exchange import CopiedBytes, CopyExchange
from rankless.engine.io.device_streams import begin_copies
from rankless.engine.io.p2p import P2PExchange
from rankless.engine.io.requests import ShardOf
from rankless.engine.plan.copy_plan import CopyPlan, plan_copy
from rankless.engine.plan.global_spec import GlobalSpec
from rankless.errors import RankFailedError, RankTimeoutError, ReplicaMismatchError
from rankless.live_copy.copy_negotiation import SourceState, agree_on_sources, exchange_source
from rankless.live_copy.copy_request import CopyRequest
from rankless.live_copy.copy_result import CopyResult
from rankless.live_copy.copy_targets import RankNumbers, Receiver, names_known_to_any
from rankless.live_copy.merged_tensors import select_incomparable, select_unequal
from rankless.observe.spans import traced
from rankless.observe.warning import warn_caller
from rankless.state.mismatches import format_lines
from rankless.state.restore_context import list_merged

_encode = msgspec.msgpack.Encoder().encode

#: A rank's encoded spec and meshes; empty if another rank sends equal ones.
_EncodedSpec = tuple[bytes, bytes]


class CopyOperation:
    """The steps of one copy; each ends in a vote.

    The objects that are copied into are unchanged until every check has passed on every rank.
    """

    def __init__(self, request: CopyRequest, ranks: RankGroup, timeout: float) -> None:
        self._request, self._ranks, self._session = request, ranks, ranks.open_session(timeout)
        #: On rank 0, the tolerated missing things of all ranks.
        self._missing: list[str] = []

    @traced("copy state", "call")
    def run(self) -> CopyResult:
        """Run all steps of the copy, on all ranks."""
        sources = agree_on_sources(self._request, self._session)
        given = self._request.find_given(self._session.rank)
        source = exchange_source(given, sources, self._session, self._ranks.global_ranks())
        receiver, requested = self._match_receivers(source)
        self._compare_merged(source, receiver, requested)
        plan = self._plan_copy(source, receiver, requested)
        moved = self._copy_tensors(source, receiver, plan)
        self._session.run_on_all("putting values in place", receiver.apply)
        if self._missing:
            warn_caller(f"copied {source.name}, but not all that was asked for:\n{format_lines(self._missing)}")
        return self._build_result(source, receiver, moved)

    def _match_receivers(self, source: SourceState) -> tuple[Receiver, GlobalSpec]:
        """Match the objects of the receivers with the source. Return this rank's receiver, and the requests of all."""
        session, request, global_ranks = self._session, self._request, self._ranks.global_ranks()
        numbers = RankNumbers(session.rank, global_ranks[session.rank], session.size)

        def decide(posted: list[bytes]) -> bytes:
            digests = [msgspec.msgpack.decode(raw, type=SpecDigests) for raw in posted]
            return _encode(SpecDirectory.from_digests(digests))

        receiver, raw = session.vote(
            "matching the state of the sources",
            lambda: Receiver.match(request.find_filled(session.rank), source, request.policy, numbers),
            lambda matched: _encode(digest_specs(*matched.build_spec())),
            decide,
        )
        directory = msgspec.msgpack.decode(raw, type=SpecDirectory)
        spec, meshes = receiver.build_spec()
        _, raw = session.vote(
            "exchanging the specs of the receivers",
            lambda: directory.encode_contribution(session.rank, spec, meshes),
            _encode,
            lambda posted: _encode([msgspec.msgpack.decode(raw, type=_EncodedSpec) for raw in posted]),
        )
        encoded_specs = msgspec.msgpack.decode(raw, type=list[_EncodedSpec])
        return receiver, directory.build_global_spec(encoded_specs, global_ranks, is_partial=True)

    def _compare_merged(self, source: SourceState, receiver: Receiver, requested: GlobalSpec) -> None:
        """Report to the receiver of this rank the source's parts that it drops. All ranks know the joined tensors."""
        pairs = list_merged(names_known_to_any(requested))
        if not pairs:
            return
        incomparable = select_incomparable(pairs, source)
        comparable = [pair for pair in pairs if pair not in incomparable]
        receiver.add_dropped(select_unequal(comparable, source, self._session), incomparable)

    def _plan_copy(self, source: SourceState, receiver: Receiver, requested: GlobalSpec) -> CopyPlan:
        """Run the last checks before the caller's objects are changed, and plan the sends of each rank."""
        joins = self._request.sources is not None
        plan = CopyPlan(())
        tolerated: list[str] = []

        def check_and_plan() -> bytes:
            nonlocal plan, tolerated
            tolerated = receiver.check_matches(source, requested, joins=joins)
            tensors = {(tensor.group, tensor.name): tensor for tensor in requested.iter_tensors()}
            plan = plan_copy(source.tensors, tensors, self._session.rank)
            begin_copies(source.captured.tensors.values())
            return replica_comparison.digest_replicas(plan, _shards_of(plan, source), 0)

        def decide(posted: list[bytes]) -> bytes:
            contributions = [msgspec.msgpack.decode(raw, type=tuple[bytes, list[str]]) for raw in posted]
            self._missing = list(dict.fromkeys(name for _, names in contributions for name in names))
            return _encode(replica_comparison.have_equal_replicas([digests for digests, _ in contributions]))

        _, raw = self._session.vote(
            "matching the state with what it is copied into",
            check_and_plan,
            lambda digests: _encode((digests, tolerated)),
            decide,
        )
        if not msgspec.msgpack.decode(raw, type=bool):
            self._raise_replica_mismatch(plan, source)
        return plan

    def _raise_replica_mismatch(self, plan: CopyPlan, source: SourceState) -> NoReturn:
        _, message = self._session.vote(
            "comparing replicas",
            lambda: replica_comparison.replica_details(plan, _shards_of(plan, source)),
            lambda details: details,
            lambda posted: replica_comparison.describe_mismatch(plan, posted, outcome="copied").encode(),
        )
        raise ReplicaMismatchError(message.decode())

    def _copy_tensors(self, source: SourceState, receiver: Receiver, plan: CopyPlan) -> CopiedBytes:
        """Fill the tensors of the receivers."""

        def copy() -> CopiedBytes:
            sinks = receiver.make_sinks({key: number for number, key in enumerate(plan.tensors)})
            begin_copies(sinks.values())
            exchange = CopyExchange(plan, _shards_of(plan, source), sinks.__getitem__, self._session.size)
            exchange.copy_local()
            if self._session.size > 1:
                with P2PExchange(self._ranks.gloo_group(self._session.timeout), self._session) as p2p:
                    exchange.exchange(p2p)
            return exchange.count_bytes()

        try:
            return self._session.run_on_all("copying", copy)
        except (RankFailedError, RankTimeoutError) as error:
            raise type(error)(
                f"{error}. The objects that the state is copied into may be partly filled: do not use them. "
                "Those of the sources are unchanged"
            ) from error

    def _build_result(self, source: SourceState, receiver: Receiver, moved: CopiedBytes) -> CopyResult:
        totals = CopyResult(
            user_content=self._request.objects.user_content,
            sources=tuple(source.ranks),
            sent_bytes=moved.sent,
            received_bytes=moved.received,
            local_bytes=moved.local,
        )
        if receiver.targets is None:
            return totals
        exact, reconstructed = receiver.targets.classify_components()
        report = receiver.targets.report
        return replace(
            totals,
            user_content=receiver.targets.user_content,
            missing=tuple(report.missing),
            unexpected=tuple(name for _, name in report.unexpected),
            exact=tuple(exact),
            reconstructed=tuple(reconstructed),
        )


def _shards_of(plan: CopyPlan, source: SourceState) -> ShardOf:
    """Return the function that returns this rank's shard of a tensor of the source."""
    return lambda number: source.captured.tensors[plan.tensors[number]]
