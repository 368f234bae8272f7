"""What a pickle may name beside tensors: the types of Python whose values are plain.

Each maker looks at its arguments first: with others, most types would do something large, or something else.
"""

from __future__ import annotations

import collections
import datetime as dt
import pathlib
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID, SafeUUID

from holdfast.formats.pickles.hashable_keys import HashableKeys
from holdfast.formats.pickles.unpickler import AllowedCallable, OpaqueObject
from holdfast.ondisk.read_budget import ReadBudget

#: What a file in memory is called, which is read as the bytes in it.
BYTES_IO = "io.BytesIO"

_UUID_BITS = 128

#: What an entry of a budget set or dict costs, and what the first ones of a namespace do.
_ENTRY, _FIRST = 4, 16

#: What an empty deque costs more than another object.
_DEQUE = 32

#: How many bytes the state of a date or time has.
_INSTANTS: Mapping[Any, int] = {dt.datetime: 10, dt.date: 4, dt.time: 6}


def _items(budget: ReadBudget, given: Any) -> list[Any]:
    """The items of a list, a tuple, a set or a dict, to be budget."""
    if not isinstance(given, list | tuple | set | frozenset | dict):
        raise TypeError(f"{type(given).__name__} is no list")
    budget.spend(1 + len(given))
    return list(given.items()) if isinstance(given, dict) else list(given)


def _keys(budget: ReadBudget, given: Any = ()) -> list[Any]:
    items = _items(budget, given)
    budget.spend(_ENTRY * len(items))
    HashableKeys(budget).check_new(items)
    return items


def _pairs(budget: ReadBudget, given: Any = ()) -> list[tuple[Any, Any]]:
    pairs = _items(budget, given)
    budget.spend(_ENTRY * len(pairs))
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):  # noqa: PLR2004 - key and value
        raise TypeError("there are no pairs in it")
    HashableKeys(budget).check_new([key for key, _ in pairs])
    return pairs


def _deque(budget: ReadBudget, given: Any = (), longest: Any = None) -> collections.deque[Any]:
    _integers(longest)
    budget.spend(_DEQUE)
    return collections.deque(_items(budget, given), longest)


def _bytes(budget: ReadBudget, given: Any = b"", codec: Any = "latin1") -> bytes:
    """Bytes; protocol 2 has them as text."""
    if codec not in {"latin1", "latin-1"} or not isinstance(given, str | bytes | bytearray):
        raise TypeError("bytes are kept as bytes, or as text in latin1")
    budget.spend_memory(len(given))
    return given.encode("latin1") if isinstance(given, str) else bytes(given)


def _complex(_: ReadBudget, real: Any, imaginary: Any) -> complex:
    if not isinstance(real, int | float) or not isinstance(imaginary, int | float):
        raise TypeError("it has two numbers")
    return complex(real, imaginary)


def _integers(*given: Any) -> None:
    if not all(one is None or type(one) is int for one in given):
        raise TypeError("it has integers only")


def _range(_: ReadBudget, start: Any, stop: Any, step: Any) -> range:
    _integers(start, stop, step)
    return range(start, stop, step)


def _slice(_: ReadBudget, start: Any, stop: Any, step: Any) -> slice:
    _integers(start, stop, step)
    return slice(start, stop, step)


def _path(made: type) -> Callable[..., Any]:
    def make(budget: ReadBudget, *parts: Any) -> Any:
        if not all(isinstance(part, str) for part in parts):
            raise TypeError("it has parts of text")
        budget.spend(len(parts) + sum(map(len, parts)) // 4)
        return made(*parts)

    return make


def _instant(made: Any) -> Callable[..., Any]:
    def make(_: ReadBudget, state: Any, *zone: Any) -> Any:
        if not isinstance(state, bytes) or len(state) != _INSTANTS[made]:
            raise TypeError(f"its state has {_INSTANTS[made]} bytes")
        if not all(isinstance(one, dt.timezone) for one in zone):
            raise TypeError("its zone is fixed")
        return made(state, *zone)

    return make


def _timedelta(_: ReadBudget, days: Any, seconds: Any, microseconds: Any) -> dt.timedelta:
    _integers(days, seconds, microseconds)
    return dt.timedelta(days, seconds, microseconds)


def _timezone(_: ReadBudget, offset: Any, *name: Any) -> dt.timezone:
    if not isinstance(offset, dt.timedelta) or not all(isinstance(one, str) for one in name):
        raise TypeError("it has an offset and a name")
    return dt.timezone(offset, *name)


def _fill_namespace(budget: ReadBudget, space: Namespace, state: Any) -> None:
    if isinstance(state, dict):
        budget.spend(_FIRST + _ENTRY * len(state))
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise TypeError("a namespace has names")
    vars(space).update(state)


def _fill_uuid(_: ReadBudget, one: UUID, state: Any) -> None:
    number = state.get("int") if isinstance(state, dict) else None
    if type(number) is not int or not 0 <= number < 2**_UUID_BITS:
        raise TypeError("a UUID is a number of 128 bits")
    object.__setattr__(one, "int", number)
    object.__setattr__(one, "is_safe", SafeUUID.unknown)


def plain_record(name: str) -> Callable[..., OpaqueObject]:
    """Makes a stand-in for an object of a class."""
    return lambda _, *args: OpaqueObject(name, args)


def count_bytes(found: OpaqueObject) -> bytes:
    """The bytes in a file in memory. Raises ``TypeError`` if there are none."""
    data = found.state[0] if isinstance(found.state, tuple) and found.state else None
    if not isinstance(data, bytes):
        raise TypeError("a file in memory without bytes")
    return data


def _only_named(_: ReadBudget, *__: Any) -> Any:
    """What kind of values a dict has by default is named, and not called."""
    raise TypeError("it is only named")


_MAKERS: Mapping[str, Callable[..., Any]] = {
    "_codecs.encode": _bytes,
    "_io.BytesIO": plain_record(BYTES_IO),
    "argparse.Namespace": lambda _: Namespace(),
    "builtins.bytearray": lambda budget, *given: bytearray(_bytes(budget, *given)),
    "builtins.bytes": _bytes,
    "builtins.complex": _complex,
    "builtins.frozenset": lambda budget, *given: frozenset(_keys(budget, *given)),
    "builtins.range": _range,
    "builtins.set": lambda budget, *given: set(_keys(budget, *given)),
    "builtins.slice": _slice,
    **{f"builtins.{kind}": _only_named for kind in ("bool", "dict", "float", "int", "list", "str")},
    "collections.Counter": lambda budget, *given: collections.Counter(dict(_pairs(budget, *given))),
    "collections.OrderedDict": lambda budget, *given: collections.OrderedDict(_pairs(budget, *given)),
    "collections.defaultdict": lambda _, *__: {},  # what is in it by default is not in a pickle of it
    "collections.deque": _deque,
    "datetime.date": _instant(dt.date),
    "datetime.datetime": _instant(dt.datetime),
    "datetime.time": _instant(dt.time),
    "datetime.timedelta": _timedelta,
    "datetime.timezone": _timezone,
    "uuid.UUID": lambda _: object.__new__(UUID),
    **{
        f"{module}.{name}": _path(made)
        for module in ("pathlib", "pathlib._local")
        for name, made in [
            ("PosixPath", pathlib.PosixPath),
            ("PurePosixPath", pathlib.PurePosixPath),
            ("PureWindowsPath", pathlib.PureWindowsPath),
            ("WindowsPath", pathlib.PureWindowsPath),
        ]
    },
}

#: The allow-list of plain values.
PLAIN: Mapping[str, object] = {name: AllowedCallable(name, make) for name, make in _MAKERS.items()}

#: How objects that are made empty take in their state.
STATES: Mapping[type, Callable[[ReadBudget, Any, Any], None]] = {Namespace: _fill_namespace, UUID: _fill_uuid}
