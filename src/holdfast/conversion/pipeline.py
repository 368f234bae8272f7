"""The work of a conversion, shared by all ranks: read, cast and write a buffer at a time; verify; one rename."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.conversion.carried_values import carry_values
from holdfast.conversion.dcp_target import DcpTarget
from holdfast.conversion.lightning_target import LightningTarget
from holdfast.conversion.native_target import HuggingFaceTarget, NativeTarget, SafetensorsTarget
from holdfast.conversion.source_checksums import check_source_checksums
from holdfast.conversion.sources import SourceTable
from holdfast.conversion.state_dict_schemas import dcp_schema, lightning_schema, state_dict_schema
from holdfast.conversion.target import ConversionSource, ConversionTarget, FileLayout
from holdfast.conversion.tensor_filter import TensorFilter
from holdfast.conversion.torch_target import SingleFileTarget
from holdfast.engine.comm.session import Session, require_equal
from holdfast.engine.comm.vote import COORDINATOR_RANK
from holdfast.engine.integrity.crc_gather import HashedResult, vote_with_fragments
from holdfast.engine.integrity.fragments import decode_fragments, encode_fragments
from holdfast.engine.integrity.verify import ChecksumVerifier
from holdfast.engine.io.read import read_pieces
from holdfast.engine.io.requests import Fragments, Moved
from holdfast.engine.io.source_reader import SourceReader
from holdfast.engine.io.stream import ReadFragments
from holdfast.engine.io.tensor_bytes import NullSink
from holdfast.engine.io.write import write_pieces
from holdfast.engine.plan.file_ranges import FileRange, count_bytes
from holdfast.engine.plan.partition import split_evenly
from holdfast.errors import CorruptCheckpointError, InvalidArgumentError, StorageError
from holdfast.formats.detect import is_checkpoint
from holdfast.formats.reader import detect_replacement
from holdfast.formats.registry import LAYOUT, NXD, READABLE, load_target
from holdfast.observe.events import OnEvent, Progress, ProgressCounter
from holdfast.run.catalog import is_run_directory, open_latest
from holdfast.run.staging_dir import check_destination, new_staging_path
from holdfast.storage import directories
from holdfast.storage.direct_io import BufferedWriter

#: How each format is written: from what there is, into a hidden path, which will be called ``final``.
TARGETS: Mapping[str, Callable[[ConversionSource, Path, Path], ConversionTarget]] = {
    "native": NativeTarget,
    "hf": HuggingFaceTarget,
    "safetensors": SafetensorsTarget,
    "torch": lambda material, draft, _: SingleFileTarget(material, draft, state_dict_schema),
    "lightning": lambda material, draft, _: SingleFileTarget(material, draft, lightning_schema),
    "lightning-folder": lambda material, draft, _: LightningTarget(material, draft),
    "colossalai": lambda material, draft, _: load_target("colossalai")(material, draft),
    "dcp": lambda material, draft, _: DcpTarget(material, draft, dcp_schema),
}


@dataclass(frozen=True)
class ConversionRequest:
    """What the user asked for."""

    source: Path
    final: Path
    to: str
    choice: TensorFilter
    keys: Mapping[str, str]
    limit: int

    def check(self) -> None:
        """Raise for what cannot be done."""
        if self.to not in {*TARGETS, NXD}:
            raise InvalidArgumentError(f"to must be one of {', '.join((*TARGETS, NXD))}; got {self.to!r}")
        if self.to in {"torch", "lightning"} and self.final.suffix == ".safetensors":
            raise InvalidArgumentError(
                f"{self.final.name} would be taken for a safetensors file: give it another ending, such as .pt or "
                '.ckpt, or convert to "safetensors"'
            )
        source, final = self.source.resolve(), self.final.resolve()
        inside = final.is_relative_to(source) and is_checkpoint(source) and not is_run_directory(source)
        if final == source or inside or source.is_relative_to(final):
            raise InvalidArgumentError(f"{self.final} is, or lies in, what is converted, {self.source}: choose another")
        check_destination(self.final)

    def material(self) -> ConversionSource:
        """What is converted. Raises ``CheckpointReplacedError`` where another takes its place meanwhile."""
        known = self.keys
        if LAYOUT in known and not READABLE[NXD].is_at(self.source):
            if self.to != NXD:
                raise InvalidArgumentError(f"layout is for NxD, and {self.source} is no checkpoint of it: leave it out")
            known = {key: value for key, value in known.items() if key != LAYOUT}
        reader = open_latest(self.source, known)
        with detect_replacement(reader):
            reader.check_files()
            return ConversionSource(reader, self.choice.of(reader), carry_values(reader, self.choice), self.limit)


class Conversion:
    """The steps, each of which ends in a vote."""

    def __init__(self, wish: ConversionRequest, session: Session, on_event: OnEvent) -> None:
        self._wish, self._session, self._on_event = wish, session, on_event

    def run(self, *, verify: bool) -> Path:
        """All of it; on failure nothing is left, and all ranks raise the same error."""
        material, draft = self._look()
        self._session.all("verifying the source", lambda: self._check_source(material))
        make = TARGETS[self._wish.to]
        target = self._session.all("planning what is written", lambda: make(material, draft, self._wish.final))
        try:
            pieces, places = self._prepare(target)
            moved = self._meter(pieces, times=2 if verify else 1)
            written = self._write(target, material, places, pieces, moved)
            if verify:
                self._session.all("reading back", lambda: _verify(target, places, pieces, written, moved))
            self._session.vote("finishing", lambda: None, lambda _: b"", lambda _: self._publish(target, draft))
        except BaseException:
            if self._session.rank == COORDINATOR_RANK:
                with suppress(StorageError):
                    target.close()
                    directories.remove_tree(draft)
            raise
        return self._wish.final

    def _check_source(self, material: ConversionSource) -> None:
        with detect_replacement(material.reader):
            keys = material.chosen.sources.values()
            check_source_checksums(material.reader, keys, self._session.rank, self._session.size)

    def _meter(self, pieces: Sequence[FileRange], times: int) -> Moved:
        """What is told the bytes that this rank has moved; each of them is moved so many times."""

        def show(done: int, total: int) -> None:
            self._on_event(Progress("convert", self._wish.final, done, total))

        return ProgressCounter(times * count_bytes(pieces), show).add

    def _look(self) -> tuple[ConversionSource, Path]:
        """Open the source, and agree that all see the same."""

        def work() -> ConversionSource:
            self._wish.check()
            return self._wish.material()

        def decide(posted: list[bytes]) -> bytes:
            require_equal(f"the contents of {self._wish.source}", [raw.decode() for raw in posted])
            return new_staging_path(self._wish.final).name.encode()

        material, name = self._session.vote(
            "reading the metadata", work, lambda found: found.reader.fingerprint.encode(), decide
        )
        return material, self._wish.final.parent / name.decode()

    def _prepare(self, target: ConversionTarget) -> tuple[list[FileRange], FileLayout]:
        """Make the files, and share the work."""

        def made(_: list[bytes]) -> bytes:
            target.prepare()
            return b""

        self._session.vote("preparing", lambda: None, lambda _: b"", made)
        places = self._session.all("looking at the new files", target.places)
        return list(_share(places, self._session)), places

    def _write(
        self,
        target: ConversionTarget,
        material: ConversionSource,
        places: FileLayout,
        pieces: Sequence[FileRange],
        moved: Moved,
    ) -> Fragments:
        """Write this rank's share; what was read is verified by all together."""
        tensors = list(places.tensors)
        stored = [material.chosen.sources.get(key, key) for key in tensors]
        checks = ChecksumVerifier(material.reader, stored)
        written: Fragments = {}

        def work() -> HashedResult:
            heard = ReadFragments()
            sources = SourceTable(material, heard)
            with detect_replacement(material.reader):
                with SourceReader(sources.files) as opened:
                    # Through the page cache: what is read back soon is still there.
                    parts = sources.parts(tensors, opened)
                    written.update(write_pieces(places.files, pieces, parts, moved, BufferedWriter))
                read = {n: found for n, found in heard.fragments().items() if tensors[n] in material.chosen.sources}
                return HashedResult(written, encode_fragments(checks.check_own(read)))

        def decide(fragments: Fragments, posted: list[bytes]) -> bytes:
            with detect_replacement(material.reader):
                checks.check_shared(decode_fragments(posted))
                target.finish(fragments)
            return b""

        vote_with_fragments(self._session, "converting", work, decide)
        return written

    def _publish(self, target: ConversionTarget, draft: Path) -> bytes:
        directories.rename_noreplace(target.made, self._wish.final)
        target.close()
        directories.remove_tree(draft)
        return b""


def _share(places: FileLayout, session: Session) -> list[FileRange]:
    """The share of this rank in the bytes, in the order of the files."""
    every = [
        FileRange(number, spot.start, spot.stop, spot.start, spot.file, spot.offset)
        for number, spots in enumerate(places.tensors.values())
        for spot in spots
    ]
    return [piece for piece in split_evenly(every, session.rank, session.size) if piece.start < piece.stop]


def _verify(
    target: ConversionTarget, places: FileLayout, pieces: Sequence[FileRange], written: Fragments, moved: Moved
) -> None:
    """Raise ``CorruptCheckpointError`` where what is in the files is not what this rank wrote."""
    target.reader()
    found = read_pieces(places.files, pieces, lambda _: NullSink(), moved)
    keys = list(places.tensors)
    for number, fragments in written.items():
        if found.get(number) != fragments:
            group, name = keys[number]
            raise CorruptCheckpointError(f"{group} tensor {name!r} is not in {target.reader().path} as it was written")
