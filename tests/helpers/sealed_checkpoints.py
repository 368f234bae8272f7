"""Changes to a checkpoint whose manifest is made to match them."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rankless.ondisk.block_crcs import crc64

MODEL, OPTIMIZER, STATE_TENSORS = (
    "model/model.safetensors",
    "optimizer/optimizer.safetensors",
    "state.safetensors",
)


RANK_TENSORS, STATE, RANKS, MANIFEST = "ranks.safetensors", "state.json", "ranks.json", "manifest.json"


DATA = [MODEL, OPTIMIZER, STATE_TENSORS, RANK_TENSORS]


FILES = [*DATA, STATE, RANKS]


def seal_manifest(table: dict[str, Any] | str) -> bytes:
    """A manifest of this JSON, with its CRC."""
    text = table if isinstance(table, str) else json.dumps(table, indent=2)
    body = text.removesuffix("\n}").encode()
    return body + b',\n  "crc64nvme": "%016x"\n}\n' % crc64(body)


def read_manifest(folder: Path) -> dict[str, Any]:
    table = json.loads((folder / MANIFEST).read_bytes())
    del table["crc64nvme"]
    return table


def reseal_checkpoint(folder: Path, edit: Callable[[dict[str, Any]], object] = len) -> None:
    """Make the manifest right for the files as they are, then change it."""
    table = read_manifest(folder)
    for name, record in table["files"].items():
        if (folder / name).is_file():
            raw = (folder / name).read_bytes()
            record |= {"size": len(raw), "crc64nvme": f"{crc64(raw):016x}"}
            if name in DATA:
                head = raw[: min(int.from_bytes(raw[:8], "little") + 8, len(raw))]
                record |= {"header_size": len(head), "header_crc64nvme": f"{crc64(head):016x}"}
    edit(table)
    (folder / MANIFEST).write_bytes(seal_manifest(table))


def reseal_published(file: Path) -> None:
    """Give the manifest of a published version, or a safetensors file, the CRCs of what it has."""
    raw = file.read_bytes()
    with suppress(ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        if file.suffix == ".json":
            table = json.loads(raw)
            del table["crc64nvme"]
            body = json.dumps(table, separators=(",", ":")).encode().removesuffix(b"}")
            file.write_bytes(body + b',"crc64nvme":"%016x"}\n' % crc64(body))
            return
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        entries = sorted(
            (value for key, value in header.items() if key != "__metadata__"), key=lambda e: e["data_offsets"]
        )
        blocks = []
        for entry in entries:
            start, stop = entry["data_offsets"]
            data = raw[8 + size + start : 8 + size + stop]
            blocks += [crc64(data[at : at + 2**24]) for at in range(0, len(data), 2**24)]
        header["__metadata__"]["rankless.crc64nvme"] = "".join(f"{crc:016x}" for crc in blocks)
        text = json.dumps(header, separators=(",", ":")).encode()
        if len(text) <= size <= len(raw):
            file.write_bytes(raw[:8] + text.ljust(size) + raw[8 + size :])
