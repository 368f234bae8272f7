"""Plain values as JSON, without pickle: what JSON lacks is an object with one key, a tag such as ``$tuple``.

Tensors and arrays become a reference (``{"$tensor": "key"}``) to a safetensors file beside the JSON.
Types are kept exactly: what cannot come back as it was is refused at save time, all of it at once.
"""

from __future__ import annotations

import base64
import collections
import datetime as dt
import json
import math
import pathlib
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol
from uuid import UUID

from holdfast.errors import CorruptCheckpointError, UnsupportedValueError
from holdfast.ondisk.hash_limits import MOST_ALIKE, check_hashes
from holdfast.ondisk.strict_json import parse_json

#: Deeper trees are refused when they are saved.
MAX_DEPTH = 100

#: The file of values that all ranks share, and the one of those that belong to single ranks.
SHARED_FILE, RANKS_FILE = "state.json", "ranks.json"

#: The most bytes of a file of values: readers take no larger one, so none is written.
VALUES_LIMIT = 2**30

#: Levels of JSON that one level of a tree may take: the tag of a namespace, that of its dict, a pair, the value.
_LEVELS = 4

#: Longest list of problems in one message.
_SHOWN = 20

#: Python reads no longer integers back from text.
_INT_BITS = 10_000


class ArrayCodec(Protocol):
    """What this module asks of those who know tensors and arrays."""

    def encode(self, value: object, key: str) -> Any:
        """The JSON for a tensor, array, dtype or device; ``NotImplemented`` for any other value."""

    def decode(self, tag: str, payload: Any) -> Any:
        """The inverse; ``NotImplemented`` for an unknown tag."""


def dump_values(tree: Mapping[str, Any], codec: ArrayCodec, prefix: str = "") -> bytes:
    """JSON of a tree: :func:`encode_value` and :func:`to_json`."""
    return to_json(encode_value(tree, codec, prefix))


def to_json(encoded: Any) -> bytes:
    """The bytes of an encoded tree."""
    return json.dumps(encoded, separators=(",", ":"), allow_nan=False).encode()


def encode_value(tree: Mapping[str, Any], codec: ArrayCodec, prefix: str = "") -> Any:
    """A tree of what JSON has. ``prefix`` goes before the keys of its tensors.

    Raises ``UnsupportedValueError`` that names the path of every value that cannot be stored.
    """
    problems: list[str] = []
    encoded = _encode(tree, (), _Encoder(codec, prefix, problems))
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems[:_SHOWN])
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise UnsupportedValueError(
            f"{len(problems)} value(s) cannot be stored in a checkpoint:\n{shown}{more}\n"
            "Store plain values, tensors or arrays instead."
        )
    return encoded


def check_size(raw: bytes, file: str) -> bytes:
    """The JSON of a tree. Raises ``UnsupportedValueError`` if no reader would take a ``file`` of it."""
    if len(raw) > VALUES_LIMIT:
        raise too_large_error(raw, file, len(raw), VALUES_LIMIT)
    return raw


def too_large_error(raw: bytes, file: str, size: int, limit: int) -> UnsupportedValueError:
    """The error for a ``file`` that values, the JSON ``raw``, make too large. It names the largest of them."""
    path, largest = _largest(json.loads(raw))
    return UnsupportedValueError(
        f"{file} would have {size:,} bytes, and readers take {limit:,} at most; the largest value is {path}, of "
        f"{largest:,} bytes as JSON. Store bytes as a tensor, such as torch.frombuffer(value, dtype=torch.uint8), "
        "numbers as a tensor or an array, and larger things in files of their own"
    )


def _largest(encoded: Any) -> tuple[str, int]:
    """The path of the value that makes a tree large, and its size as JSON: as deep as one value is most of it."""
    path: tuple[object, ...] = ()
    size = len(to_json(encoded))
    while True:
        sizes = [(len(to_json(child)), name, child) for name, child in _children(encoded)]
        largest, name, child = max(sizes, key=lambda item: item[0], default=(0, "", None))
        if 2 * largest <= size:
            return _show(path), size
        path, size, encoded = (*path, name), largest, child


def _children(encoded: Any) -> list[tuple[object, Any]]:
    """The values inside of an encoded one, by what they are called in paths."""
    if isinstance(encoded, list):
        return list(enumerate(encoded))
    if not isinstance(encoded, dict):
        return []
    tag = next(iter(encoded), "")
    if tag == "$dict" or tag in _PAIRS.values():
        return [(_label(key) if isinstance(key, str | int) else "key", value) for key, value in encoded[tag]]
    return _children(encoded[tag]) if tag.startswith("$") else list(encoded.items())


def iterate_members(encoded: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """The keys and values, encoded, of an encoded dict."""
    return [(key, value) for key, value in encoded.get("$dict", encoded.items())]


def as_table(pairs: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    """The encoded dict of such keys and values, in the order of the keys; of several with one key, the first."""
    found = {str(key): (key, value) for key, value in reversed(list(pairs))}
    ordered = [found[key] for key in sorted(found)]
    if all(isinstance(key, str) and not key.startswith("$") for key, _ in ordered):
        return dict(ordered)
    return {"$dict": [list(pair) for pair in ordered]}


def load_values(raw: bytes, codec: ArrayCodec, file: str) -> Any:
    """The tree that :func:`dump_values` wrote. Raises ``CorruptCheckpointError`` naming ``file`` for what it could not have written."""
    return decode_value(parse_json(raw, file), codec, file)


def decode_value(encoded: Any, codec: ArrayCodec, file: str) -> Any:
    """The values of JSON that is parsed already."""
    with _blaming(file):
        return _decode(encoded, codec, 0)


@contextmanager
def _blaming(file: str) -> Iterator[None]:
    try:
        yield
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{file}: {error}") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RuntimeError) as error:
        raise CorruptCheckpointError(f"{file} holds no values that holdfast wrote: {error}") from error


class _Encoder:
    def __init__(self, codec: ArrayCodec, prefix: str, problems: list[str]) -> None:
        self.codec, self.prefix, self.problems = codec, prefix, problems

    def refuse(self, path: tuple[object, ...], why: str) -> None:
        self.problems.append(f"{_show(path)}: {why}")


def _encode(value: Any, path: tuple[object, ...], encoder: _Encoder) -> Any:
    kind = type(value)
    if value is None or kind is bool or (kind in _AS_THEY_ARE and _AS_THEY_ARE[kind](value)):
        return value
    if len(path) > MAX_DEPTH or (kind in _KEYED and _is_slow(value)):
        return _refuse_form(path, encoder)
    if kind is list:
        return [_encode(item, (*path, i), encoder) for i, item in enumerate(value)]
    if kind is dict:
        return _encode_dict(value, path, encoder)
    if kind in _PLAIN:
        tag, to_json = _PLAIN[kind]
        encoded = _encode(to_json(value), path, encoder)
        # Hashes differ between processes, and with them the order of a set.
        return {tag: sorted(encoded, key=json.dumps) if kind in {set, frozenset} else encoded}
    return _encode_other(value, path, encoder)


def _is_slow(keys: Collection[Any]) -> bool:
    """Whether so many keys have one hash that no reader would take them in."""
    try:
        check_hashes(keys)
    except ValueError:
        return True
    return False


def _refuse_form(path: tuple[object, ...], encoder: _Encoder) -> None:
    if len(path) > MAX_DEPTH:
        encoder.refuse((*path[:5], "…"), f"nested deeper than {MAX_DEPTH} levels, or inside itself")
    else:
        encoder.refuse(path, f"more than {MOST_ALIKE} of its keys have the same hash, which is refused when it is read")


def _is_text(value: str) -> bool:
    """Whether a text is whole characters; halves of them (from names of files) are no JSON."""
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


#: Which values JSON has itself.
_AS_THEY_ARE: dict[type, Callable[[Any], bool]] = {
    int: lambda value: value.bit_length() <= _INT_BITS,
    float: math.isfinite,
    str: _is_text,
}


#: Types whose values have keys.
_KEYED = frozenset({dict, set, frozenset, collections.OrderedDict, collections.Counter})


def _encode_dict(value: dict[Any, Any], path: tuple[object, ...], encoder: _Encoder) -> Any:
    if all(type(key) is str and not key.startswith("$") and _is_text(key) for key in value):
        return {key: _encode(item, (*path, key), encoder) for key, item in value.items()}
    return {"$dict": _encode_pairs(value, path, encoder)}


def _encode_pairs(value: Mapping[Any, Any], path: tuple[object, ...], encoder: _Encoder) -> list[Any]:
    return [
        [_encode(key, (*path, "key", _label(key)), encoder), _encode(item, (*path, _label(key)), encoder)]
        for key, item in value.items()
    ]


def _label(key: Any) -> int | str:
    """What a key is called in paths: a number, or whole characters."""
    if type(key) is int and key.bit_length() <= _INT_BITS:
        return key
    try:
        return str(key).encode(errors="backslashreplace").decode()
    except ValueError:  # Python writes no number of more than 4300 digits
        return type(key).__qualname__


def _encode_other(value: Any, path: tuple[object, ...], encoder: _Encoder) -> Any:
    if type(value) in _PAIRS:
        return {_PAIRS[type(value)]: _encode_pairs(value, path, encoder)}
    try:
        encoded = encoder.codec.encode(value, encoder.prefix + ".".join(str(part) for part in path))
    except (TypeError, ValueError) as error:
        return encoder.refuse(path, str(error))
    if type(value) is int:
        return encoder.refuse(path, f"an integer of more than {_INT_BITS} bits")
    if encoded is NotImplemented:
        return encoder.refuse(path, f"{type(value).__module__}.{type(value).__qualname__}")
    return encoded


def _show(path: tuple[object, ...]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "the value itself"


def _decode(value: Any, codec: ArrayCodec, depth: int) -> Any:
    if depth > _LEVELS * MAX_DEPTH:
        raise CorruptCheckpointError(f"values are nested deeper than {_LEVELS * MAX_DEPTH} levels of JSON")
    if isinstance(value, list):
        return [_decode(item, codec, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: _decode(item, codec, depth + 1) for key, item in value.items()}
    if len(value) != 1:
        raise CorruptCheckpointError(f"the tag {tag!r} is not alone in its object")
    return _decode_tag(tag, value[tag], codec, depth)


def _decode_tag(tag: str, payload: Any, codec: ArrayCodec, depth: int) -> Any:
    if tag in _FROM_JSON:
        expected, build = _FROM_JSON[tag]
        plain = _decode(payload, codec, depth + 1)
        if type(plain) is not expected:
            raise CorruptCheckpointError(f"the tag {tag!r} holds {type(plain).__name__}, not {expected.__name__}")
        return build(plain)
    decoded = codec.decode(tag, payload)
    if decoded is NotImplemented:
        raise CorruptCheckpointError(f"the tag {tag!r} is not known; written by a newer version?")
    return decoded


def _keys(keys: list[Any]) -> list[Any]:
    """Keys that a dict or a set can take in. Raises ``ValueError`` for those that would make it slow."""
    check_hashes(keys)
    return keys


def _table(pairs: list[Any]) -> dict[Any, Any]:
    _keys([key for key, _ in pairs])
    table = dict(pairs)
    if len(table) != len(pairs):
        raise CorruptCheckpointError("a key stands twice in one table")
    return table


def _complex(pair: list[float]) -> complex:
    real, imaginary = pair
    return complex(real, imaginary)


def _slice(parts: list[Any]) -> slice:
    start, stop, step = parts
    return slice(start, stop, step)


def _timedelta(parts: list[int]) -> dt.timedelta:
    days, seconds, microseconds = parts
    return dt.timedelta(days, seconds, microseconds)


def _float(text: str) -> float:
    if text not in {"nan", "inf", "-inf"}:
        raise CorruptCheckpointError(f"{text!r} is no float that needs a tag")
    return float(text)


def _datetime(parts: list[Any]) -> dt.datetime:
    text, zone, fold = parts
    return dt.datetime.fromisoformat(text).replace(tzinfo=zone, fold=fold)


def _time(parts: list[Any]) -> dt.time:
    text, zone, fold = parts
    return dt.time.fromisoformat(text).replace(tzinfo=zone, fold=fold)


def _instant(value: dt.datetime | dt.time) -> list[Any]:
    """What ``isoformat`` leaves out: which of two equal hours it is when a clock is put back, and the zone's name."""
    return [value.replace(tzinfo=None).isoformat(), value.tzinfo, value.fold]


def _namespace(table: dict[Any, Any]) -> Namespace:
    space = Namespace()
    vars(space).update(table)
    return space


_PLAIN: dict[type, tuple[str, Callable[[Any], Any]]] = {
    tuple: ("$tuple", list),
    float: ("$float", repr),
    str: ("$str", lambda value: base64.b64encode(value.encode(errors="surrogatepass")).decode()),
    set: ("$set", list),
    frozenset: ("$frozenset", list),
    bytes: ("$bytes", lambda value: base64.b64encode(value).decode()),
    bytearray: ("$bytearray", lambda value: base64.b64encode(value).decode()),
    complex: ("$complex", lambda value: [value.real, value.imag]),
    range: ("$range", lambda value: [value.start, value.stop, value.step]),
    slice: ("$slice", lambda value: [value.start, value.stop, value.step]),
    dt.datetime: ("$datetime", _instant),
    dt.date: ("$date", dt.date.isoformat),
    dt.time: ("$time", _instant),
    dt.timezone: ("$timezone", lambda value: list(value.__reduce__()[1])),
    dt.timedelta: ("$timedelta", lambda value: [value.days, value.seconds, value.microseconds]),
    UUID: ("$uuid", str),
    pathlib.PosixPath: ("$path", str),
    pathlib.PurePosixPath: ("$purepath", str),
    pathlib.PureWindowsPath: ("$windowspath", str),
    Namespace: ("$namespace", vars),
    collections.deque: ("$deque", lambda value: [list(value), value.maxlen]),
}

_PAIRS: dict[type, str] = {collections.OrderedDict: "$ordereddict", collections.Counter: "$counter"}

_FROM_JSON: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "$float": (str, _float),
    "$str": (str, lambda text: base64.b64decode(text, validate=True).decode(errors="surrogatepass")),
    "$tuple": (list, tuple),
    "$set": (list, lambda items: set(_keys(items))),
    "$frozenset": (list, lambda items: frozenset(_keys(items))),
    "$bytes": (str, lambda text: base64.b64decode(text, validate=True)),
    "$bytearray": (str, lambda text: bytearray(base64.b64decode(text, validate=True))),
    "$complex": (list, _complex),
    "$range": (list, lambda parts: range(*parts)),
    "$slice": (list, _slice),
    "$datetime": (list, _datetime),
    "$date": (str, dt.date.fromisoformat),
    "$time": (list, _time),
    "$timezone": (list, lambda parts: dt.timezone(*parts)),
    "$timedelta": (list, _timedelta),
    "$uuid": (str, UUID),
    "$path": (str, pathlib.Path),
    "$purepath": (str, pathlib.PurePosixPath),
    "$windowspath": (str, pathlib.PureWindowsPath),
    "$namespace": (dict, _namespace),
    "$deque": (list, lambda parts: collections.deque(parts[0], parts[1])),
    "$dict": (list, _table),
    "$ordereddict": (list, lambda pairs: collections.OrderedDict(_table(pairs))),
    "$counter": (list, lambda pairs: collections.Counter(_table(pairs))),
}
