"""A reader of format version 1, written from ``docs/format.md`` alone, with NumPy, JSON and struct, without rankless.

It reads all of a checkpoint, and checks every rule of the page. The tests compare rankless with it. It is written to be
read next to the page, not to be fast.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import datetime as dt
import json
import math
import os
import pathlib
import re
import struct
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Refused(ValueError):  # noqa: N818 - as the page says it
    """A checkpoint that is not what the page says."""


class TooNew(Refused):
    """A checkpoint of a later version."""


def check(good: object, why: str) -> None:
    if not good:
        raise Refused(why)


# ------------------------------------------------------------------------------------------------------------------
# CRC


def _table() -> list[int]:
    row = list(range(256))
    for _ in range(8):
        row = [(crc >> 1) ^ (0x9A6C9329AC4BC9B5 if crc & 1 else 0) for crc in row]
    return row


_TABLE = _table()


def crc64(data: bytes) -> str:
    crc = 2**64 - 1
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return f"{crc ^ (2**64 - 1):016x}"


# ------------------------------------------------------------------------------------------------------------------
# JSON


def strict(raw: bytes, what: str) -> Any:
    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        check(len(dict(pairs)) == len(pairs), f"{what}: a key twice")
        return dict(pairs)

    def number(text: str) -> float:
        check(math.isfinite(float(text)), f"{what}: {text}")
        return float(text)

    try:
        tree = json.loads(raw.decode(), object_pairs_hook=members, parse_float=number, parse_constant=number)
        json.dumps(tree, ensure_ascii=False).encode()  # finds lone surrogates
    except (ValueError, RecursionError) as error:
        raise Refused(f"{what}: {error}") from error
    return tree


def is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def is_number(value: object) -> bool:
    return type(value) in {int, float}


def is_hex(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{16}", value) is not None


# ------------------------------------------------------------------------------------------------------------------
# manifest.json


_TAIL = re.compile(rb',\n  "crc64nvme": "([0-9a-f]{16})"\n}\n\Z')

_MEMBERS: dict[str, Callable[[Any], bool]] = {
    "tag": lambda value: isinstance(value, str),
    "id": is_hex,
    "run": is_hex,
    "sequence": is_count,
    "time": is_number,
    "step": lambda value: value is None or is_number(value),
    "metrics": lambda value: (
        isinstance(value, dict) and all(item is None or is_number(item) for item in value.values())
    ),
    "provenance": lambda value: isinstance(value, dict),
    "files": lambda value: isinstance(value, dict) and all(map(_is_record, value.values())),
}


def _is_record(value: object) -> bool:
    return isinstance(value, dict) and is_count(value.get("size")) and is_hex(value.get("crc64nvme"))


def read_manifest(folder: Path) -> dict[str, Any]:
    file = _regular(folder, "manifest.json")
    raw = file.read_bytes()
    table = strict(raw, str(file))
    check(isinstance(table, dict), f"{file}: no object")
    tail = _TAIL.search(raw)
    check(tail is None or crc64(raw[: tail.start()]).encode() == tail[1], f"{file}: CRC")
    check(table.get("format") == "rankless", f"{file}: format")
    version = table.get("version")
    check(type(version) is int and version >= 1, f"{file}: version")
    if version > 1:
        raise TooNew(f"{file}: version {version}")
    check(tail is not None, f"{file}: last line")
    for name, is_good in _MEMBERS.items():
        check(name in table and is_good(table[name]), f"{file}: {name}")
    for path in table["files"]:
        _check_path(path, str(file))
    check({"state.json", "ranks.json"} <= table["files"].keys(), f"{file}: state.json and ranks.json")
    return table


def _check_path(path: str, file: str) -> None:
    parts = path.split("/")
    check(not {"", ".", ".."} & set(parts) and not set("\\\0") & set(path), f"{file}: names {path!r}")
    long = len(path.encode()) > 1000 or max(len(part.encode()) for part in parts) > 255
    check(not long, f"{file}: names {path!r}")


def _regular(folder: Path, path: str) -> Path:
    file = folder / path
    check(file.exists(), f"{file}: missing")
    real = Path(os.path.realpath(file))
    check(real.is_relative_to(os.path.realpath(folder)) and real.is_file(), f"{file}: no file of the folder")
    return file


# ------------------------------------------------------------------------------------------------------------------
# Data files

WIDTHS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}

#: The bits of a value of the packed dtypes.
PACKED_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}

_BLOCK = 16 * 2**20


class Tensor(NamedTuple):
    """Bytes, little-endian and row-major."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def numpy(self) -> np.ndarray:
        """As an array; the dtypes that NumPy has not, as unsigned integers of their bits."""
        kinds = {"BOOL": "?", "U": "<u", "I": "<i", "F": "<f", "C": "<c"}
        plain = re.fullmatch(r"(BOOL|[UIFC])(\d*)", self.dtype)
        width = WIDTHS.get(self.dtype, 1)
        if self.dtype in PACKED_BITS:  # the bytes of each row
            return np.frombuffer(self.data, "u1").reshape(*self.shape[:-1], -1)
        kind = f"<u{width}" if plain is None else kinds[plain[1]] + (str(width) if plain[2] else "")
        return np.frombuffer(self.data, kind).reshape(self.shape)


class DataFile(NamedTuple):
    """The tensors of a file, and further names of them."""

    tensors: dict[str, Tensor]
    tied: dict[str, str]


def read_data(file: Path, raw: bytes, record: dict[str, Any]) -> DataFile:
    check(len(raw) >= 8, f"{file}: too short")
    size = 8 + struct.unpack("<Q", raw[:8])[0]
    check(size <= min(len(raw), 100_000_008), f"{file}: length of the header")
    head, data = raw[:size], raw[size:]
    check((size, crc64(head)) == (record.get("header_size"), record.get("header_crc64nvme")), f"{file}: header")
    table = strict(head[8:], str(file))
    check(isinstance(table, dict), f"{file}: header")
    metadata = table.pop("__metadata__", {})
    check(
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values()), f"{file}: metadata"
    )
    entries = sorted(table.items(), key=lambda item: _offsets(item[1], file))
    tensors = dict(_tensors(entries, data, file))
    _check_blocks([tensor.data for tensor in tensors.values()], metadata.get("rankless.crc64nvme"), file)
    tied = strict(metadata.get("rankless.tied", "{}").encode(), str(file))
    check(isinstance(tied, dict) and all(name in list(tensors) for name in tied.values()), f"{file}: tied")
    return DataFile(tensors, tied)


def _offsets(entry: Any, file: Path) -> tuple[int, int]:
    good = isinstance(entry, dict) and {"dtype", "shape", "data_offsets"} <= entry.keys()
    check(good, f"{file}: an entry")
    offsets, shape = entry["data_offsets"], entry["shape"]
    check(isinstance(offsets, list) and len(offsets) == 2 and all(map(is_count, offsets)), f"{file}: offsets")
    check(isinstance(shape, list) and len(shape) <= 64 and all(map(is_count, shape)), f"{file}: a shape")
    is_known = isinstance(entry["dtype"], str) and entry["dtype"] in {*WIDTHS, *PACKED_BITS}
    check(is_known, f"{file}: dtype {entry['dtype']!r}")
    return offsets[0], offsets[1]


def _tensors(entries: list[tuple[str, Any]], data: bytes, file: Path) -> Iterator[tuple[str, Tensor]]:
    reached = 0
    for name, entry in entries:
        start, stop = entry["data_offsets"]
        dtype, shape = entry["dtype"], entry["shape"]
        bits = PACKED_BITS.get(dtype, 8 * WIDTHS.get(dtype, 0))
        check(math.prod(dim or 1 for dim in shape) * bits // 8 < 2**63, f"{file}: {name}: shape")
        check(dtype in WIDTHS or (shape and shape[-1] * bits % 8 == 0), f"{file}: {name}: rows of a packed dtype")
        check(start == reached and 8 * (stop - start) == math.prod(shape) * bits, f"{file}: {name}: offsets")
        yield name, Tensor(entry["dtype"], tuple(entry["shape"]), data[start:stop])
        reached = stop
    check(reached == len(data), f"{file}: size")


def _check_blocks(datas: list[bytes], row: str | None, file: Path) -> None:
    blocks = [data[at : at + _BLOCK] for data in datas for at in range(0, len(data), _BLOCK)]
    check(row is not None and len(row) == 16 * len(blocks), f"{file}: number of CRCs")
    for number, block in enumerate(blocks):
        check(crc64(block) == row[16 * number : 16 * number + 16], f"{file}: CRC of block {number}")


# ------------------------------------------------------------------------------------------------------------------
# Values


class Tagged(NamedTuple):
    """A value that Python itself has no type for: a tag, and what it holds."""

    tag: str
    payload: Any


def _pairs(pairs: Any) -> dict[Any, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key twice")
    return table


def _moment(kind: Any) -> Callable[[Any], Any]:
    def build(payload: Any) -> Any:
        text, zone, fold = payload
        return kind.fromisoformat(text).replace(tzinfo=zone, fold=fold)

    return build


def _namespace(table: dict[Any, Any]) -> Namespace:
    space = Namespace()
    vars(space).update(table)
    return space


def _float(text: str) -> float:
    return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[text]


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


#: The tags that hold values, and how these become one.
_TAGS: dict[str, Callable[[Any], Any]] = {
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$dict": _pairs,
    "$ordereddict": lambda pairs: collections.OrderedDict(_pairs(pairs)),
    "$counter": lambda pairs: collections.Counter(_pairs(pairs)),
    "$namespace": _namespace,
    "$deque": lambda both: collections.deque(both[0], both[1]),
    "$float": _float,
    "$complex": lambda both: complex(*both),
    "$bytes": _bytes,
    "$bytearray": lambda text: bytearray(_bytes(text)),
    "$str": lambda text: _bytes(text).decode(errors="surrogatepass"),
    "$range": lambda three: range(*three),
    "$slice": lambda three: slice(*three),
    "$datetime": _moment(dt.datetime),
    "$time": _moment(dt.time),
    "$timezone": lambda parts: dt.timezone(*parts),
    "$date": dt.date.fromisoformat,
    "$timedelta": lambda three: dt.timedelta(*three),
    "$uuid": uuid.UUID,
    "$path": pathlib.PosixPath,
    "$purepath": pathlib.PurePosixPath,
    "$windowspath": pathlib.PureWindowsPath,
}


def decode(value: Any, arrays: dict[str, Tensor], depth: int = 0) -> Any:
    check(depth <= 400, "nested too deep")
    if isinstance(value, list):
        return [decode(item, arrays, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    tags = [key for key in value if key.startswith("$")]
    if not tags:
        return {key: decode(item, arrays, depth + 1) for key, item in value.items()}
    check(len(value) == 1, f"the tag {tags[0]} is not alone")
    tag, payload = tags[0], value[tags[0]]
    if tag in _TAGS:
        return _TAGS[tag](decode(payload, arrays, depth + 1))
    return Tagged(tag, _decode_plain(tag, payload, arrays))


def _decode_plain(tag: str, payload: Any, arrays: dict[str, Tensor]) -> Any:
    if tag in {"$tensor", "$array"}:
        return arrays[payload]
    if tag == "$inline":
        dtype, shape, text, *order = payload
        check(not order or sorted(order[0]) == list(range(len(shape))), "an order of other dimensions")
        data = _bytes(text)
        check(len(data) == math.prod(shape) * WIDTHS[dtype], "an inline tensor of another size")
        return Tensor(dtype, tuple(shape), data)
    if tag == "$numpy":
        dtype, digits = payload
        return np.frombuffer(bytes.fromhex(digits), np.dtype(dtype).newbyteorder("<"))[0]
    if tag == "$size":
        return tuple(payload)
    check(tag in {"$dtype", "$device"} and isinstance(payload, str), f"the tag {tag}")
    return payload


# ------------------------------------------------------------------------------------------------------------------
# The whole


class Checkpoint(NamedTuple):
    """All of a checkpoint: tensors and further names of them by group, values, other files."""

    manifest: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]
    tied: dict[str, dict[str, str]]
    state: dict[str, Any]
    ranks: list[dict[str, Any]]
    others: dict[str, bytes]


def read(folder: Path) -> Checkpoint:
    """All of a checkpoint, every CRC checked. Raises :class:`Refused`."""
    manifest = read_manifest(folder)
    checkpoint = Checkpoint(manifest, {}, {}, {}, [], {})
    for path, record in manifest["files"].items():
        file = _regular(folder, path)
        raw = file.read_bytes()
        check((len(raw), crc64(raw)) == (record["size"], record["crc64nvme"]), f"{file}: size or CRC")
        if path.endswith(".safetensors"):
            _add(checkpoint, path, read_data(file, raw, record))
        else:
            checkpoint.others[path] = raw
    try:
        _add_values(checkpoint, folder)
    except Refused:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise Refused(f"{folder}: values: {error}") from error
    return checkpoint


def _add(checkpoint: Checkpoint, path: str, file: DataFile) -> None:
    folder, _, name = path.rpartition("/")
    group = folder or re.split("[.-]", name)[0]
    tensors, tied = checkpoint.tensors.setdefault(group, {}), checkpoint.tied.setdefault(group, {})
    check(not tensors.keys() & file.tensors.keys() and not tied.keys() & file.tied.keys(), f"{path}: a name twice")
    tensors.update(file.tensors)
    tied.update(file.tied)
    check(not tensors.keys() & tied.keys(), f"{path}: a further name of a tensor is that of another")


def _add_values(checkpoint: Checkpoint, folder: Path) -> None:
    state = strict(checkpoint.others.pop("state.json"), f"{folder / 'state.json'}")
    ranks = strict(checkpoint.others.pop("ranks.json"), f"{folder / 'ranks.json'}")
    check(isinstance(state, dict) and isinstance(ranks["ranks"], list), f"{folder}: values")
    checkpoint.state.update(decode(state, checkpoint.tensors.get("state", {})))
    for own in ranks["ranks"]:
        check(isinstance(own, dict), f"{folder}: ranks")
        checkpoint.ranks.append(decode(own, checkpoint.tensors.get("ranks", {})))


def parameter_and_state(name: str) -> tuple[str, str]:
    """The FQN and the state's name of a tensor of an optimizer."""
    fqn, _, state = name.rpartition("/")
    return fqn, state.replace("%2F", "/").replace("%25", "%")


def latest(run: Path) -> Path:
    """The latest checkpoint in a run's folder that is of this version, sound and current."""
    history = newest_entry(run)
    newest: dict[str, tuple[Any, ...]] = {}
    for folder in run.iterdir():
        if not folder.name.startswith(".") and (folder / "manifest.json").is_file():
            try:
                manifest = read_manifest(folder)
            except Refused:
                continue
            if is_current(manifest, history):
                age = (manifest["sequence"], manifest["time"], manifest["id"], folder)
                newest[manifest["run"]] = max(newest.get(manifest["run"], age), age)
    check(newest, f"{run}: no checkpoint")
    claimed = {name: branch["sequence"] for name, branch in history.get("runs", {}).items()}
    return max((max(claimed.get(name, 0), age[0]), age) for name, age in newest.items())[1][-1]


def newest_entry(run: Path) -> dict[str, Any]:
    """The newest entry of a run's history that is sound; empty if it has none."""
    folder = run / ".history"
    if not folder.is_dir():
        folder = run.resolve().with_name(f".{run.resolve().name}.rankless") / ".history"
    names = sorted(folder.glob("[0-9]*.json"), key=lambda path: int(path.stem)) if folder.is_dir() else []
    for path in reversed(names):
        with contextlib.suppress(ValueError):
            entry = json.loads(path.read_bytes())
            if entry["number"] == int(path.stem):
                return dict(entry)
    return {}


def is_current(manifest: Mapping[str, Any], history: Mapping[str, Any]) -> bool:
    """Whether a checkpoint was not left behind by a job that went back to an earlier one."""
    branch = history.get("runs", {}).get(manifest["run"])
    incarnation = manifest.get("incarnation", 0)
    if branch is None or incarnation == branch["incarnation"] or incarnation > history["number"]:
        return True
    return dict(branch.get("line", [])).get(incarnation, -1) >= manifest["sequence"]
