"""One save of one part, on all ranks together: each step ends in a vote."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from holdfast.agreement import Agreement, agree
from holdfast.engine import replicas
from holdfast.engine.membership import Held, Membership
from holdfast.engine.plan import NOTHING, Stretch, plan_into
from holdfast.engine.ranks import Ranks
from holdfast.engine.runs import Run
from holdfast.engine.splits import ranges
from holdfast.engine.stage import Later, Staged
from holdfast.engine.staging_memory import Arena
from holdfast.engine.transfer import Fragments
from holdfast.engine.tree import Hashed, vote_hashed
from holdfast.errors import DisagreementError, UnstorableError
from holdfast.moving import Moving
from holdfast.parts.content import Content, content
from holdfast.parts.place import Draft
from holdfast.parts.request import PartRequest
from holdfast.readback import is_unsafe
from holdfast.state.capture import STATE, Capture


class _Layout(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 has made: a hidden folder, the files in it, and where the bytes of each tensor go, by name."""

    folder: str = ""
    files: list[str] = []
    places: dict[str, list[Stretch]] = {}


_encode = msgspec.msgpack.Encoder().encode


class PartSave:
    """The steps of one save. On failure nothing is left, and all ranks raise the same error."""

    def __init__(self, request: PartRequest, ranks: Ranks, timeout: float) -> None:
        self._request, self._ranks, self._session = request, ranks, ranks.session(timeout)
        self._captured = Capture()
        self._made = _Layout()
        self._plan, self._names = NOTHING, list[str]()
        self._draft: Draft | None = None
        self._staging: Callable[[], Staged | None] = lambda: None
        self._staged: Staged | None = None
        self._began = time.perf_counter()
        #: Set when nothing of the training objects is needed any more.
        self.copied = threading.Event()

    @property
    def path(self) -> Path:
        """The file or folder to be."""
        return self._request.place.path

    def begin(self) -> None:
        """Look at what is to be saved, make the files, and prove that replicas are equal."""
        agreement = agree(self._request, self._session, self._ranks.global_ranks(), b"")
        self._captured = agreement.captured
        membership = agreement.membership
        if membership is None:
            raise DisagreementError("ranks did not agree on what is saved")
        self._lay_out(agreement, membership)
        self._prove(membership)

    def stage(self, arena: Arena) -> None:
        """Copy what this rank will write. Afterwards the training objects may change."""
        self._staging = self._session.begin_all(
            "copying what is to be saved", lambda: self._moving.stage(arena, Later())
        )
        self._captured.parts.clear()
        self.copied.set()

    def complete(self) -> None:
        """Learn whether all ranks could copy theirs."""
        self._staged = self._staging()

    def finish(self) -> Path:
        """Write; rank 0 publishes when all have written."""

        def work() -> Hashed:
            return Hashed(self._moving.write(Path(self._made.folder), self._made.files, self._staged))

        def decide(found: Fragments, _: list[bytes]) -> bytes:
            number = {name: i for i, name in enumerate(self._names)}
            if self._draft is not None:
                self._draft.finish(lambda name: found.get(number[name], []))
            return b""

        vote_hashed(self._session, "writing", work, decide)
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
    def _moving(self) -> Moving:
        return Moving(self._ranks, self._session, self._plan, self._captured.parts)

    def _lay_out(self, agreement: Agreement, membership: Membership) -> None:
        def decide(_: list[bytes]) -> bytes:
            whole = self._content(agreement, membership)
            shelf = self._request.layout(whole)
            draft = self._draft = Draft(self._request.place, shelf)
            is_unsafe(self.path.parent, agreement.hosts)  # warns: there is nothing older that could be kept
            self._names = [name for starts in draft.starts for name in starts]
            places = _places(shelf.content, draft.starts, self._held(membership))
            return _encode(_Layout(str(draft.folder), [file.name for file in shelf.files], places))

        _, raw = self._session.vote("preparing the save", lambda: None, lambda _: b"", decide)
        self._made = msgspec.msgpack.decode(raw, type=_Layout)

    def _content(self, agreement: Agreement, membership: Membership) -> Content:
        kind, captured = self._request.kind, agreement.captured
        if any(held.group == STATE for held in membership.tensors()):
            raise UnstorableError(
                f"the {kind} has values with tensors of more than 64 KiB in them, which these files have no place for: "
                "use save_checkpoint"
            )
        companions = {name.rpartition("/")[2]: data for name, data in captured.small.items()}
        return content(kind, membership, agreement.merged[kind], companions, self._request.prefix)

    def _held(self, membership: Membership) -> list[Held]:
        return sorted((held for held in membership.tensors() if held.group == self._request.kind), key=_name)

    def _prove(self, membership: Membership) -> None:
        """Plan, and compare replicas."""
        kind = self._request.kind

        def work() -> bytes:
            places = {(kind, name): stretches for name, stretches in self._made.places.items()}
            numbered = sorted((one.tensor, key) for key, stretches in places.items() for one in stretches)
            self._plan = plan_into(membership, self._session.rank, list(dict(numbered).values()), places)
            return self._moving.hash_replicas(0)[0]

        def decide(posted: list[bytes]) -> bytes:
            return b"=" if replicas.agree(posted) else b"!"

        _, decision = self._session.vote("comparing what is held twice", work, lambda own: own, decide)
        if decision == b"!":
            raise self._moving.differing()


def _name(held: Held) -> str:
    return held.name


def _places(whole: Content, starts: Sequence[Mapping[str, int]], held: Sequence[Held]) -> dict[str, list[Stretch]]:
    """Where the bytes of each tensor that ranks hold go. Stored tensors are numbered in the order of the files."""
    found: dict[str, list[Stretch]] = {one.name: [] for one in held}
    sources: dict[str, list[tuple[str, Run, int]]] = {}
    for one in held:
        for run, name, at in ranges(one.info, one.splits) if one.splits else [(Run(0, one.info.nbytes), one.name, 0)]:
            sources.setdefault(name, []).append((one.name, run, at))
    number = 0
    for file, names in enumerate(starts):
        for name, offset in names.items():
            origin, nbytes = whole.origins[name], whole.tensors[name].nbytes
            for source, run, at in sources[origin.name]:
                low, high = max(at, origin.start), min(at + run.stop - run.start, origin.start + nbytes)
                if low < high or not nbytes:
                    start, into = run.start + low - at, low - origin.start
                    found[source].append(Stretch(start, start + high - low, number, into, file, offset + into))
            number += 1
    return {name: sorted(stretches) for name, stretches in found.items()}
