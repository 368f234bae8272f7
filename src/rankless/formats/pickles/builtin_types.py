"""The allow-list of Python's own types with plain values, such as ``collections.deque``.

Each function checks its arguments before it makes a value: with other arguments, most types could allocate a lot of
memory, or do something else.

:mod:`rankless.formats.torchfile.allowed_globals` and readers of other systems put it into their allow-lists. A new
entry must neither run code nor allocate without a budget.
"""

from __future__ import annotations

import collections
import datetime as dt
import pathlib
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID, SafeUUID

from rankless.formats.pickles.hashable_keys import HashableKeys
from rankless.formats.pickles.unpickler import AllowedCallable, OpaqueObject
from rankless.ondisk.read_budget import ReadBudget

#: The name of a file in memory, which is read as its bytes.
BYTES_IO = "io.BytesIO"

_UUID_BITS = 128

#: Units of work for an entry of a set or dict, and for the first entries of a namespace.
_ENTRY, _FIRST = 4, 16

#: Units of work for an empty deque, in addition to the units of any object.
_DEQUE = 32

#: The size of the state of a date or time, in bytes.
_STATE_BYTES: Mapping[Any, int] = {dt.datetime: 10, dt.date: 4, dt.time: 6}


def _list_items(budget: ReadBudget, given: Any) -> list[Any]:
    """Return the items of a list, tuple, set or dict, and charge them to ``budget``."""
    if not isinstance(given, list | tuple | set | frozenset | dict):
        raise TypeError(f"expected a list, tuple, set or dict, got {type(given).__name__}")
    budget.spend(1 + len(given))
    return list(given.items()) if isinstance(given, dict) else list(given)


def _check_items(budget: ReadBudget, given: Any = ()) -> list[Any]:
    items = _list_items(budget, given)
    budget.spend(_ENTRY * len(items))
    HashableKeys(budget).check_new(items)
    return items


def _check_pairs(budget: ReadBudget, given: Any = ()) -> list[tuple[Any, Any]]:
    pairs = _list_items(budget, given)
    budget.spend(_ENTRY * len(pairs))
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):  # noqa: PLR2004 - key and value
        raise TypeError("expected pairs of a key and a value")
    HashableKeys(budget).check_new([key for key, _ in pairs])
    return pairs


def _make_deque(budget: ReadBudget, given: Any = (), longest: Any = None) -> collections.deque[Any]:
    _check_integers(longest)
    budget.spend(_DEQUE)
    return collections.deque(_list_items(budget, given), longest)


def _make_bytes(budget: ReadBudget, given: Any = b"", codec: Any = "latin1") -> bytes:
    """Return bytes; protocol 2 stores them as text in latin1."""
    if codec not in {"latin1", "latin-1"} or not isinstance(given, str | bytes | bytearray):
        raise TypeError("expected bytes, or a text in latin1")
    budget.spend_memory(len(given))
    return given.encode("latin1") if isinstance(given, str) else bytes(given)


def _make_complex(_: ReadBudget, real: Any, imaginary: Any) -> complex:
    if not isinstance(real, int | float) or not isinstance(imaginary, int | float):
        raise TypeError("expected two numbers")
    return complex(real, imaginary)


def _check_integers(*given: Any) -> None:
    if not all(value is None or type(value) is int for value in given):
        raise TypeError("expected integers")


def _make_range(_: ReadBudget, start: Any, stop: Any, step: Any) -> range:
    _check_integers(start, stop, step)
    return range(start, stop, step)


def _make_slice(_: ReadBudget, start: Any, stop: Any, step: Any) -> slice:
    _check_integers(start, stop, step)
    return slice(start, stop, step)


def _path_maker(path_type: type) -> Callable[..., Any]:
    def make_path(budget: ReadBudget, *parts: Any) -> Any:
        if not all(isinstance(part, str) for part in parts):
            raise TypeError("expected the parts of a path as strings")
        budget.spend(len(parts) + sum(map(len, parts)) // 4)
        return path_type(*parts)

    return make_path


def _datetime_maker(datetime_type: Any) -> Callable[..., Any]:
    def make_datetime(_: ReadBudget, state: Any, *zone: Any) -> Any:
        if not isinstance(state, bytes) or len(state) != _STATE_BYTES[datetime_type]:
            raise TypeError(f"expected a state of {_STATE_BYTES[datetime_type]} bytes")
        if not all(isinstance(value, dt.timezone) for value in zone):
            raise TypeError("expected a time zone with a fixed offset")
        return datetime_type(state, *zone)

    return make_datetime


def _make_timedelta(_: ReadBudget, days: Any, seconds: Any, microseconds: Any) -> dt.timedelta:
    _check_integers(days, seconds, microseconds)
    return dt.timedelta(days, seconds, microseconds)


def _make_timezone(_: ReadBudget, offset: Any, *name: Any) -> dt.timezone:
    if not isinstance(offset, dt.timedelta) or not all(isinstance(value, str) for value in name):
        raise TypeError("expected an offset and a name")
    return dt.timezone(offset, *name)


def _fill_namespace(budget: ReadBudget, space: Namespace, state: Any) -> None:
    if isinstance(state, dict):
        budget.spend(_FIRST + _ENTRY * len(state))
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise TypeError("expected a dict whose keys are strings")
    vars(space).update(state)


def _fill_uuid(_: ReadBudget, uuid: UUID, state: Any) -> None:
    number = state.get("int") if isinstance(state, dict) else None
    if type(number) is not int or not 0 <= number < 2**_UUID_BITS:
        raise TypeError("expected an integer of 128 bits in the state of a UUID")
    object.__setattr__(uuid, "int", number)
    object.__setattr__(uuid, "is_safe", SafeUUID.unknown)


def plain_record(name: str) -> Callable[..., OpaqueObject]:
    """Return a function that makes a placeholder for an object of the class ``name``."""
    return lambda _, *args: OpaqueObject(name, args)


def read_bytes_io(record: OpaqueObject) -> bytes:
    """Return the bytes of a pickled ``io.BytesIO``. Raises ``TypeError`` if there are none."""
    data = record.state[0] if isinstance(record.state, tuple) and record.state else None
    if not isinstance(data, bytes):
        raise TypeError("an io.BytesIO without bytes")
    return data


def _refuse_call(_: ReadBudget, *__: Any) -> Any:
    """Refuse to call a type that pickles may only name, such as the default factory of a defaultdict."""
    raise TypeError("this type may be named, but not called")


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "_codecs.encode": _make_bytes,
    "_io.BytesIO": plain_record(BYTES_IO),
    "argparse.Namespace": lambda _: Namespace(),
    "builtins.bytearray": lambda budget, *given: bytearray(_make_bytes(budget, *given)),
    "builtins.bytes": _make_bytes,
    "builtins.complex": _make_complex,
    "builtins.frozenset": lambda budget, *given: frozenset(_check_items(budget, *given)),
    "builtins.range": _make_range,
    "builtins.set": lambda budget, *given: set(_check_items(budget, *given)),
    "builtins.slice": _make_slice,
    **{f"builtins.{kind}": _refuse_call for kind in ("bool", "dict", "float", "int", "list", "str")},
    "collections.Counter": lambda budget, *given: collections.Counter(dict(_check_pairs(budget, *given))),
    "collections.OrderedDict": lambda budget, *given: collections.OrderedDict(_check_pairs(budget, *given)),
    "collections.defaultdict": lambda _, *__: {},  # its items follow; the factory is not kept
    "collections.deque": _make_deque,
    "datetime.date": _datetime_maker(dt.date),
    "datetime.datetime": _datetime_maker(dt.datetime),
    "datetime.time": _datetime_maker(dt.time),
    "datetime.timedelta": _make_timedelta,
    "datetime.timezone": _make_timezone,
    "uuid.UUID": lambda _: object.__new__(UUID),
    **{
        f"{module}.{name}": _path_maker(path_type)
        for module in ("pathlib", "pathlib._local")
        for name, path_type in [
            ("PosixPath", pathlib.PosixPath),
            ("PurePosixPath", pathlib.PurePosixPath),
            ("PureWindowsPath", pathlib.PureWindowsPath),
            ("WindowsPath", pathlib.PureWindowsPath),
        ]
    },
}

#: The allow-list of plain values.
PLAIN: Mapping[str, object] = {name: AllowedCallable(name, make) for name, make in _FUNCTIONS.items()}

#: Functions that set the state of objects that are made empty.
STATES: Mapping[type, Callable[[ReadBudget, Any, Any], None]] = {Namespace: _fill_namespace, UUID: _fill_uuid}
