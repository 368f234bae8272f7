"""A save of one component on all ranks. Each step ends in a vote."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from holdfast.components.content import ComponentContent, component_content, name_in_component
from holdfast.components.destination import ComponentOutput
from holdfast.components.request import ComponentRequest
from holdfast.engine.comm.session import RankGroup
from holdfast.engine.integrity import replicas
from holdfast.engine.integrity.crc_gather import HashedResult, vote_with_fragments
from holdfast.engine.io.requests import Fragments
from holdfast.engine.plan.global_spec import GlobalSpec, GlobalTensor
from holdfast.engine.plan.ranges import ElementRange
from holdfast.engine.plan.save_plan import TensorSpan, plan_into_files
from holdfast.engine.plan.split_tensors import split_ranges
from holdfast.errors import RankMismatchError, UnsupportedValueError
from holdfast.run.upload_staging import check_hosts
from holdfast.save.negotiation import SaveAgreement, negotiate_save
from holdfast.save.operation import SaveOperation
from holdfast.state.capture import STATE
from holdfast.storage import posix


class _ComponentLayout(msgspec.Struct, frozen=True, array_like=True):
    """The files that rank 0 created: the staging directory, its files with their sizes, and each tensor's spans."""

    folder: str = ""
    files: list[str] = []
    sizes: list[int] = []
    spans: dict[str, list[TensorSpan]] = {}


_encode = msgspec.msgpack.Encoder().encode


class ComponentSave(SaveOperation[Path]):
    """A save of one component. If it fails, it leaves nothing behind, and all ranks raise the same error."""

    def __init__(self, request: ComponentRequest, ranks: RankGroup, timeout: float) -> None:
        super().__init__(ranks, timeout)
        self._request, self._layout, self._names = request, _ComponentLayout(), list[str]()
        self._output: ComponentOutput | None = None
        self._started_at = time.perf_counter()

    @property
    def path(self) -> Path:
        """The final path of the file or folder."""
        return self._request.destination.path

    def prepare_save(self) -> None:
        """Agree on what to save, create the files, and check that replicas are equal."""
        agreement = negotiate_save(self._request, self._session, self._ranks.global_ranks(), b"")
        self._captured = agreement.captured
        global_spec = agreement.global_spec
        if global_spec is None:
            raise RankMismatchError("the ranks did not agree on what to save")
        self._create_files(agreement, global_spec)
        self._check_replicas(global_spec, agreement.host_of)

    def write_and_commit(self) -> Path:
        """Write the tensors. Rank 0 publishes the files when all ranks have written."""

        def write_shards() -> HashedResult:
            return HashedResult(self._writer.write(Path(self._layout.folder), self._layout.files, self._staged))

        def publish_files(fragments: Fragments, _: list[bytes]) -> bytes:
            number = {name: i for i, name in enumerate(self._names)}
            if self._output is not None:
                self._output.publish(lambda name: fragments.get(number[name], []))
            return b""

        vote_with_fragments(self._session, "writing", write_shards, publish_files, self._plan.rank_order)
        return self.path

    def mark_returned(self) -> float:
        """Note that the caller continues. Returns for how many seconds it was blocked."""
        return time.perf_counter() - self._started_at

    def _roll_back(self, error: BaseException) -> None:
        del error  # the caller raises it
        if self._output is not None:
            self._output.discard()

    def _create_files(self, agreement: SaveAgreement, global_spec: GlobalSpec) -> None:
        def lay_out_files(_: list[bytes]) -> bytes:
            file_set = self._request.layout(self._content_to_save(agreement, global_spec))
            check_hosts(self.path, agreement.host_of)
            files = self._output = ComponentOutput(self._request.destination, file_set)
            if len({*agreement.host_of}) > 1:
                # Pages that rank 0 has written must not be written back after other hosts have written next to them.
                posix.sync_tree(files.folder)
            self._names = [name for starts in files.starts for name in starts]
            spans = _tensor_spans(file_set.content, files.starts, self._tensors_to_save(global_spec))
            names = [file.name for file in file_set.files]
            sizes = [posix.file_size(files.folder / name) for name in names]
            return _encode(_ComponentLayout(str(files.folder), names, sizes, spans))

        _, raw = self._session.vote("preparing the save", lambda: None, lambda _: b"", lay_out_files)
        self._layout = msgspec.msgpack.decode(raw, type=_ComponentLayout)

    def _content_to_save(self, agreement: SaveAgreement, global_spec: GlobalSpec) -> ComponentContent:
        kind, captured = self._request.kind, agreement.captured
        if any(tensor.group == STATE for tensor in global_spec.iter_tensors()):
            raise UnsupportedValueError(
                f"the {kind} has values that contain tensors of more than 64 KiB, which these files cannot store: "
                "use save_checkpoint"
            )
        companions = {name.removeprefix(f"{kind}/"): data for name, data in captured.small_files.items()}
        values = agreement.merged_values.get(kind, {})
        return component_content(kind, global_spec, values, companions, self._request.prefix)

    def _tensors_to_save(self, global_spec: GlobalSpec) -> dict[str, GlobalTensor]:
        """Return the tensors of the component by their names in it, sorted."""
        named = ((name_in_component(self._request.kind, tensor), tensor) for tensor in global_spec.iter_tensors())
        return dict(sorted(((name, tensor) for name, tensor in named if name is not None), key=lambda item: item[0]))

    def _check_replicas(self, global_spec: GlobalSpec, host_of: Sequence[int]) -> None:
        """Plan the save, and compare replicas."""
        tensors = self._tensors_to_save(global_spec)

        def plan_and_hash() -> bytes:
            keys = {name: (tensor.group, tensor.name) for name, tensor in tensors.items()}
            spans = {keys[name]: of_tensor for name, of_tensor in self._layout.spans.items()}
            numbered = sorted((span.tensor, key) for key, of_tensor in spans.items() for span in of_tensor)
            self._plan = plan_into_files(
                global_spec,
                self._session.rank,
                list(dict(numbered).values()),
                spans,
                file_sizes=self._layout.sizes,
                host_of=host_of,
            )
            return self._writer.hash_replicas(0)[0]

        def compare_hashes(posted: list[bytes]) -> bytes:
            return b"=" if replicas.have_equal_replicas(posted) else b"!"

        _, decision = self._session.vote("comparing replicas", plan_and_hash, lambda hashes: hashes, compare_hashes)
        if decision == b"!":
            raise self._writer.describe_replica_mismatch()


def _tensor_spans(
    content: ComponentContent, starts: Sequence[Mapping[str, int]], tensors: Mapping[str, GlobalTensor]
) -> dict[str, list[TensorSpan]]:
    """Return where the bytes of each tensor go. Stored tensors are numbered in the order of the files."""
    spans: dict[str, list[TensorSpan]] = {name: [] for name in tensors}
    sources: dict[str, list[tuple[str, ElementRange, int]]] = {}
    for source, tensor in tensors.items():
        whole = [(ElementRange(0, tensor.info.nbytes), source, 0)]
        for byte_range, name, at in split_ranges(tensor.info, tensor.splits) if tensor.splits else whole:
            sources.setdefault(name, []).append((source, byte_range, at))
    number = 0
    for file, names in enumerate(starts):
        for name, offset in names.items():
            origin, nbytes = content.origins[name], content.tensors[name].nbytes
            for source, byte_range, at in sources[origin.name]:
                low, high = max(at, origin.start), min(at + byte_range.stop - byte_range.start, origin.start + nbytes)
                if low < high or not nbytes:
                    start, into = byte_range.start + low - at, low - origin.start
                    spans[source].append(TensorSpan(start, start + high - low, number, into, file, offset + into))
            number += 1
    return {name: sorted(of_tensor) for name, of_tensor in spans.items()}
