"""The steps of a conversion, shared by all ranks: read, cast and write one buffer at a time; verify; rename once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rankless.conversion.carried_values import carry_values
from rankless.conversion.changed_states import warn_of_changed_states
from rankless.conversion.input_files import InputFiles
from rankless.conversion.native_target import HuggingFaceTarget, NativeTarget, SafetensorsTarget
from rankless.conversion.peft_target import PeftTarget
from rankless.conversion.source_checksums import check_ranges, find_source_checksums
from rankless.conversion.target import ConversionSource, ConversionTarget, FileLayout
from rankless.conversion.tensor_filter import TensorFilter
from rankless.engine.comm.session import Session, require_equal
from rankless.engine.comm.spec_directory import deduplicate
from rankless.engine.integrity.block_verification import ChecksumVerifier
from rankless.engine.integrity.crc_gather import HashedResult, vote_with_fragments
from rankless.engine.integrity.fragments import decode_fragments, encode_fragments
from rankless.engine.integrity.read_crcs import HashingReaderPool, RankCrcs, ReadCrcs, decode_pieces
from rankless.engine.io.byte_sinks import NullSink
from rankless.engine.io.read import read_file_ranges
from rankless.engine.io.requests import Fragments, OnBytesMoved
from rankless.engine.io.source_reader import SourceReader
from rankless.engine.io.streamed_tensor import ReadFragments
from rankless.engine.io.write import write_file_ranges
from rankless.engine.plan.equal_shares import split_evenly
from rankless.engine.plan.file_ranges import FileRange, count_bytes
from rankless.engine.plan.file_writers import PlacedTensor, WriterMap
from rankless.engine.plan.tensor_writers import EqualWriters
from rankless.engine.plan.writer_cells import CellPlanner
from rankless.errors import CheckpointReplacedError, CorruptCheckpointError, InvalidArgumentError
from rankless.formats.detect import is_checkpoint
from rankless.formats.reader import check_current, describe_doubts, detect_replacement
from rankless.formats.registry import (
    DCP,
    DEEPSPEED_UNIVERSAL,
    LAYOUT,
    LIGHTNING_FOLDER,
    MEGATRON,
    MEGATRON_HF,
    NXD,
    READABLE,
    load_attribute,
    load_target,
)
from rankless.observe.events import OnEvent, Progress, ProgressCounter
from rankless.observe.reporter import notify_listener
from rankless.observe.warning import warn_caller
from rankless.ondisk.range_checksums import RangeChecksum
from rankless.process.prepared_types import prepared
from rankless.run.catalog import is_run_directory
from rankless.run.cleanup import clean_up
from rankless.run.lookup import open_latest
from rankless.run.pending_dir import check_destination
from rankless.run.pending_lock import confirm_lock
from rankless.run.unpublished_output import check_hosts, make_output
from rankless.state.optimizer.left_out_values import warn_if_left_out
from rankless.storage.direct_io import BufferedWriter
from rankless.storage.exact_reader import ExactReaderFactory
from rankless.storage.object_path import ObjectPath
from rankless.storage.posix import file_size, host_id, sync_tree


def _torch_file(schema: str) -> Callable[[ConversionSource, Path, Path], ConversionTarget]:
    """Return what makes the target that is one file of ``torch.save``. Only such targets import torch."""
    return lambda source, pending, _: load_attribute(_TORCH_TARGET)(source, pending, load_attribute(_SCHEMAS + schema))


def _lightning_file(source: ConversionSource, pending: Path, _: Path) -> ConversionTarget:
    """Return the target that is one file of Lightning's ``Trainer``, with the training step of the source."""
    schema = partial(load_attribute(_SCHEMAS + "lightning_schema"), step=source.step)
    return load_attribute(_TORCH_TARGET)(source, pending, schema)  # type: ignore[no-any-return]


#: The target that is one file of ``torch.save``.
_TORCH_TARGET = "rankless.conversion.torch_target:TorchTarget"


#: Functions that lay out the trees of torch's files.
_SCHEMAS = "rankless.conversion.state_dict_schemas:"

#: The target of each format: made from the source, the pending path and the final path.
TARGETS: Mapping[str, Callable[[ConversionSource, Path, Path], ConversionTarget]] = {
    "native": NativeTarget,
    "hf": HuggingFaceTarget,
    "safetensors": SafetensorsTarget,
    "torch": _torch_file("state_dict_schema"),
    "lightning": _lightning_file,
    LIGHTNING_FOLDER: lambda source, pending, _: load_target(LIGHTNING_FOLDER)(source, pending),
    "peft": PeftTarget,
    DEEPSPEED_UNIVERSAL: lambda source, pending, _: load_target(DEEPSPEED_UNIVERSAL)(source, pending),
    "colossalai": lambda source, pending, _: load_target("colossalai")(source, pending),
    DCP: lambda source, pending, _: load_target(DCP)(source, pending, load_attribute(_SCHEMAS + "dcp_schema")),
    MEGATRON: lambda source, pending, _: load_target(MEGATRON)(source, pending),
}

#: The formats with a place for the training step.
HAVE_STEP = frozenset({"native", "lightning", LIGHTNING_FOLDER, DEEPSPEED_UNIVERSAL, MEGATRON})

#: The formats that keep what an optimizer has in its state dict, or warn of what they leave out.
KEEP_OWN_VALUES = frozenset({"native", "torch", "lightning", "colossalai"})

#: The formats that have tables in place of objects among an optimizer's states, and elements in row-major order.
CHANGE_STATES = frozenset({"torch", "lightning", LIGHTNING_FOLDER, "colossalai", DCP})

#: Functions that change a source to what a format needs: ``"module:function"``.
ADAPTERS = {
    "hf": "rankless.conversion.hub_form:adapt_source",
    MEGATRON: "rankless.megatron.writer.megatron_source:adapt_source",
}


@dataclass(frozen=True)
class ConversionRequest:
    """The arguments of a conversion. ``small_files`` are added to a folder of Hugging Face or PEFT, by their names.

    ``options`` are those of the format.
    """

    source: Path
    final: Path
    to: str
    tensor_filter: TensorFilter
    keys: Mapping[str, str]
    limit: int
    small_files: Mapping[str, bytes] = field(default_factory=dict)
    #: The fingerprint that the source must have, if it was looked at before.
    fingerprint: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    #: The training step of the output, if the user has passed one.
    step: int | None = None

    def check_arguments(self) -> None:
        """Raise ``InvalidArgumentError`` or ``TagExistsError`` if the request is not valid."""
        if self.to not in {*TARGETS, NXD}:
            raise InvalidArgumentError(f"to must be one of {', '.join((*TARGETS, NXD))}; got {self.to!r}")
        if self.step is not None and self.to not in HAVE_STEP:
            raise InvalidArgumentError(f"the format {self.to!r} has no place for a training step: leave it out")
        if self.to in {"torch", "lightning"} and self.final.suffix == ".safetensors":
            raise InvalidArgumentError(
                f"{self.final.name} would be read as a safetensors file: give it another extension, such as .pt or "
                '.ckpt, or convert to "safetensors"'
            )
        source, final = self.source.resolve(), self.final.resolve()
        inside = final.is_relative_to(source) and is_checkpoint(source) and not is_run_directory(source)
        if final == source or inside or source.is_relative_to(final):
            raise InvalidArgumentError(
                f"the output {self.final} is the source {self.source}, or one is inside the other: choose another path"
            )
        check_destination(self.final)

    def open_source(self) -> ConversionSource:
        """Open the source. Raises ``CheckpointReplacedError`` if another process replaces it meanwhile."""
        reader = open_latest(self.source, self._source_keys())
        if self.fingerprint not in {None, reader.fingerprint}:
            raise CheckpointReplacedError(f"{reader.path} was replaced while it was being read; try again")
        for doubt in describe_doubts(reader):
            warn_caller(doubt)
        with detect_replacement(reader):
            reader.check_files()
            source = ConversionSource(
                reader,
                self.tensor_filter.select_tensors(reader),
                carry_values(reader, self.tensor_filter),
                self.limit,
                self.small_files,
                self.options,
                self.tensor_filter.dtype,
                given_step=self.step,
            )
            adapted: ConversionSource = load_attribute(ADAPTERS[self.to])(source) if self.to in ADAPTERS else source
            return adapted

    def _source_keys(self) -> Mapping[str, str]:
        """Return the keys for the source. A layout may be meant for the target alone.

        Formats that need the names of transformers get them from checkpoints of Megatron.
        """
        names = {LAYOUT: MEGATRON_HF} if self.to in {"hf", NXD} else {}
        if (names or LAYOUT in self.keys) and READABLE[MEGATRON].is_at(self.source):
            return {**self.keys, **names} if self.to == NXD else {**names, **self.keys}
        if LAYOUT not in self.keys or READABLE[NXD].is_at(self.source):
            return self.keys
        if self.to != NXD:
            raise InvalidArgumentError(
                f"layout is only for NxD and Megatron, and {self.source} is a checkpoint of neither: leave it out"
            )
        return {key: value for key, value in self.keys.items() if key != LAYOUT}


@prepared
class _SeenBy(msgspec.Struct, frozen=True, array_like=True):
    """The fingerprint of the source as a rank sees it, and the id of the rank's host."""

    fingerprint: str
    host: str


@prepared
class _ConversionStart(msgspec.Struct, frozen=True, array_like=True):
    """The path of the pending directory, and the number of the host of each rank."""

    pending_path: str
    host_of: list[int]


@dataclass(frozen=True)
class _ShareOfWork:
    """The part of a rank in the work: what it writes, and the checksums in the files that all ranks read."""

    layout: FileLayout
    file_ranges: Sequence[FileRange]
    on_moved: OnBytesMoved
    checksums: Sequence[RangeChecksum]


class Conversion:
    """A conversion. Each of its steps ends in a vote of all ranks."""

    def __init__(self, request: ConversionRequest, session: Session, on_event: OnEvent) -> None:
        self._request, self._session, self._on_event = request, session, on_event
        self._pending = make_output(request.final)  # that of rank 0 is used

    def run(self, *, verify: bool) -> Path:
        """Run all steps. If one fails, nothing is left behind, and all ranks raise the same error."""
        source, pending, host_of = self._open_source()
        if self._session.rank == 0 and self._request.to not in KEEP_OWN_VALUES:
            warn_if_left_out(source.carried.shared, f"the format {self._request.to!r}")
        if self._session.rank == 0 and self._request.to in CHANGE_STATES:
            warn_of_changed_states(source.carried.shared, f"the format {self._request.to!r}")
        checksums = self._session.run_on_all("reading the source's checksums", lambda: _find_checksums(source))
        make = TARGETS[self._request.to]
        target = self._session.run_on_all("planning the output", lambda: make(source, pending, self._request.final))
        try:
            file_ranges, layout = self._create_files(source, target, pending, host_of)
            on_moved = self._progress_callback(file_ranges, times=2 if verify else 1)
            work = _ShareOfWork(layout, file_ranges, on_moved, checksums)
            written = self._write_share(target, source, work)
            if verify:
                self._session.run_on_all(
                    "reading back", lambda: _verify_written(target, layout, file_ranges, written, on_moved)
                )
            self._session.vote("finishing", lambda: None, lambda _: b"", lambda _: self._publish_output(target))
        except BaseException:
            if self._pending.is_locked:
                self._pending.discard()
            raise
        return self._request.final

    def _progress_callback(self, file_ranges: Sequence[FileRange], times: int) -> OnBytesMoved:
        """Return a function that counts the bytes this rank moves, each ``times`` times, and reports progress."""

        def report(done: int, total: int) -> None:
            event = Progress("convert", self._request.final, done, total)
            notify_listener(self._on_event, event, self._request.final)

        return ProgressCounter(times * count_bytes(file_ranges), report).add

    def _open_source(self) -> tuple[ConversionSource, Path, list[int]]:
        """Open the source, and check that all ranks see the same. Also return the number of the host of each rank."""

        def open_and_check() -> ConversionSource:
            self._request.check_arguments()
            return self._request.open_source()

        def choose_pending(posted: list[bytes]) -> bytes:
            seen = [msgspec.msgpack.decode(raw, type=_SeenBy) for raw in posted]
            require_equal(f"the contents of {self._request.source}", [by_rank.fingerprint for by_rank in seen])
            if not isinstance(self._request.final, ObjectPath):
                clean_up(self._request.final.parent, tag=self._request.final.name)
            host_of, _ = deduplicate([by_rank.host.encode() for by_rank in seen])
            check_hosts(self._request.final, host_of)
            return msgspec.msgpack.encode(_ConversionStart(str(self._pending.path), host_of))

        def describe_view(opened: ConversionSource) -> bytes:
            return msgspec.msgpack.encode(_SeenBy(opened.reader.fingerprint, host_id()))

        source, raw = self._session.vote("reading the metadata", open_and_check, describe_view, choose_pending)
        start = msgspec.msgpack.decode(raw, type=_ConversionStart)
        return source, Path(start.pending_path), start.host_of

    def _create_files(
        self, source: ConversionSource, target: ConversionTarget, pending: Path, host_of: Sequence[int]
    ) -> tuple[list[FileRange], FileLayout]:
        """Create the files, and divide the work."""

        def create_files(_: list[bytes]) -> bytes:
            self._pending.create_new(source.nbytes)
            target.create_files()
            if len({*host_of}) > 1:
                # Pages that rank 0 has written must not be written back after other hosts have written next to them.
                sync_tree(self._pending.path)
            return b""

        def locate_tensors() -> FileLayout:
            if self._session.rank != 0:
                confirm_lock(pending)
            return target.locate_tensors()

        self._session.vote("preparing", lambda: None, lambda _: b"", create_files)
        layout = self._session.run_on_all("reading the layout of the new files", locate_tensors)
        return list(_rank_share(layout, self._session, host_of)), layout

    def _write_share(self, target: ConversionTarget, source: ConversionSource, work: _ShareOfWork) -> Fragments:
        """Write this rank's share of the bytes. All ranks together verify the CRCs of the source."""
        tensors, layout = list(work.layout.tensors), work.layout
        stored = [source.selected.sources.get(key, key) for key in tensors]
        checks = ChecksumVerifier(source.reader, stored)
        written: Fragments = {}

        def convert_share() -> HashedResult:
            fragments_read, crcs_read = ReadFragments(), ReadCrcs(work.checksums)
            sources = InputFiles(source, fragments_read)
            with detect_replacement(source.reader):
                with SourceReader(sources.files, HashingReaderPool(ExactReaderFactory(), crcs_read)) as opened:
                    # Through the page cache, because the files are soon read back.
                    providers = sources.tensor_providers(tensors, opened)
                    written.update(
                        write_file_ranges(layout.files, work.file_ranges, providers, work.on_moved, BufferedWriter)
                    )
                read = {
                    n: fragments
                    for n, fragments in fragments_read.merge_all().items()
                    if tensors[n] in source.selected.sources
                }
                if any(source.reader.block_crcs(*key) is None for key in source.selected.sources.values()):
                    check_current(source.reader)
                crcs = RankCrcs(encode_fragments(checks.verify_local(read)), crcs_read.encode())
                return HashedResult(written, msgspec.msgpack.encode(crcs))

        def verify_and_finish(fragments: Fragments, posted: list[bytes]) -> bytes:
            reports = [msgspec.msgpack.decode(raw, type=RankCrcs) for raw in posted]
            with detect_replacement(source.reader):
                check_ranges(work.checksums, decode_pieces(report.pieces for report in reports))
                checks.verify_across_ranks(decode_fragments(report.fragments for report in reports))
                target.write_metadata(fragments)
            return b""

        vote_with_fragments(self._session, "converting", convert_share, verify_and_finish)
        return written

    def _publish_output(self, target: ConversionTarget) -> bytes:
        self._pending.publish(target.output_name)
        return b""


def _find_checksums(source: ConversionSource) -> Sequence[RangeChecksum]:
    with detect_replacement(source.reader):
        return find_source_checksums(source.reader, source.selected.sources.values())


def _rank_share(layout: FileLayout, session: Session, host_of: Sequence[int]) -> list[FileRange]:
    """Return the share of this rank in the bytes, in the order of the files."""
    spans = [
        FileRange(number, span.start, span.stop, span.start, span.file, span.offset)
        for number, of_tensor in enumerate(layout.tensors.values())
        for span in of_tensor
    ]
    if len({*host_of}) == 1:
        return [share for share in split_evenly(spans, session.rank, session.size) if share.start < share.stop]
    by_file: dict[int, list[PlacedTensor]] = {}
    for span in spans:
        stop = span.offset + span.stop - span.start
        by_file.setdefault(span.file, []).append(PlacedTensor(span.offset, stop, ("", ""), span.start))
    all_ranks = tuple(range(session.size))
    sizes = [file_size(file) for file in layout.files]
    writer_map = WriterMap(by_file, sizes, EqualWriters(all_ranks))
    # Every rank can read the whole source, so the ranks send each other nothing.
    return list(CellPlanner(writer_map, host_of, session.rank).plan_rank({all_ranks: spans}, []).file_ranges)


def _verify_written(
    target: ConversionTarget,
    layout: FileLayout,
    file_ranges: Sequence[FileRange],
    written: Fragments,
    on_moved: OnBytesMoved,
) -> None:
    """Raise ``CorruptCheckpointError`` if the files do not contain the bytes that this rank wrote."""
    target.open_reader()
    read = read_file_ranges(layout.files, file_ranges, lambda _: NullSink(), on_moved)
    keys = list(layout.tensors)
    for number, fragments in written.items():
        if read.get(number) != fragments:
            group, name = keys[number]
            raise CorruptCheckpointError(
                f"{group} tensor {name!r} in {target.open_reader().path} is corrupt: it is not what was written"
            )
