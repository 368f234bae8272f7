"""One save of one part, on all ranks together: each step ends in a vote."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from holdfast.components.content import ComponentContent, component_content
from holdfast.components.destination import ComponentStaging
from holdfast.components.request import ComponentRequest
from holdfast.engine.comm.session import RankGroup
from holdfast.engine.integrity import replicas
from holdfast.engine.integrity.crc_gather import HashedResult, vote_with_fragments
from holdfast.engine.io.requests import Fragments
from holdfast.engine.io.staging import DeferredCopies, StagedTensors
from holdfast.engine.io.staging_memory import Arena
from holdfast.engine.plan.global_spec import GlobalSpec, GlobalTensor
from holdfast.engine.plan.ranges import ElementRange
from holdfast.engine.plan.save_plan import NOTHING, TensorSpan, plan_into_files
from holdfast.engine.plan.split_tensors import split_ranges
from holdfast.errors import RankMismatchError, UnsupportedValueError
from holdfast.save.negotiation import SaveAgreement, negotiate_save
from holdfast.save.readback import is_unsafe
from holdfast.save.shard_writer import ShardWriter
from holdfast.state.capture import STATE, Capture


class _ComponentLayout(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 has made: a hidden folder, the files in it, and where the bytes of each tensor go, by name."""

    folder: str = ""
    files: list[str] = []
    places: dict[str, list[TensorSpan]] = {}


_encode = msgspec.msgpack.Encoder().encode


class ComponentSave:
    """The steps of one save. On failure nothing is left, and all ranks raise the same error."""

    def __init__(self, request: ComponentRequest, ranks: RankGroup, timeout: float) -> None:
        self._request, self._ranks, self._session = request, ranks, ranks.session(timeout)
        self._captured = Capture()
        self._made = _ComponentLayout()
        self._plan, self._names = NOTHING, list[str]()
        self._draft: ComponentStaging | None = None
        self._staging: Callable[[], StagedTensors | None] = lambda: None
        self._staged: StagedTensors | None = None
        self._began = time.perf_counter()
        #: Set when nothing of the training objects is needed any more.
        self.copied = threading.Event()

    @property
    def path(self) -> Path:
        """The file or folder to be."""
        return self._request.place.path

    def begin(self) -> None:
        """Look at what is to be saved, make the files, and prove that replicas are equal."""
        agreement = negotiate_save(self._request, self._session, self._ranks.global_ranks(), b"")
        self._captured = agreement.captured
        membership = agreement.membership
        if membership is None:
            raise RankMismatchError("ranks did not agree on what is saved")
        self._lay_out(agreement, membership)
        self._prove(membership)

    def stage(self, arena: Arena) -> None:
        """Copy what this rank will write. Afterwards the training objects may change."""
        self._staging = self._session.begin_all(
            "copying what is to be saved", lambda: self._moving.stage(arena, DeferredCopies())
        )
        self._captured.parts.clear()
        self.copied.set()

    def complete(self) -> None:
        """Learn whether all ranks could copy theirs."""
        self._staged = self._staging()

    def finish(self) -> Path:
        """Write; rank 0 publishes when all have written."""

        def work() -> HashedResult:
            return HashedResult(self._moving.write(Path(self._made.folder), self._made.files, self._staged))

        def decide(found: Fragments, _: list[bytes]) -> bytes:
            number = {name: i for i, name in enumerate(self._names)}
            if self._draft is not None:
                self._draft.finish(lambda name: found.get(number[name], []))
            return b""

        vote_with_fragments(self._session, "writing", work, decide)
        return self.path

    def returned(self) -> float:
        """Note that the caller goes on. Returns for how many seconds it was kept."""
        return time.perf_counter() - self._began

    def part(self) -> None:
        """Wait until all ranks know how it ended: rank 0's process may hold the store that tells them."""
        self._session.part()

    @contextmanager
    def undone_on_failure(self) -> Iterator[None]:
        """Leave no draft where a step fails."""
        process = os.getpid()
        try:
            yield
        except BaseException:
            if os.getpid() != process:  # forked meanwhile: the save is the other process's
                raise
            self.copied.set()
            if self._draft is not None:
                self._draft.discard()
            raise

    @property
    def _moving(self) -> ShardWriter:
        return ShardWriter(self._ranks, self._session, self._plan, self._captured.parts)

    def _lay_out(self, agreement: SaveAgreement, membership: GlobalSpec) -> None:
        def decide(_: list[bytes]) -> bytes:
            whole = self._content(agreement, membership)
            shelf = self._request.layout(whole)
            draft = self._draft = ComponentStaging(self._request.place, shelf)
            is_unsafe(self.path.parent, agreement.hosts)  # warns: there is nothing older that could be kept
            self._names = [name for starts in draft.starts for name in starts]
            places = _places(shelf.content, draft.starts, self._held(membership))
            return _encode(_ComponentLayout(str(draft.folder), [file.name for file in shelf.files], places))

        _, raw = self._session.vote("preparing the save", lambda: None, lambda _: b"", decide)
        self._made = msgspec.msgpack.decode(raw, type=_ComponentLayout)

    def _content(self, agreement: SaveAgreement, membership: GlobalSpec) -> ComponentContent:
        kind, captured = self._request.kind, agreement.captured
        if any(held.group == STATE for held in membership.tensors()):
            raise UnsupportedValueError(
                f"the {kind} has values with tensors of more than 64 KiB in them, which these files have no place for: "
                "use save_checkpoint"
            )
        companions = {name.rpartition("/")[2]: data for name, data in captured.small.items()}
        return component_content(kind, membership, agreement.merged[kind], companions, self._request.prefix)

    def _held(self, membership: GlobalSpec) -> list[GlobalTensor]:
        return sorted((held for held in membership.tensors() if held.group == self._request.kind), key=_name)

    def _prove(self, membership: GlobalSpec) -> None:
        """Plan, and compare replicas."""
        kind = self._request.kind

        def work() -> bytes:
            places = {(kind, name): stretches for name, stretches in self._made.places.items()}
            numbered = sorted((one.tensor, key) for key, stretches in places.items() for one in stretches)
            self._plan = plan_into_files(membership, self._session.rank, list(dict(numbered).values()), places)
            return self._moving.hash_replicas(0)[0]

        def decide(posted: list[bytes]) -> bytes:
            return b"=" if replicas.have_equal_replicas(posted) else b"!"

        _, decision = self._session.vote("comparing what is held twice", work, lambda own: own, decide)
        if decision == b"!":
            raise self._moving.differing()


def _name(held: GlobalTensor) -> str:
    return held.name


def _places(
    whole: ComponentContent, starts: Sequence[Mapping[str, int]], held: Sequence[GlobalTensor]
) -> dict[str, list[TensorSpan]]:
    """Where the bytes of each tensor that ranks hold go. Stored tensors are numbered in the order of the files."""
    found: dict[str, list[TensorSpan]] = {one.name: [] for one in held}
    sources: dict[str, list[tuple[str, ElementRange, int]]] = {}
    for one in held:
        for run, name, at in (
            split_ranges(one.info, one.splits) if one.splits else [(ElementRange(0, one.info.nbytes), one.name, 0)]
        ):
            sources.setdefault(name, []).append((one.name, run, at))
    number = 0
    for file, names in enumerate(starts):
        for name, offset in names.items():
            origin, nbytes = whole.origins[name], whole.tensors[name].nbytes
            for source, run, at in sources[origin.name]:
                low, high = max(at, origin.start), min(at + run.stop - run.start, origin.start + nbytes)
                if low < high or not nbytes:
                    start, into = run.start + low - at, low - origin.start
                    found[source].append(TensorSpan(start, start + high - low, number, into, file, offset + into))
            number += 1
    return {name: sorted(stretches) for name, stretches in found.items()}
