"""The content of a save of one component, wherever it is written to. Each step ends in a vote.

:mod:`rankless.components.pending_saves` makes one on every rank, and a
:class:`~rankless.save.save_operation.SaveOperation` calls it. The votes
are "looking at what to save", "preparing the save", "comparing replicas", and the votes of the output. Nothing is
written before the replicas are compared.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from rankless.components.component_files import ComponentFile
from rankless.components.component_output import ComponentOutput
from rankless.components.component_request import ComponentRequest
from rankless.components.stored_component import StoredComponent, name_in_component, stored_component
from rankless.engine.comm.session import RankGroup, WritingRanks
from rankless.engine.integrity import replica_comparison
from rankless.engine.integrity.crc_gather import HashedResult
from rankless.engine.io.requests import Fragments, KnownFragments, MoveRanges
from rankless.engine.io.staging import DeferredCopies
from rankless.engine.io.staging_memory import Arena
from rankless.engine.plan.element_ranges import ElementRange
from rankless.engine.plan.global_spec import GlobalSpec, GlobalTensor
from rankless.engine.plan.save_plan import SavePlan, TensorSpan, plan_into_files
from rankless.engine.plan.split_tensors import split_ranges
from rankless.engine.plan.tensor_specs import STATE
from rankless.errors import RankMismatchError, UnsupportedValueError
from rankless.observe.warning import warn_caller
from rankless.ondisk.block_crcs import Fragment
from rankless.process.prepared_types import prepared
from rankless.save.save_negotiation import SaveAgreement, describe_differing, name_differing, negotiate_save
from rankless.save.save_operation import SavedShare

#: The result of the save.
Appeared = TypeVar("Appeared")


@prepared
class _ComponentLayout(msgspec.Struct, frozen=True, array_like=True):
    """The layout of a component: the names and sizes of its files, and the spans of each tensor.

    ``begun`` are the bytes that the output has returned on rank 0. Names are in the encoding of the file system.
    """

    files: list[bytes] = []
    sizes: list[int] = []
    begun: bytes = b""
    spans: dict[str, list[TensorSpan]] = {}


_encode = msgspec.msgpack.Encoder().encode


class ComponentContent(Generic[Appeared]):
    """One component that becomes a file or a folder of another library's format, or a published version.

    ``open_output`` opens where it appears.
    """

    has_follow_up = False
    completed_locally: None = None

    def __init__(
        self,
        request: ComponentRequest,
        ranks: RankGroup,
        timeout: float,
        open_output: Callable[[WritingRanks], ComponentOutput[Appeared]],
    ) -> None:
        self.share = SavedShare(ranks, timeout)
        self._request, self._layout = request, _ComponentLayout()
        self._output = open_output(WritingRanks(ranks, self.share.session))
        #: On rank 0, the files, and by number the stored tensor of each pair of a stored tensor and one that it is of.
        self._files, self._names = list[ComponentFile](), list[str]()
        self._started_at = time.perf_counter()

    @property
    def path(self) -> Path:
        """The final path of the file or folder."""
        return self._request.destination.path

    def prepare(self) -> None:
        """Agree on the component, create the files, and check that replicas are equal."""
        agreement = negotiate_save(self._request, self.share.session, self.share.ranks.global_ranks(), b"")
        self.share.captured = agreement.captured
        names = name_differing(self.share.session, agreement) if agreement.differing else []
        if names:
            warn_caller(describe_differing(names, "rank 0's are saved; a checkpoint would have those of each rank"))
        global_spec = agreement.global_spec
        if global_spec is None:
            raise RankMismatchError("the ranks did not agree on what to save")
        self._lay_out_files(agreement, global_spec)
        self._check_replicas(global_spec, agreement.host_of)

    def mark_returned(self) -> float:
        """Note that the caller continues. Returns for how many seconds it was blocked."""
        return time.perf_counter() - self._started_at

    def _lay_out_files(self, agreement: SaveAgreement, global_spec: GlobalSpec) -> None:
        def lay_out_files(_: list[bytes]) -> bytes:
            file_set = self._request.layout(self._content_to_save(agreement, global_spec))
            laid_out = [file.lay_out() for file in file_set.files]
            starts = [file.starts for file in laid_out]
            spans, self._names = _tensor_spans(file_set.content, starts, self._tensors_to_save(global_spec))
            self._files = list(file_set.files)
            frames = [file.frame for file in laid_out]
            begun = self._output.begin(file_set, frames)
            names = list(map(os.fsencode, file_set.names))
            return _encode(_ComponentLayout(names, [frame.size for frame in frames], begun, spans))

        _, raw = self.share.session.vote("preparing the save", lambda: None, lambda _: b"", lay_out_files)
        self._layout = msgspec.msgpack.decode(raw, type=_ComponentLayout)
        self._output.join(self._layout.begun)

    def _content_to_save(self, agreement: SaveAgreement, global_spec: GlobalSpec) -> StoredComponent:
        kind, captured = self._request.kind, agreement.captured
        if any(tensor.group == STATE for tensor in global_spec.iter_tensors()):
            raise UnsupportedValueError(
                f"the {kind} has values with NumPy arrays, or with tensors of more than 64 KiB, which these files "
                "cannot store: use save_checkpoint"
            )
        companions = {name.removeprefix(f"{kind}/"): data for name, data in captured.small_files.items()}
        values = agreement.merged_values.get(kind, {})
        return stored_component(kind, global_spec, values, companions, self._request.prefix)

    def _tensors_to_save(self, global_spec: GlobalSpec) -> dict[str, GlobalTensor]:
        """Return the tensors of the component by their names in it, sorted."""
        named = ((name_in_component(self._request.kind, tensor), tensor) for tensor in global_spec.iter_tensors())
        return dict(sorted(((name, tensor) for name, tensor in named if name is not None), key=lambda item: item[0]))

    def _check_replicas(self, global_spec: GlobalSpec, host_of: Sequence[int]) -> None:
        """Plan the save, and compare replicas."""
        tensors = self._tensors_to_save(global_spec)
        grain = self._output.grain
        # With a grain, each rank is a host of its own: a piece has one writer.
        hosts = host_of if grain is None else range(len(host_of))

        def plan_and_hash() -> bytes:
            keys = {name: (tensor.group, tensor.name) for name, tensor in tensors.items()}
            spans = {keys[name]: of_tensor for name, of_tensor in self._layout.spans.items()}
            numbered = sorted((span.tensor, key) for key, of_tensor in spans.items() for span in of_tensor)
            self.share.plan = plan_into_files(
                global_spec,
                self.share.session.rank,
                list(dict(numbered).values()),
                spans,
                file_sizes=self._layout.sizes,
                host_of=hosts,
                grain=grain,
            )
            return self.share.writer.hash_replicas(0)[0]

        def compare_hashes(posted: list[bytes]) -> bytes:
            return b"=" if replica_comparison.have_equal_replicas(posted) else b"!"

        _, decision = self.share.session.vote(
            "comparing replicas", plan_and_hash, lambda hashes: hashes, compare_hashes
        )
        if decision == b"!":
            raise self.share.writer.describe_replica_mismatch()

    def write_and_commit(self) -> Appeared:
        """Write the files. They get their final names when all ranks have written."""
        return self._output.write(self)

    def choose_copies(self, arena: Arena) -> tuple[Arena, DeferredCopies]:
        """See :class:`Content`. No copy is deferred."""
        return arena, DeferredCopies()

    def verify_copies(self) -> None:
        """See :class:`Content`: no tensor was trusted to be unchanged."""

    def follow_up(self) -> Appeared:
        """See :class:`Content`: nothing follows."""
        raise NotImplementedError

    def roll_back(self, error: BaseException) -> None:
        """See :class:`Content`."""
        del error  # the caller raises it
        self._output.discard()

    @property
    def plan(self) -> SavePlan:
        """See :class:`SavedComponent`."""
        return self.share.plan

    def find_equal_files(self, files: Mapping[int, Path]) -> tuple[list[int], Fragments]:
        """See :class:`SavedComponent`. Stripes that are not staged have their bytes on several ranks: not compared."""
        from rankless.engine.io.equal_files import find_equal_files  # noqa: PLC0415 - few saves replace a model

        striped = {} if self.share.staged is not None else self._striped_files()
        kept = {number: path for number, path in files.items() if number not in striped}
        return find_equal_files(kept, *self.share.writer.ranges_in_memory(self.share.staged))

    def _striped_files(self) -> set[int]:
        return {file_range.file for task in self.share.plan.stripe_tasks for file_range in task.file_ranges}

    def omit_files(self, numbers: Sequence[int]) -> None:
        """See :class:`SavedComponent`."""
        from rankless.engine.plan.omitted_ranges import omit_ranges  # noqa: PLC0415 - as above

        sizes = self._layout.sizes
        self.share.plan = omit_ranges(self.share.plan, {number: [ElementRange(0, sizes[number])] for number in numbers})
        if self.share.staged is not None:
            kept = [file_range for file_range in self.share.staged.file_ranges if file_range.file not in numbers]
            self.share.staged = self.share.staged.restrict_to(kept)

    def write_files(self, folder: Path) -> HashedResult:
        """See :class:`SavedComponent`."""
        return HashedResult(
            self.share.writer.write(folder, list(map(os.fsdecode, self._layout.files)), self.share.staged)
        )

    def move_share(self, move: MoveRanges) -> bytes:
        """See :class:`SavedComponent`."""
        move(*self.share.writer.ranges_to_upload(self.share.staged))
        return b""

    def build_header(self, number: int, fragments: KnownFragments) -> bytes:
        """See :class:`SavedComponent`."""

        def fragments_of(name: str) -> list[Fragment]:
            return [fragment for tensor in self._numbers[name] for fragment in fragments.get(tensor, [])]

        return self._files[number].build_header(fragments_of)

    @cached_property
    def _numbers(self) -> dict[str, list[int]]:
        """The numbers of each stored tensor, one for each tensor that it consists of."""
        numbers: dict[str, list[int]] = {}
        for number, name in enumerate(self._names):
            numbers.setdefault(name, []).append(number)
        return numbers


def _tensor_spans(
    content: StoredComponent, starts: Sequence[Mapping[str, int]], tensors: Mapping[str, GlobalTensor]
) -> tuple[dict[str, list[TensorSpan]], list[str]]:
    """Return where the bytes of each tensor go, and the names of stored tensors by the numbers of the spans.

    A stored tensor that consists of several has a number for each, in the order of the files.
    """
    spans: dict[str, list[TensorSpan]] = {name: [] for name in tensors}
    sources: dict[str, list[tuple[str, ElementRange, int]]] = {}
    for source, tensor in tensors.items():
        whole = [(ElementRange(0, tensor.info.nbytes), source, 0)]
        for byte_range, name, at in split_ranges(tensor.info, tensor.splits) if tensor.splits else whole:
            sources.setdefault(name, []).append((source, byte_range, at))
    numbers: dict[tuple[str, str], int] = {}
    for file, names in enumerate(starts):
        for name, offset in names.items():
            for origin in content.origins[name]:
                for source, byte_range, at in sources[origin.name]:
                    low, high = max(at, origin.start), min(at + byte_range.stop - byte_range.start, origin.stop)
                    if low < high or not content.tensors[name].nbytes:
                        start, into = byte_range.start + low - at, origin.at + low - origin.start
                        number = numbers.setdefault((name, source), len(numbers))
                        spans[source].append(TensorSpan(start, start + high - low, number, into, file, offset + into))
    return {name: sorted(of_tensor) for name, of_tensor in spans.items()}, [name for name, _ in numbers]
