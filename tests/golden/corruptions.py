"""Corruptions by name: the golden checkpoint, the change, and the expected error.

Changes of contents also fix sizes and CRCs, so that the contents are refused and not the checksum.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankless.errors import (
    CorruptCheckpointError,
    FormatError,
    MismatchError,
    NoCheckpointError,
    OutsideLinkError,
    RanklessError,
    UnsafeNameError,
)
from tests.golden.reader import crc64

Do = Callable[[Path], object]
Edit = Callable[[dict[str, Any]], object]

MODEL, OPTIMIZER, MANIFEST = "model/model.safetensors", "optimizer/optimizer.safetensors", "manifest.json"
STATE, RANKS = "state.json", "ranks.json"
SECOND, INDEX = "model/model-00002-of-00004.safetensors", "model/model.safetensors.index.json"
ALIKE = "optimizer/optimizer-00002-of-00006.safetensors", "optimizer/optimizer-00006-of-00006.safetensors"


@dataclass(frozen=True)
class Damage:
    """What is done, and what comes of it.

    A load raises ``error`` with ``words``, or is right to succeed. ``sound`` says whether all of the checkpoint is as
    the format wants it, which a load may not see or not need. Where no tag was asked for, a load ``falls_back``.
    """

    do: Do
    error: type[RanklessError] | None = None
    words: str = ""
    sound: bool = False
    falls_back: bool = True
    of: str = "training"


# ------------------------------------------------------------------------------------------------------------------
# What can be done


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Do:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def other_digit(name: str, at: int) -> Do:
    return rewrite(name, lambda raw: raw[:at] + (b"1" if raw[at:].startswith(b"0") else b"0") + raw[at:][1:])


def flip(name: str, at: int, bit: int = 3) -> Do:
    def change(raw: bytes) -> bytes:
        changed = bytearray(raw)
        changed[at] ^= 1 << bit
        return bytes(changed)

    return rewrite(name, change)


def cut(name: str) -> Do:
    return rewrite(name, lambda raw: raw[:-1])


def empty(name: str) -> Do:
    return rewrite(name, lambda _: b"")


def remove(name: str) -> Do:
    return lambda folder: (folder / name).unlink()


def swap(left: str, other: str) -> Do:
    def do(folder: Path) -> None:
        first, second = (folder / left).read_bytes(), (folder / other).read_bytes()
        assert len(first) == len(second)
        (folder / left).write_bytes(second)
        (folder / other).write_bytes(first)

    return do


def other_save(folder: Path) -> None:
    """Data that is right by itself, but not what the manifest was written for."""
    raw = (folder / MODEL).read_bytes()
    data = raw[-9:-1] + bytes([raw[-1] ^ 1])
    changed = raw[:-9].replace(crc64(raw[-9:]).encode(), crc64(data).encode()) + data
    (folder / MODEL).write_bytes(changed)


def link_out(name: str) -> Do:
    def do(folder: Path) -> None:
        outside = folder.parent.parent / "outside"
        shutil.move(folder / name, outside)
        (folder / name).symlink_to(outside)

    return do


def manifest(edit: Edit) -> Do:
    """Change the manifest, and make its CRC right."""

    def do(folder: Path) -> None:
        table = json.loads((folder / MANIFEST).read_bytes())
        del table["crc64nvme"]
        edit(table)
        body = json.dumps(table, indent=2).removesuffix("\n}").encode()
        (folder / MANIFEST).write_bytes(body + f',\n  "crc64nvme": "{crc64(body)}"\n}}\n'.encode())

    return do


def also(path: str) -> Do:
    """Name another file in the manifest."""
    return manifest(lambda table: table["files"].update({path: {"size": 0, "crc64nvme": "0" * 16}}))


def sealed(do: Do) -> Do:
    """Do it, and make the manifest right for the files as they are then."""

    def both(folder: Path) -> None:
        do(folder)
        manifest(lambda table: [_measure(folder / name, record) for name, record in table["files"].items()])(folder)

    return both


def _measure(file: Path, record: dict[str, Any]) -> None:
    raw = file.read_bytes()
    record |= {"size": len(raw), "crc64nvme": crc64(raw)}
    if file.suffix == ".safetensors":
        head = raw[: 8 + int.from_bytes(raw[:8], "little")]
        record |= {"header_size": len(head), "header_crc64nvme": crc64(head)}


def in_header(name: str, change: Callable[[bytes], bytes]) -> Do:
    """Change the JSON of a data file's header."""

    def whole(raw: bytes) -> bytes:
        size = 8 + int.from_bytes(raw[:8], "little")
        head = change(raw[8:size])
        return len(head).to_bytes(8, "little") + head + raw[size:]

    return sealed(rewrite(name, whole))


def header(edit: Edit) -> Do:
    """Change what the header of the model says."""

    def change(head: bytes) -> bytes:
        table = json.loads(head)
        edit(table)
        return json.dumps(table).encode()

    return in_header(MODEL, change)


def entry(**changes: Any) -> Do:
    """Change what the model's header says of a tensor."""
    return header(lambda table: table["mask"].update(changes))


def length(claimed: int) -> Do:
    """Claim another length of the model's header."""
    return sealed(rewrite(MODEL, lambda raw: claimed.to_bytes(8, "little") + raw[8:]))


def text(name: str, pattern: str, by: str) -> Do:
    """Change text in a file, or in the header of a data file, once."""

    def change(raw: bytes) -> bytes:
        changed, times = re.subn(pattern.encode(), by.encode(), raw, count=1)
        assert times == 1
        return changed

    return in_header(name, change) if name.endswith(".safetensors") else sealed(rewrite(name, change))


def grow(table: dict[str, Any]) -> None:
    """What a later writer may add to a manifest."""
    table["later"] = {"a": [1]}
    table["provenance"]["later"] = 1
    for record in table["files"].values():
        record["later"] = None


def add_beside(folder: Path) -> None:
    """What a later writer may add to the rest."""
    (folder / "ema").mkdir()
    shutil.copyfile(folder / MODEL, folder / "ema/ema.safetensors")
    (folder / "later.bin").write_bytes(b"later")
    table = json.loads((folder / STATE).read_bytes())
    table |= {"later": {"a": 1}}
    for group in table["optimizer"]["groups"]:
        group["later"] = 1
    (folder / STATE).write_text(json.dumps(table))
    also("ema/ema.safetensors")(folder)
    also("later.bin")(folder)


# ------------------------------------------------------------------------------------------------------------------
# The table

DAMAGES = {
    # Bits, in every kind of file
    "a bit of a model": Damage(
        flip(MODEL, -1), CorruptCheckpointError, "model tensor 'mask' in .*/model.safetensors is corrupt"
    ),
    "a bit of an optimizer": Damage(
        flip(OPTIMIZER, -9), CorruptCheckpointError, "optimizer tensor '.*' in .* is corrupt"
    ),
    "a bit of values": Damage(
        flip("state.safetensors", -1), CorruptCheckpointError, "state tensor 'user_content.* is corrupt"
    ),
    "a bit of a rank's": Damage(flip("ranks.safetensors", -1)),
    "a bit of a header": Damage(
        flip(MODEL, 200), CorruptCheckpointError, "the header of .*model.safetensors does not match"
    ),
    "a bit of padding": Damage(
        flip(OPTIMIZER, 4090), CorruptCheckpointError, "the header of .*optimizer.safetensors does not match"
    ),
    "a bit of a length": Damage(
        flip(MODEL, 0, 0), CorruptCheckpointError, "the header of .*model.safetensors does not match"
    ),
    "a bit of state.json": Damage(flip(STATE, 700), CorruptCheckpointError, "state.json does not match the manifest"),
    "a bit of ranks.json": Damage(flip(RANKS, 30), CorruptCheckpointError, "ranks.json does not match the manifest"),
    "a bit of config.json": Damage(
        flip("model/config.json", 9), CorruptCheckpointError, "config.json does not match the manifest", of="files"
    ),
    "a bit of an index": Damage(
        flip(INDEX, 40), CorruptCheckpointError, "index.json does not match the manifest", of="files"
    ),
    "a bit of the manifest": Damage(
        flip(MANIFEST, 52, 0), CorruptCheckpointError, "manifest.json does not match its own CRC"
    ),
    "a bit of the version": Damage(
        flip(MANIFEST, 39, 1), CorruptCheckpointError, "manifest.json does not match its own CRC"
    ),
    "a bit of its CRC": Damage(
        other_digit(MANIFEST, -10), CorruptCheckpointError, "manifest.json does not match its own CRC"
    ),
    # Files that are not what the manifest says
    "data cut short": Damage(cut(MODEL), CorruptCheckpointError, "has 4566 bytes, the manifest says 4567"),
    "data of no bytes": Damage(
        empty(OPTIMIZER), CorruptCheckpointError, "optimizer.safetensors has 0 bytes, the manifest says"
    ),
    "values cut short": Damage(cut(STATE), CorruptCheckpointError, "state.json does not match the manifest"),
    "a manifest cut short": Damage(cut(MANIFEST), CorruptCheckpointError, "manifest.json does not end in its CRC"),
    "a manifest of no bytes": Damage(empty(MANIFEST), CorruptCheckpointError, "manifest.json is not valid JSON"),
    "bytes to spare": Damage(
        rewrite(MODEL, lambda raw: raw + b"\0"), CorruptCheckpointError, "has 4568 bytes, the manifest says"
    ),
    "a hole of zeros": Damage(
        rewrite(MODEL, lambda raw: raw[:4096] + bytes(len(raw) - 4096)),
        CorruptCheckpointError,
        "model tensor .* is corrupt",
    ),
    "line ends of another system": Damage(
        rewrite(MANIFEST, lambda raw: raw.replace(b"\n", b"\r\n")),
        CorruptCheckpointError,
        "manifest.json does not end in its CRC",
    ),
    "data missing": Damage(
        remove(MODEL), CorruptCheckpointError, "model.safetensors is missing; the manifest names it"
    ),
    "a folder missing": Damage(
        lambda folder: shutil.rmtree(folder / "model"), CorruptCheckpointError, "model.safetensors is missing"
    ),
    "values missing": Damage(remove(STATE), CorruptCheckpointError, "state.json is missing; the manifest names it"),
    "the manifest missing": Damage(remove(MANIFEST), NoCheckpointError, "there is no checkpoint 'step_1'"),
    "files of one size swapped": Damage(
        swap(*ALIKE), CorruptCheckpointError, "the header of .* does not match", of="files"
    ),
    "data of another save": Damage(
        other_save, CorruptCheckpointError, "the header of .*model.safetensors does not match"
    ),
    # Names that lead out
    "a name with two dots": Damage(
        also("../x"), UnsafeNameError, r"'\.\./x', which is not a plain path inside its directory"
    ),
    "an absolute name": Damage(also("/etc/passwd"), UnsafeNameError, "'/etc/passwd', which is not a plain path inside"),
    "a link out": Damage(
        link_out(MODEL), OutsideLinkError, "is a link to .*outside, outside of the checkpoint", falls_back=False
    ),
    "a folder that is a link out": Damage(
        link_out("model"), OutsideLinkError, "is a link to .*, outside of the checkpoint", falls_back=False
    ),
    # What the manifest says
    "a newer version": Damage(
        manifest(lambda table: table.update(version=2)), FormatError, "has format version 2, .* update rankless"
    ),
    "another format": Damage(
        manifest(lambda table: table.update(format="x")), FormatError, "manifest.json is not a rankless manifest"
    ),
    "no files": Damage(
        manifest(lambda table: table["files"].clear()), CorruptCheckpointError, "does not name state.json"
    ),
    "no sequence": Damage(
        manifest(lambda table: table.pop("sequence")), CorruptCheckpointError, "manifest.json .*`sequence`"
    ),
    "no CRC of a header": Damage(
        manifest(lambda table: table["files"][MODEL].pop("header_crc64nvme")),
        CorruptCheckpointError,
        "header of .* does not match",
    ),
    "another tag": Damage(manifest(lambda table: table.update(tag="step_9")), sound=True),
    # Headers
    "a length beyond the file": Damage(
        length(2**40), CorruptCheckpointError, "the header of .*model.safetensors claims"
    ),
    "a length of nothing": Damage(
        length(0), CorruptCheckpointError, "the header of .*model.safetensors is not valid JSON"
    ),
    "a length inside the header": Damage(
        length(100), CorruptCheckpointError, "the header of .*model.safetensors is not valid JSON"
    ),
    "an overlap": Damage(entry(data_offsets=[0, 9]), CorruptCheckpointError, "leaves a gap or overlaps another"),
    "a hole": Damage(entry(data_offsets=[463, 472]), CorruptCheckpointError, "leaves a gap or overlaps another"),
    "another shape": Damage(
        entry(shape=[9, 9]), CorruptCheckpointError, r"'mask' has 9 bytes, not those of BOOL \[9, 9\]"
    ),
    "an unknown dtype": Damage(entry(dtype="B1"), FormatError, "'mask': dtype 'B1' is not supported", falls_back=False),
    "another dtype of that width": Damage(
        entry(dtype="U8"), MismatchError, "mask: dtype U8 in the checkpoint", sound=True, falls_back=False
    ),
    "a tensor twice": Damage(text(MODEL, '"none"', '"mask"'), CorruptCheckpointError, "header of .* duplicate key"),
    "a tensor in two files": Damage(
        text(SECOND, '"body.0.weight"', '"embed.weight"'),
        CorruptCheckpointError,
        "hold a tensor of the same name",
        of="files",
    ),
    "CRCs of other bytes": Damage(
        text(MODEL, '(nvme":")....', r"\g<1>0000"), CorruptCheckpointError, "model tensor .* is corrupt"
    ),
    "a CRC too few": Damage(text(MODEL, '(nvme":").{16}', r"\1"), CorruptCheckpointError, "has 6 CRCs, .* 7 blocks"),
    "no CRCs": Damage(
        header(lambda table: table["__metadata__"].clear()), CorruptCheckpointError, "has no rankless.crc64nvme"
    ),
    "a tie to nothing": Damage(
        text(MODEL, r':\\"embed', r':\\"absent'), CorruptCheckpointError, "names a tensor that is not in"
    ),
    "a tie of another tensor": Damage(
        text(MODEL, r'"head\.weight', '"mask'), CorruptCheckpointError, "is also the name of another tensor"
    ),
    # Values
    "an unknown tag": Damage(
        text(STATE, r"\$uuid", "$uuid9"), FormatError, r"state.json: the tag '\$uuid9' is unknown", falls_back=False
    ),
    "a tag that is not alone": Damage(
        text(STATE, r'"\$uuid"', '"a":1,"$uuid"'), CorruptCheckpointError, "is not alone"
    ),
    "a key twice": Damage(
        text(STATE, '"eps"', '"lr"'), CorruptCheckpointError, "state.json .*: duplicate key in an object"
    ),
    "no number": Damage(text(STATE, r"65536\.0", "NaN"), CorruptCheckpointError, "state.json .*: NaN is not JSON"),
    "half a character": Damage(
        text(STATE, r"\\ude00", ""), CorruptCheckpointError, "state.json .* surrogates not allowed"
    ),
    "a tensor that is not there": Damage(
        text(STATE, r"content\.tensors\.U8", "nowhere"), CorruptCheckpointError, "'user_nowhere'"
    ),
    "values that are no table": Damage(
        sealed(rewrite(STATE, lambda _: b"[]")), CorruptCheckpointError, "state.json must be a JSON object"
    ),
    # No damage
    "what a later writer adds to the manifest": Damage(manifest(grow), sound=True),
    "what a later writer adds beside": Damage(sealed(add_beside), sound=True),
    "a file that nobody names": Damage(lambda folder: (folder / "notes.txt").write_text("mine"), sound=True),
    "an index of a missing file": Damage(text(INDEX, "00003-of", "00009-of"), sound=True, of="files"),
}

#: Those of which the result is kept, too.
STORED = ("a bit of a model", "data cut short", "a newer version", "an unknown tag", "an overlap")
