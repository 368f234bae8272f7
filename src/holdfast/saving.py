"""One save, from training objects to a committed checkpoint, on all ranks together.

Everything that can fail on one rank comes before a vote: no rank goes on alone, and all raise the same error.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from holdfast._version import __version__
from holdfast.catalog import CheckpointInfo, Successor, successor
from holdfast.engine import replicas, spec
from holdfast.engine.commit import Draft, draft_name
from holdfast.engine.local import LocalPart
from holdfast.engine.plan import NOTHING, SavePlan, plan_save
from holdfast.engine.ranks import LEADER, Call, Ranks, same_call, unanimous
from holdfast.engine.spec import Membership
from holdfast.engine.transfer import decode_fragments, encode_fragments
from holdfast.engine.write import write_pieces
from holdfast.errors import DisagreementError, ReplicaMismatchError, TagExistsError
from holdfast.formats.native import RANKS
from holdfast.layout import manifest
from holdfast.layout.files import parse_size
from holdfast.layout.manifest import FileRecord, Manifest, Provenance
from holdfast.layout.names import check_tag, check_text, number
from holdfast.state.capture import Capture, Training, capture


@dataclass(frozen=True)
class SaveRequest:
    """Where to save, and what to note of it. ``max_shard_size``: the most bytes of tensors in one file."""

    path: Path
    tag: str
    training: Training
    max_shard_size: int | str
    step: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    def check(self) -> None:
        """Raise ``InvalidArgumentError`` for what cannot be noted."""
        check_tag(self.tag)
        parse_size(self.max_shard_size)
        self.numbers()

    def numbers(self) -> tuple[int | float | None, dict[str, float | None]]:
        """The step and the metrics as the manifest has them; metrics that are not finite become ``None``."""
        step = None if self.step is None else number("step", self.step)
        metrics = {
            check_text(name, "a metric's name"): float(number(name, value)) for name, value in self.metrics.items()
        }
        return step, {name: value if math.isfinite(value) else None for name, value in metrics.items()}


@dataclass
class PlanCache:
    """The plan of the last save, which the next one uses if no rank's tensors have changed."""

    key: bytes = b""
    plan: SavePlan = NOTHING
    saves: int = 0


class _Announcement(Call, frozen=True, kw_only=True):
    """What each rank says at the start: what it was asked to do, a digest of its spec, and the plan it knows."""

    path: str
    tag: str
    given: list[str]
    limit: int
    digest: bytes
    known: bytes


class _Terms(msgspec.Struct, frozen=True):
    """What rank 0 makes of it: the plan's key, each rank's spec, and (where the plan is new) who publishes them."""

    key: bytes
    spec_of: list[int]
    publishers: list[int]


class _Opened(msgspec.Struct, frozen=True):
    """The name of the draft that rank 0 has opened, and what its manifest will say; nothing where replicas differ."""

    name: str = ""
    successor: Successor | None = None


class _Report(msgspec.Struct, frozen=True):
    """What a rank hashed, and its own values."""

    fragments: bytes
    own: bytes


_encode = msgspec.msgpack.Encoder().encode


def save(request: SaveRequest, ranks: Ranks, cache: PlanCache, timeout: float) -> CheckpointInfo:
    """Save, and return what was committed. On failure nothing is left, and all ranks raise the same error."""
    return _Save(request, ranks, cache, timeout).run()


class _Save:
    """The steps of one save; each ends in a vote."""

    def __init__(self, request: SaveRequest, ranks: Ranks, cache: PlanCache, timeout: float) -> None:
        self._request, self._ranks, self._cache = request, ranks, cache
        self._session = ranks.session(timeout)
        self._captured = Capture()
        self._spec = b""

    def run(self) -> CheckpointInfo:
        terms = self._announce()
        membership = self._membership(terms) if terms.publishers else None
        name, following = self._prepare(terms, membership)
        draft = Draft(self._request.path / name, self._cache.plan)
        try:
            committed = self._write(draft, following)
        except BaseException:
            if self._session.rank == LEADER:
                draft.discard()
            raise
        return CheckpointInfo.of(self._request.path / self._request.tag, committed)

    def _announce(self) -> _Terms:
        """Capture, and tell each other what is to be saved."""

        def work() -> _Announcement:
            self._request.check()
            self._captured = capture(self._request.training, self._session.rank)
            self._spec = self._captured.spec().encode()
            return _Announcement(
                call="save",
                path=str(self._request.path),
                tag=self._request.tag,
                given=self._request.training.given(),
                limit=parse_size(self._request.max_shard_size),
                digest=spec.digest(self._spec),
                known=self._cache.key,
            )

        _, terms = self._session.vote("looking at what to save", work, _encode, _settle)
        return msgspec.msgpack.decode(terms, type=_Terms)

    def _membership(self, terms: _Terms) -> Membership:
        """The specs of all ranks, each told once by the lowest rank that has it."""
        _, specs = self._session.vote(
            "telling each other what they hold",
            lambda: self._spec if self._session.rank in terms.publishers else b"",
            lambda own: own,
            lambda posted: _encode([posted[rank] for rank in terms.publishers]),
        )
        return Membership([spec.decode(raw) for raw in msgspec.msgpack.decode(specs, type=list[bytes])], terms.spec_of)

    def _prepare(self, terms: _Terms, membership: Membership | None) -> tuple[str, Successor]:
        """Plan, prove that replicas are equal, and open the draft. Returns its name, and what tells the checkpoint."""
        cache = self._cache

        def work() -> bytes:
            if membership is not None:
                cache.key = b""
                limit = parse_size(self._request.max_shard_size)
                cache.plan = plan_save(membership, self._session.rank, self._ranks.global_ranks(), limit)
                cache.key, cache.saves = terms.key, 0
            return replicas.digests(cache.plan, self._part_of, cache.saves)

        def decide(posted: list[bytes]) -> bytes:
            if not replicas.agree(posted):
                return _encode(_Opened())
            following = successor(self._request.path)
            name = draft_name(self._request.tag, following.id)
            Draft(self._request.path / name, cache.plan).open()
            return _encode(_Opened(name, following))

        _, raw = self._session.vote("preparing the save", work, lambda own: own, decide)
        opened = msgspec.msgpack.decode(raw, type=_Opened)
        if opened.successor is None:
            cache.key = b""
            raise self._mismatch()
        cache.saves += 1
        return opened.name, opened.successor

    def _mismatch(self) -> ReplicaMismatchError:
        """Find out together which replicas differ."""
        _, message = self._session.vote(
            "comparing replicas",
            lambda: replicas.details(self._cache.plan, self._part_of),
            lambda own: own,
            lambda posted: replicas.mismatch(self._cache.plan, posted).encode(),
        )
        return ReplicaMismatchError(message.decode())

    def _write(self, draft: Draft, following: Successor) -> Manifest:
        """Write this rank's share; rank 0 commits when all have written theirs."""
        files = [draft.folder / file.path for file in draft.plan.files]

        def work() -> _Report:
            if not draft.folder.is_dir():
                raise DisagreementError(
                    f"{draft.folder}, which rank 0 has made, cannot be seen here: "
                    "all ranks must save into a shared file system"
                )
            fragments = write_pieces(files, draft.plan.pieces, self._part_of)
            return _Report(encode_fragments(fragments), self._captured.own)

        def decide(posted: list[bytes]) -> bytes:
            reports = [msgspec.msgpack.decode(raw, type=_Report) for raw in posted]
            own = b'{"ranks":[' + b",\n".join(report.own for report in reports) + b"]}\n"
            fragments = decode_fragments(report.fragments for report in reports)
            final = self._request.path / self._request.tag
            described = draft.publish(
                final, fragments, {**self._captured.small, RANKS: own}, lambda files: self._describe(following, files)
            )
            return manifest.encode(described)

        _, raw = self._session.vote("writing", work, _encode, decide)
        return manifest.decode(raw, manifest.NAME)

    def _describe(self, following: Successor, files: dict[str, FileRecord]) -> Manifest:
        step, metrics = self._request.numbers()
        return Manifest(
            format="holdfast",
            version=manifest.VERSION,
            tag=self._request.tag,
            id=following.id,
            run=following.run,
            sequence=following.sequence,
            time=round(time.time(), 6),
            step=step,
            metrics=metrics,
            provenance=Provenance(__version__, str(torch.__version__), platform.python_version(), self._session.size),
            files=files,
        )

    def _part_of(self, tensor: int) -> LocalPart:
        return self._captured.parts[self._cache.plan.tensors[tensor]]


def _settle(posted: Sequence[bytes]) -> bytes:
    """Rank 0's check that all ranks were asked for the same, and what follows from their specs."""
    same_call(posted)
    said = [msgspec.msgpack.decode(raw, type=_Announcement) for raw in posted]
    unanimous("the path", [repr(one.path) for one in said])
    unanimous("the tag", [repr(one.tag) for one in said])
    unanimous("what is saved", [", ".join(one.given) or "nothing" for one in said])
    unanimous("max_shard_size", [str(one.limit) for one in said])
    final = Path(said[0].path) / said[0].tag
    if final.exists():
        raise TagExistsError(f"there is {final} already; choose another tag, or remove it first")
    digests = list(dict.fromkeys(one.digest for one in said))
    key = spec.digest(b"".join(one.digest for one in said) + str(said[0].limit).encode())
    first = [next(rank for rank, one in enumerate(said) if one.digest == digest) for digest in digests]
    known = all(one.known == key for one in said)
    return _encode(_Terms(key, [digests.index(one.digest) for one in said], [] if known else first))
