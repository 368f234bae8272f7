"""Plain Python values as JSON, without pickle.

A value of a type that JSON lacks is an object with one key, a tag such as ``$tuple``.
Tensors and arrays become a reference (``{"$tensor": "key"}``) to a safetensors file next to the JSON.
Types are kept exactly. A save refuses values that would come back changed, and its error lists all of them.

Each rank of a save encodes its values in the first vote, in the thread of the caller; each rank of a load decodes them
in the vote "reading the metadata". The tags and suffixes are in files: a tag keeps its meaning, and equal values must
have equal JSON on all ranks, because ranks compare digests of it.
"""

from __future__ import annotations

import base64
import collections
import datetime as dt
import json
import math
import pathlib
import sys
from argparse import Namespace
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol
from uuid import UUID

from rankless.errors import CorruptCheckpointError, FormatError, UnsupportedValueError
from rankless.ondisk.hash_limits import MAX_EQUAL_HASHES, check_hashes
from rankless.ondisk.strict_json import parse_json, recursion_error

#: Deeper trees are refused when they are saved.
MAX_DEPTH = 100

#: The file of the values that all ranks share, and the file of per-rank values.
SHARED_FILE, RANKS_FILE = "state.json", "ranks.json"

#: The most bytes of a file of values: readers refuse larger ones, so none is written.
VALUES_LIMIT = 2**30

#: The most levels of JSON for one level of a tree: the tag of a namespace, the tag of its dict, a pair, the value.
_JSON_LEVELS = 4

#: The most problems that one message lists.
_MAX_SHOWN = 20

#: Longer integers cannot be parsed by Python.
_INT_BITS = 10_000


#: Suffixes of the names of tensors that were ``nn.Parameter``, by ``requires_grad``: format version 1 has no tag for
#: them.
PARAMETER_SUFFIXES = {True: "@parameter", False: "@frozen-parameter"}

#: The beginning of a suffix of tensor names. The suffix has the order of the dimensions in memory, from the outermost
#: to the innermost, if the tensor is not contiguous: for example ``@order-1-0`` for a transposed matrix.
ORDER_SUFFIX = "@order"


class ArrayCodec(Protocol):
    """The encoding of tensors and arrays, which this module leaves to its callers."""

    def encode(self, value: object, key: str) -> Any:
        """Return the JSON for a tensor, array, dtype or device; ``NotImplemented`` for any other value."""

    def decode(self, tag: str, payload: Any) -> Any:
        """Return the value of a tag's JSON; ``NotImplemented`` for an unknown tag."""


def name_tensor(taken: Container[str], key: str, suffix: str = "") -> str:
    """Return the stored name of a tensor or array of a tree. No other one of the tree has it."""
    name, n = key + suffix, 1
    while name in taken or (not suffix and name.endswith(tuple(PARAMETER_SUFFIXES.values()))):
        n += 1
        name = f"{key}#{n}{suffix}"
    return name


def dump_values(tree: Mapping[str, Any], codec: ArrayCodec, prefix: str = "") -> bytes:
    """Encode a tree as JSON bytes: :func:`encode_value`, then :func:`to_json`."""
    return to_json(encode_value(tree, codec, prefix))


def to_json(encoded: Any) -> bytes:
    """Return the JSON bytes of an encoded tree."""
    return json.dumps(encoded, separators=(",", ":"), allow_nan=False).encode()


def are_same(first: Any, second: Any) -> bool:
    """Return whether two encoded trees are the same, in any order of keys.

    In Python 1, 1.0 and True are equal, and so are 0.0 and -0.0; these are different values of a training.
    """
    return first == second and json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)


def encode_value(tree: Mapping[str, Any], codec: ArrayCodec, prefix: str = "") -> Any:
    """Encode a tree in the types of JSON. The keys of its tensors start with ``prefix``.

    Raises ``UnsupportedValueError`` with the path of every value that cannot be stored.
    """
    problems: list[str] = []
    encoded = _encode_any(tree, (), _Encoder(codec, prefix, problems))
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems[:_MAX_SHOWN])
        more = f"\n  and {len(problems) - _MAX_SHOWN} more" if len(problems) > _MAX_SHOWN else ""
        raise UnsupportedValueError(
            f"{len(problems)} value(s) cannot be stored in a checkpoint:\n{shown}{more}\n"
            "Store plain values, tensors or arrays instead, such as dataclasses.asdict(value) or vars(value)."
        )
    return encoded


def check_size(raw: bytes, file: str) -> bytes:
    """Return the JSON of a tree. Raises ``UnsupportedValueError`` if it is too large for ``file``."""
    if len(raw) > VALUES_LIMIT:
        raise too_large_error(raw, file, len(raw), VALUES_LIMIT)
    return raw


def too_large_error(raw: bytes, file: str, size: int, limit: int) -> UnsupportedValueError:
    """Return the error for a ``file`` that is too large because of the values ``raw``. It names the largest value."""
    path, largest = _find_largest_value(json.loads(raw))
    return UnsupportedValueError(
        f"{file} would have {size:,} bytes, and readers accept {limit:,} at most; the largest value is {path}, of "
        f"{largest:,} bytes as JSON. Store bytes as a tensor, such as torch.frombuffer(value, dtype=torch.uint8), "
        "numbers as a tensor or an array, and larger data in separate files"
    )


def _find_largest_value(encoded: Any) -> tuple[str, int]:
    """Return the path of the value that makes a tree large, and its size as JSON in bytes.

    It descends as long as one child is more than half of its parent.
    """
    path: tuple[object, ...] = ()
    size = len(to_json(encoded))
    while True:
        sizes = [(len(to_json(child)), name, child) for name, child in _list_children(encoded)]
        largest, name, child = max(sizes, key=lambda item: item[0], default=(0, "", None))
        if 2 * largest <= size:
            return _format_path(path), size
        path, size, encoded = (*path, name), largest, child


def _list_children(encoded: Any) -> list[tuple[object, Any]]:
    """Return the children of an encoded value, with their labels in paths."""
    if isinstance(encoded, list):
        return list(enumerate(encoded))
    if not isinstance(encoded, dict):
        return []
    tag = next(iter(encoded), "")
    if tag == "$dict" or tag in _PAIR_TAGS.values():
        return [(_key_label(key) if isinstance(key, str | int) else "key", value) for key, value in encoded[tag]]
    return _list_children(encoded[tag]) if tag.startswith("$") else list(encoded.items())


def iterate_members(encoded: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return the encoded keys and values of an encoded dict."""
    return [(key, value) for key, value in encoded.get("$dict", encoded.items())]


def as_table(pairs: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    """Return the encoded dict of these keys and values, sorted by key. For a duplicate key, the first value is kept."""
    by_text = {str(key): (key, value) for key, value in reversed(list(pairs))}
    ordered = [by_text[key] for key in sorted(by_text)]
    if all(isinstance(key, str) and not key.startswith("$") for key, _ in ordered):
        return dict(ordered)
    return {"$dict": [list(pair) for pair in ordered]}


def load_values(raw: bytes, codec: ArrayCodec, file: str) -> Any:
    """Decode the JSON of :func:`dump_values`. Raises ``CorruptCheckpointError`` naming ``file`` for any other bytes.

    Raises ``FormatError`` for values of a newer version of rankless or torch.
    """
    return decode_value(parse_json(raw, file), codec, file)


def decode_value(encoded: Any, codec: ArrayCodec, file: str) -> Any:
    """Decode JSON that is parsed already. Raises the errors of :func:`load_values`."""
    with _errors_naming(file):
        return _decode_any(encoded, codec, 0)


@contextmanager
def _errors_naming(file: str) -> Iterator[None]:
    try:
        yield
    except (CorruptCheckpointError, FormatError) as error:
        raise type(error)(f"{file}: {error}") from error
    except RecursionError as error:
        raise recursion_error(file) from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RuntimeError) as error:
        raise CorruptCheckpointError(f"{file} does not contain values that rankless wrote: {error}") from error


class _Encoder:
    def __init__(self, codec: ArrayCodec, prefix: str, problems: list[str]) -> None:
        self.codec, self.prefix, self.problems = codec, prefix, problems

    def add_problem(self, path: tuple[object, ...], reason: str) -> None:
        self.problems.append(f"{_format_path(path)}: {reason}")


def _encode_any(value: Any, path: tuple[object, ...], encoder: _Encoder) -> Any:
    kind = type(value)
    if value is None or kind is bool or (kind in _IN_JSON and _IN_JSON[kind](value)):
        return value
    if len(path) > MAX_DEPTH or (kind in _KEYED_TYPES and _is_slow(value)):
        return _add_form_problem(path, encoder)
    if kind is list:
        return [_encode_any(item, (*path, i), encoder) for i, item in enumerate(value)]
    if kind is dict:
        return _encode_dict(value, path, encoder)
    if kind in _ENCODERS:
        tag, to_json = _ENCODERS[kind]
        encoded = _encode_any(to_json(value), path, encoder)
        # Hashes, and with them the order of a set, differ between processes.
        return {tag: sorted(encoded, key=json.dumps) if kind in {set, frozenset} else encoded}
    return _encode_other(value, path, encoder)


def _is_slow(keys: Collection[Any]) -> bool:
    """Return whether so many keys have one hash that readers would refuse them."""
    try:
        check_hashes(keys)
    except ValueError:
        return True
    return False


def _add_form_problem(path: tuple[object, ...], encoder: _Encoder) -> None:
    if len(path) > MAX_DEPTH:
        encoder.add_problem((*path[:5], "…"), f"nested deeper than {MAX_DEPTH} levels, or inside itself")
    else:
        encoder.add_problem(path, f"more than {MAX_EQUAL_HASHES} of its keys have the same hash, which readers refuse")


def _is_text(value: str) -> bool:
    """Return whether a text has no lone surrogates (file names may have them), which JSON cannot hold."""
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


def _count_integer_bits() -> int:
    """Return the most bits of an integer that this process may write as text."""
    digits = sys.get_int_max_str_digits()  # 0 if there is no limit
    return min(_INT_BITS, int((digits - 1) * math.log2(10))) if digits else _INT_BITS


#: Types that JSON has too, each with a test of the values that it can hold.
_IN_JSON: dict[type, Callable[[Any], bool]] = {
    int: lambda value: value.bit_length() <= _count_integer_bits(),
    float: math.isfinite,
    str: _is_text,
}


#: Types with keys.
_KEYED_TYPES = frozenset({dict, set, frozenset, collections.OrderedDict, collections.Counter})


def _encode_dict(value: dict[Any, Any], path: tuple[object, ...], encoder: _Encoder) -> Any:
    if all(type(key) is str and not key.startswith("$") and _is_text(key) for key in value):
        return {key: _encode_any(item, (*path, key), encoder) for key, item in value.items()}
    return {"$dict": _encode_pairs(value, path, encoder)}


def _encode_pairs(value: Mapping[Any, Any], path: tuple[object, ...], encoder: _Encoder) -> list[Any]:
    return [
        [
            _encode_any(key, (*path, "key", _key_label(key)), encoder),
            _encode_any(item, (*path, _key_label(key)), encoder),
        ]
        for key, item in value.items()
    ]


def _key_label(key: Any) -> int | str:
    """Return the label of a key in paths: a number, or text without lone surrogates."""
    if type(key) is int and key.bit_length() <= _INT_BITS:
        return key
    try:
        return str(key).encode(errors="backslashreplace").decode()
    except ValueError:  # Python formats no integer of more than 4300 digits
        return type(key).__qualname__


def _encode_other(value: Any, path: tuple[object, ...], encoder: _Encoder) -> Any:
    if type(value) in _PAIR_TAGS:
        return {_PAIR_TAGS[type(value)]: _encode_pairs(value, path, encoder)}
    try:
        encoded = encoder.codec.encode(value, encoder.prefix + ".".join(str(part) for part in path))
    except (TypeError, ValueError) as error:
        return encoder.add_problem(path, str(error))
    if type(value) is int:
        return encoder.add_problem(path, f"an integer of more than {_count_integer_bits()} bits")
    if encoded is NotImplemented:
        return encoder.add_problem(path, f"{type(value).__module__}.{type(value).__qualname__}")
    return encoded


def _format_path(path: tuple[object, ...]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "the value itself"


def _decode_any(value: Any, codec: ArrayCodec, depth: int) -> Any:
    if depth > _JSON_LEVELS * MAX_DEPTH:
        raise CorruptCheckpointError(f"values are nested deeper than {_JSON_LEVELS * MAX_DEPTH} levels of JSON")
    if isinstance(value, list):
        return [_decode_any(item, codec, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: _decode_any(item, codec, depth + 1) for key, item in value.items()}
    if len(value) != 1:
        raise CorruptCheckpointError(f"the tag {tag!r} is not alone in its object")
    return _decode_tag(tag, value[tag], codec, depth)


def _decode_tag(tag: str, payload: Any, codec: ArrayCodec, depth: int) -> Any:
    if tag in _DECODERS:
        expected, build = _DECODERS[tag]
        plain = _decode_any(payload, codec, depth + 1)
        if type(plain) is not expected:
            raise CorruptCheckpointError(f"the tag {tag!r} holds {type(plain).__name__}, not {expected.__name__}")
        return build(plain)
    decoded = codec.decode(tag, payload)
    if decoded is NotImplemented:
        raise FormatError(f"the tag {tag!r} is unknown; was it written by a newer version? update rankless")
    return decoded


def _check_keys(keys: list[Any]) -> list[Any]:
    """Return keys of a dict or a set. Raises ``ValueError`` if too many of them have the same hash."""
    check_hashes(keys)
    return keys


def _build_dict(pairs: list[Any]) -> dict[Any, Any]:
    _check_keys([key for key, _ in pairs])
    table = dict(pairs)
    if len(table) != len(pairs):
        raise CorruptCheckpointError("duplicate key in a table")
    return table


def _build_complex(pair: list[float]) -> complex:
    real, imaginary = pair
    return complex(real, imaginary)


def _build_slice(parts: list[Any]) -> slice:
    start, stop, step = parts
    return slice(start, stop, step)


def _build_timedelta(parts: list[int]) -> dt.timedelta:
    days, seconds, microseconds = parts
    return dt.timedelta(days, seconds, microseconds)


def _parse_float(text: str) -> float:
    if text not in {"nan", "inf", "-inf"}:
        raise CorruptCheckpointError(f"{text!r} is not a float that needs a tag")
    return float(text)


def _build_datetime(parts: list[Any]) -> dt.datetime:
    text, zone, fold = parts
    return dt.datetime.fromisoformat(text).replace(tzinfo=zone, fold=fold)


def _build_time(parts: list[Any]) -> dt.time:
    text, zone, fold = parts
    return dt.time.fromisoformat(text).replace(tzinfo=zone, fold=fold)


def _encode_instant(value: dt.datetime | dt.time) -> list[Any]:
    """Encode a time with the parts that ``isoformat`` omits: the zone, and ``fold``, which tells equal hours apart."""
    return [value.replace(tzinfo=None).isoformat(), value.tzinfo, value.fold]


def _build_namespace(table: dict[Any, Any]) -> Namespace:
    space = Namespace()
    vars(space).update(table)
    return space


_ENCODERS: dict[type, tuple[str, Callable[[Any], Any]]] = {
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
    dt.datetime: ("$datetime", _encode_instant),
    dt.date: ("$date", dt.date.isoformat),
    dt.time: ("$time", _encode_instant),
    dt.timezone: ("$timezone", lambda value: list(value.__reduce__()[1])),
    dt.timedelta: ("$timedelta", lambda value: [value.days, value.seconds, value.microseconds]),
    UUID: ("$uuid", str),
    pathlib.PosixPath: ("$path", str),
    pathlib.PurePosixPath: ("$purepath", str),
    pathlib.PureWindowsPath: ("$windowspath", str),
    Namespace: ("$namespace", vars),
    collections.deque: ("$deque", lambda value: [list(value), value.maxlen]),
}

_PAIR_TAGS: dict[type, str] = {collections.OrderedDict: "$ordereddict", collections.Counter: "$counter"}

_DECODERS: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "$float": (str, _parse_float),
    "$str": (str, lambda text: base64.b64decode(text, validate=True).decode(errors="surrogatepass")),
    "$tuple": (list, tuple),
    "$set": (list, lambda items: set(_check_keys(items))),
    "$frozenset": (list, lambda items: frozenset(_check_keys(items))),
    "$bytes": (str, lambda text: base64.b64decode(text, validate=True)),
    "$bytearray": (str, lambda text: bytearray(base64.b64decode(text, validate=True))),
    "$complex": (list, _build_complex),
    "$range": (list, lambda parts: range(*parts)),
    "$slice": (list, _build_slice),
    "$datetime": (list, _build_datetime),
    "$date": (str, dt.date.fromisoformat),
    "$time": (list, _build_time),
    "$timezone": (list, lambda parts: dt.timezone(*parts)),
    "$timedelta": (list, _build_timedelta),
    "$uuid": (str, UUID),
    "$path": (str, pathlib.Path),
    "$purepath": (str, pathlib.PurePosixPath),
    "$windowspath": (str, pathlib.PureWindowsPath),
    "$namespace": (dict, _build_namespace),
    "$deque": (list, lambda parts: collections.deque(parts[0], parts[1])),
    "$dict": (list, _build_dict),
    "$ordereddict": (list, lambda pairs: collections.OrderedDict(_build_dict(pairs))),
    "$counter": (list, lambda pairs: collections.Counter(_build_dict(pairs))),
}
