"""The work of a conversion, shared by all ranks: read, cast and write a buffer at a time; verify; one rename."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.catalog import is_run, open_latest
from holdfast.conversion.carried import carried
from holdfast.conversion.choice import Choice
from holdfast.conversion.colossalai import ColossalaiTarget
from holdfast.conversion.dcp import DcpTarget
from holdfast.conversion.lightning import LightningTarget
from holdfast.conversion.native import HuggingFaceTarget, NativeTarget, SafetensorsTarget
from holdfast.conversion.shapes import distributed, lightning, state_dicts
from holdfast.conversion.source_sums import check_sums
from holdfast.conversion.sources import Sources
from holdfast.conversion.target import Material, Places, Target
from holdfast.conversion.torchfile import AloneTarget
from holdfast.drafts import check_final, new_draft
from holdfast.engine.ballot import LEADER
from holdfast.engine.checks import Checks
from holdfast.engine.fold import decode_fragments, encode_fragments
from holdfast.engine.local import Nowhere
from holdfast.engine.opened import Opened
from holdfast.engine.ranks import Session, unanimous
from holdfast.engine.read import read_pieces
from holdfast.engine.shares import split_evenly
from holdfast.engine.stream import Heard
from holdfast.engine.transfer import Fragments, Moved, Piece, nbytes_of
from holdfast.engine.tree import Hashed, vote_hashed
from holdfast.engine.write import write_pieces
from holdfast.errors import DamagedError, InvalidArgumentError, StorageError
from holdfast.events import Meter, OnEvent, Progress
from holdfast.formats.detect import is_checkpoint
from holdfast.formats.nxd.reader import LAYOUT, is_nxd
from holdfast.formats.reader import as_opened
from holdfast.storage import folders
from holdfast.storage.bulk import CachedWriter

#: How each format is written: from what there is, into a hidden path, which will be called ``final``.
TARGETS: Mapping[str, Callable[[Material, Path, Path], Target]] = {
    "native": NativeTarget,
    "hf": HuggingFaceTarget,
    "safetensors": SafetensorsTarget,
    "torch": lambda material, draft, _: AloneTarget(material, draft, state_dicts),
    "lightning": lambda material, draft, _: AloneTarget(material, draft, lightning),
    "lightning-folder": lambda material, draft, _: LightningTarget(material, draft),
    "colossalai": lambda material, draft, _: ColossalaiTarget(material, draft),
    "dcp": lambda material, draft, _: DcpTarget(material, draft, distributed),
}

#: What is written by planning each rank's files instead.
NXD = "nxd"


@dataclass(frozen=True)
class Wish:
    """What the user asked for."""

    source: Path
    final: Path
    to: str
    choice: Choice
    keys: Mapping[str, str]
    limit: int

    def check(self) -> None:
        """Raise for what cannot be done."""
        if self.to not in {*TARGETS, NXD}:
            raise InvalidArgumentError(f"to is one of {', '.join((*TARGETS, NXD))}, not {self.to!r}")
        if self.to in {"torch", "lightning"} and self.final.suffix == ".safetensors":
            raise InvalidArgumentError(
                f"{self.final.name} would be taken for a safetensors file: give it another ending, such as .pt or "
                '.ckpt, or convert to "safetensors"'
            )
        source, final = self.source.resolve(), self.final.resolve()
        inside = final.is_relative_to(source) and is_checkpoint(source) and not is_run(source)
        if final == source or inside or source.is_relative_to(final):
            raise InvalidArgumentError(f"{self.final} is, or lies in, what is converted, {self.source}: choose another")
        check_final(self.final)

    def material(self) -> Material:
        """What is converted. Raises ``GoneError`` where another takes its place meanwhile."""
        known = self.keys
        if LAYOUT in known and not is_nxd(self.source):
            if self.to != NXD:
                raise InvalidArgumentError(f"layout is for NxD, and {self.source} is no checkpoint of it: leave it out")
            known = {key: value for key, value in known.items() if key != LAYOUT}
        reader = open_latest(self.source, known)
        with as_opened(reader):
            reader.check_files()
            return Material(reader, self.choice.of(reader), carried(reader, self.choice), self.limit)


class Conversion:
    """The steps, each of which ends in a vote."""

    def __init__(self, wish: Wish, session: Session, on_event: OnEvent) -> None:
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
            if self._session.rank == LEADER:
                with suppress(StorageError):
                    target.close()
                    folders.remove_tree(draft)
            raise
        return self._wish.final

    def _check_source(self, material: Material) -> None:
        with as_opened(material.reader):
            keys = material.chosen.sources.values()
            check_sums(material.reader, keys, self._session.rank, self._session.size)

    def _meter(self, pieces: Sequence[Piece], times: int) -> Moved:
        """What is told the bytes that this rank has moved; each of them is moved so many times."""

        def show(done: int, total: int) -> None:
            self._on_event(Progress("convert", self._wish.final, done, total))

        return Meter(times * nbytes_of(pieces), show).add

    def _look(self) -> tuple[Material, Path]:
        """Open the source, and agree that all see the same."""

        def work() -> Material:
            self._wish.check()
            return self._wish.material()

        def decide(posted: list[bytes]) -> bytes:
            unanimous(f"the contents of {self._wish.source}", [raw.decode() for raw in posted])
            return new_draft(self._wish.final).name.encode()

        material, name = self._session.vote(
            "reading the metadata", work, lambda found: found.reader.fingerprint.encode(), decide
        )
        return material, self._wish.final.parent / name.decode()

    def _prepare(self, target: Target) -> tuple[list[Piece], Places]:
        """Make the files, and share the work."""

        def made(_: list[bytes]) -> bytes:
            target.prepare()
            return b""

        self._session.vote("preparing", lambda: None, lambda _: b"", made)
        places = self._session.all("looking at the new files", target.places)
        return list(_share(places, self._session)), places

    def _write(
        self, target: Target, material: Material, places: Places, pieces: Sequence[Piece], moved: Moved
    ) -> Fragments:
        """Write this rank's share; what was read is verified by all together."""
        tensors = list(places.tensors)
        stored = [material.chosen.sources.get(key, key) for key in tensors]
        checks = Checks(material.reader, stored)
        written: Fragments = {}

        def work() -> Hashed:
            heard = Heard()
            sources = Sources(material, heard)
            with as_opened(material.reader):
                with Opened(sources.files) as opened:
                    # Through the page cache: what is read back soon is still there.
                    parts = sources.parts(tensors, opened)
                    written.update(write_pieces(places.files, pieces, parts, moved, CachedWriter))
                read = {n: found for n, found in heard.fragments().items() if tensors[n] in material.chosen.sources}
                return Hashed(written, encode_fragments(checks.check_own(read)))

        def decide(fragments: Fragments, posted: list[bytes]) -> bytes:
            with as_opened(material.reader):
                checks.check_shared(decode_fragments(posted))
                target.finish(fragments)
            return b""

        vote_hashed(self._session, "converting", work, decide)
        return written

    def _publish(self, target: Target, draft: Path) -> bytes:
        folders.publish(target.made, self._wish.final)
        target.close()
        folders.remove_tree(draft)
        return b""


def _share(places: Places, session: Session) -> list[Piece]:
    """The share of this rank in the bytes, in the order of the files."""
    every = [
        Piece(number, spot.start, spot.stop, spot.start, spot.file, spot.offset)
        for number, spots in enumerate(places.tensors.values())
        for spot in spots
    ]
    return [piece for piece in split_evenly(every, session.rank, session.size) if piece.start < piece.stop]


def _verify(target: Target, places: Places, pieces: Sequence[Piece], written: Fragments, moved: Moved) -> None:
    """Raise ``DamagedError`` where what is in the files is not what this rank wrote."""
    target.reader()
    found = read_pieces(places.files, pieces, lambda _: Nowhere(), moved)
    keys = list(places.tensors)
    for number, fragments in written.items():
        if found.get(number) != fragments:
            group, name = keys[number]
            raise DamagedError(f"{group} tensor {name!r} is not in {target.reader().path} as it was written")
