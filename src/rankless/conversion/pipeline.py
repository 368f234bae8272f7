"""The steps of a conversion, shared by all ranks: read, cast and write one buffer at a time; verify; rename once.

:func:`rankless.convert` and :func:`rankless.export_model` run it on every rank, in the thread of the caller. The votes
are "reading the metadata", "reading the source's checksums", "planning the output", the votes of the output, and
"opening the output" before the last. The source is verified before headers are written, and nothing is published before
it was read back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rankless.conversion.carried_values import carry_values
from rankless.conversion.changed_states import warn_of_changed_states
from rankless.conversion.conversion_output import RankShare, open_conversion_output
from rankless.conversion.input_files import InputFiles
from rankless.conversion.native_target import HuggingFaceTarget, NativeTarget, SafetensorsTarget
from rankless.conversion.peft_target import PeftTarget
from rankless.conversion.source_checksums import check_ranges, find_source_checksums
from rankless.conversion.target import ConversionSource, ConversionTarget
from rankless.conversion.tensor_filter import TensorFilter
from rankless.engine.comm.session import WritingRanks, require_equal
from rankless.engine.comm.spec_directory import deduplicate
from rankless.engine.integrity.block_verification import ChecksumVerifier
from rankless.engine.integrity.read_crcs import HashingReaderPool, RankCrcs, ReadCrcs, decode_pieces
from rankless.engine.io.byte_sinks import NullSink
from rankless.engine.io.fragments import decode_fragments, encode_fragments
from rankless.engine.io.read import read_file_ranges
from rankless.engine.io.requests import Fragments, KnownFragments, MoveRanges, OnBytesMoved
from rankless.engine.io.source_reader import SourceReader
from rankless.engine.io.streamed_tensor import ReadFragments
from rankless.engine.plan.file_ranges import count_bytes
from rankless.errors import CheckpointReplacedError, CorruptCheckpointError, InvalidArgumentError
from rankless.formats.detect import is_checkpoint
from rankless.formats.reader import EditedCheckpoint, Reader, check_current, describe_doubts, detect_replacement
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
from rankless.formats.remapped_reader import underlying_reader
from rankless.observe.events import OnEvent, Progress, ProgressCounter
from rankless.observe.reporter import notify_listener
from rankless.observe.warning import warn_caller
from rankless.ondisk.range_checksums import RangeChecksum
from rankless.process.prepared_types import prepared
from rankless.run.catalog import is_run_directory
from rankless.run.lookup import open_latest
from rankless.run.pending_dir import check_destination
from rankless.state.optimizer.left_out_values import warn_if_left_out
from rankless.storage.exact_reader import ExactReaderFactory
from rankless.storage.posix import host_id


def _torch_file(schema: str) -> Callable[[ConversionSource, Path, Path], ConversionTarget]:
    """Return the function that makes a target of one ``torch.save`` file. Only such targets import torch."""
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

#: The formats that keep the values in an optimizer's state dict, or warn of those that they leave out.
KEEP_OWN_VALUES = frozenset({"native", "torch", "lightning", "colossalai"})

#: The formats that have tables in place of objects among an optimizer's states, and elements in row-major order.
CHANGE_STATES = frozenset({"torch", "lightning", LIGHTNING_FOLDER, "colossalai", DCP})

#: Functions that change a source for the needs of a format: ``"module:function"``.
ADAPTERS = {
    "hf": "rankless.conversion.hub_form:adapt_source",
    MEGATRON: "rankless.megatron.writer.megatron_source:adapt_source",
}


def check_format(to: str, step: int | None) -> None:
    """Raise ``InvalidArgumentError`` if there is no format of this name, or if it has no place for the step."""
    if to not in {*TARGETS, NXD}:
        raise InvalidArgumentError(f"to must be one of {', '.join((*TARGETS, NXD))}; got {to!r}")
    if step is not None and to not in HAVE_STEP:
        raise InvalidArgumentError(f"the format {to!r} has no place for a training step: leave it out")


@dataclass(frozen=True)
class ConversionRequest:
    """The arguments of a conversion. ``small_files`` are added to a folder of Hugging Face or PEFT, by their names.

    ``options`` are the format's options.
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
    #: The edit of the source, if it is one.
    edit: Callable[[Reader], Reader] | None = None

    def check_arguments(self) -> None:
        """Raise ``InvalidArgumentError`` or ``TagExistsError`` if the request is not valid.

        Each rank calls it in the vote "reading the metadata"; for NxD, rank 0 in the vote "converting".
        """
        check_format(self.to, self.step)
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

    def describe_arguments(self) -> str:
        """Return the arguments that all ranks must pass alike, besides the source, as a text for people."""
        edit = "" if self.edit is None else f", edit {self.edit}"
        step = "" if self.step is None else f", step {self.step}"
        return f"{self.to} in {self.final}, files of {self.limit} bytes{step}{edit}"

    def open_source(self) -> ConversionSource:
        """Open the source. Raises ``CheckpointReplacedError`` if another process replaces it meanwhile.

        Each rank calls it in the vote "reading the metadata"; for NxD, rank 0 in the vote "converting".
        """
        reader = open_latest(self.source, self._source_keys())
        if self.fingerprint not in {None, reader.fingerprint}:
            raise CheckpointReplacedError(f"{reader.path} was replaced while it was being read; try again")
        for doubt in describe_doubts(reader):
            warn_caller(doubt)
        if self.edit is not None:
            reader = self.edit(reader)
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
    """The arguments of a rank, the fingerprint of the source as it sees it, and the id of its host."""

    arguments: str
    fingerprint: str
    host: str


@prepared
class _ConversionStart(msgspec.Struct, frozen=True, array_like=True):
    """The path of the pending directory, and the number of the host of each rank."""

    pending_path: str
    host_of: list[int]


class Conversion:
    """A conversion. Each of its steps ends in a vote of all ranks."""

    def __init__(self, request: ConversionRequest, ranks: WritingRanks, on_event: OnEvent) -> None:
        self._request, self._session, self._on_event = request, ranks.session, on_event
        self._output = open_conversion_output(request.final, ranks)

    def run(self, *, verify: bool) -> Path:
        """Run all steps. If one fails, nothing is left behind, and all ranks raise the same error.

        All ranks call it.
        """
        source, pending, host_of = self._open_source()
        if self._session.rank == 0 and self._request.to not in KEEP_OWN_VALUES:
            warn_if_left_out(source.carried.shared, f"the format {self._request.to!r}")
        if self._session.rank == 0 and self._request.to in CHANGE_STATES:
            warn_of_changed_states(source.carried.shared, f"the format {self._request.to!r}")
        checksums = self._session.run_on_all("reading the source's checksums", lambda: _find_checksums(source))
        make = TARGETS[self._request.to]
        target = self._session.run_on_all("planning the output", lambda: make(source, pending, self._request.final))
        try:
            equal = target.count_equal_bytes() if isinstance(target, NativeTarget) else 0
            share = self._output.create(target, source.nbytes - equal, host_of)
            on_moved = self._progress_callback(share, verify=verify)
            converted = _ConvertedTensors(source, target, share, checksums)
            read_back = partial(_verify_written, share, converted, on_moved) if verify else None
            self._output.write(converted, on_moved, read_back)
            if verify:
                self._session.run_on_all("opening the output", lambda: self._output.check_valid(target))
            self._output.publish()
        except BaseException:
            self._output.discard()
            raise
        return self._request.final

    def _progress_callback(self, share: RankShare, *, verify: bool) -> OnBytesMoved:
        """Return a function that counts the bytes that this rank writes and reads back, and reports progress."""

        def report(done: int, total: int) -> None:
            event = Progress("convert", self._request.final, done, total)
            notify_listener(self._on_event, event, self._request.final)

        written = count_bytes(share.file_ranges)
        return ProgressCounter(2 * written + count_bytes(share.linked) if verify else written, report).add

    def _open_source(self) -> tuple[ConversionSource, Path, list[int]]:
        """Open the source, and check that all ranks see the same. Also return the number of the host of each rank."""

        def open_and_check() -> ConversionSource:
            self._request.check_arguments()
            return self._request.open_source()

        def choose_pending(posted: list[bytes]) -> bytes:
            seen = [msgspec.msgpack.decode(raw, type=_SeenBy) for raw in posted]
            require_equal("the arguments of the conversion", [by_rank.arguments for by_rank in seen])
            require_equal(f"the contents of {self._request.source}", [by_rank.fingerprint for by_rank in seen])
            self._output.clean_up()
            host_of, _ = deduplicate([by_rank.host.encode() for by_rank in seen])
            return msgspec.msgpack.encode(_ConversionStart(str(self._output.pending), host_of))

        def describe_view(opened: ConversionSource) -> bytes:
            arguments = self._request.describe_arguments()
            return msgspec.msgpack.encode(_SeenBy(arguments, opened.reader.fingerprint, host_id()))

        source, raw = self._session.vote("reading the metadata", open_and_check, describe_view, choose_pending)
        start = msgspec.msgpack.decode(raw, type=_ConversionStart)
        return source, Path(start.pending_path), start.host_of


class _ConvertedTensors:
    """The tensors of a source as a target stores them: the :class:`ConvertedContent` of an output.

    All ranks together verify the CRCs of the source. ``written`` are the fragments that this rank has written.
    """

    def __init__(
        self,
        source: ConversionSource,
        target: ConversionTarget,
        share: RankShare,
        checksums: Sequence[RangeChecksum],
    ) -> None:
        self._source, self._target, self._checksums = source, target, checksums
        self._tensors, self._file_ranges = list(share.layout.tensors), share.file_ranges
        stored = [source.selected.sources.get(key, key) for key in self._tensors]
        self._checks = ChecksumVerifier(source.reader, stored)
        self.written: Fragments = {}

    def move_share(self, move: MoveRanges) -> bytes:
        """See :class:`ConvertedContent`. Return the CRCs of the bytes that were read."""
        source, tensors = self._source, self._tensors
        fragments_read, crcs_read = ReadFragments(), ReadCrcs(self._checksums)
        sources = InputFiles(source, fragments_read)
        with detect_replacement(source.reader):
            with SourceReader(sources.files, HashingReaderPool(ExactReaderFactory(), crcs_read)) as opened:
                self.written = move(self._file_ranges, sources.tensor_providers(tensors, opened))
            read = {
                n: fragments
                for n, fragments in fragments_read.merge_all().items()
                if tensors[n] in source.selected.sources
            }
            if any(source.reader.block_crcs(*key) is None for key in source.selected.sources.values()):
                check_current(source.reader)
            if isinstance(stored := underlying_reader(source.reader), EditedCheckpoint):
                stored.verify_inputs()
            crcs = RankCrcs(encode_fragments(self._checks.verify_local(read)), crcs_read.encode())
            return msgspec.msgpack.encode(crcs)

    def verify_linked(self, fragments: Fragments) -> None:
        """Compare the bytes read of files that are links with the CRCs of the source, which has the same bytes."""
        with detect_replacement(self._source.reader):
            self._checks.verify_across_ranks(self._checks.verify_local(fragments))

    def finish(self, fragments: KnownFragments, reports: Sequence[bytes]) -> None:
        """See :class:`ConvertedContent`."""
        decoded = [msgspec.msgpack.decode(raw, type=RankCrcs) for raw in reports]
        with detect_replacement(self._source.reader):
            check_ranges(self._checksums, decode_pieces(report.pieces for report in decoded))
            self._checks.verify_across_ranks(decode_fragments(report.fragments for report in decoded))
            self._target.write_metadata(fragments)


def _find_checksums(source: ConversionSource) -> Sequence[RangeChecksum]:
    with detect_replacement(source.reader):
        return find_source_checksums(source.reader, source.selected.sources.values())


def _verify_written(share: RankShare, converted: _ConvertedTensors, on_moved: OnBytesMoved) -> None:
    """Raise ``CorruptCheckpointError`` if the files do not contain the bytes that this rank wrote."""
    layout = share.layout
    read = read_file_ranges(layout.files, share.file_ranges, lambda _: NullSink(), on_moved)
    keys = list(layout.tensors)
    for number, fragments in converted.written.items():
        if read.get(number) != fragments:
            group, name = keys[number]
            files = ", ".join(sorted({str(layout.files[span.file]) for span in layout.tensors[keys[number]]}))
            raise CorruptCheckpointError(f"{group} tensor {name!r} in {files} is corrupt: it is not what was written")
    converted.verify_linked(read_file_ranges(layout.files, share.linked, lambda _: NullSink(), on_moved))
