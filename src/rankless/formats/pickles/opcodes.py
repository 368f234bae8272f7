"""The opcodes of protocols 2 to 5 for the stack, the memo, plain values and containers.

Source: https://docs.python.org/3/library/pickletools.html

:mod:`rankless.formats.pickles.unpickle` adds the opcodes for objects. Each handler charges the objects that it builds
to the budget.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from types import UnionType
from typing import Any

from rankless.formats.pickles.unpickler import SafeUnpickler, StopUnpickling, kind_of
from rankless.ondisk.hash_limits import has_safe_hash

Opcode = Callable[[SafeUnpickler], None]

#: The longest integer in bytes: Python prints no number of more than 4300 digits.
_INTEGER = 1251

#: Units of work for the memory of each empty container.
_COSTS: dict[type, int] = {list: 4, dict: 5, set: 14}

#: Units of work for a tuple, a frozenset, the first items of a dict, and a mark.
_TUPLE, _FROZEN, _FIRST, _MARK = 3, 14, 8, 4

_U8, _U16, _U32, _U64 = (struct.Struct(f"<{letter}") for letter in "BHIQ")
_I32, _FLOAT = struct.Struct("<i"), struct.Struct(">d")

_LAST_PROTOCOL = 5


def _stop_reading(unpickler: SafeUnpickler) -> None:
    if not unpickler.stack:
        raise IndexError
    raise StopUnpickling


def _refuse_opcode(unpickler: SafeUnpickler) -> None:
    code = unpickler.raw[unpickler.at - 1]
    raise ValueError(f"opcode {code:#04x} at byte {unpickler.at - 1} is not allowed")


def _check_protocol(unpickler: SafeUnpickler) -> None:
    if unpickler.read_raw_bytes(1)[0] > _LAST_PROTOCOL:
        raise ValueError(f"its protocol is newer than {_LAST_PROTOCOL}")


def _skip_frame(unpickler: SafeUnpickler) -> None:
    unpickler.read_raw_bytes(_U64.size)  # the frame's size, which only a streaming reader needs


def _push_mark(unpickler: SafeUnpickler) -> None:
    unpickler.budget.spend(_MARK)
    unpickler.marks.append(unpickler.stack)
    unpickler.stack = []


def _pop_top(unpickler: SafeUnpickler) -> None:
    unpickler.stack.pop() if unpickler.stack else unpickler.pop_to_mark()


def _pop_mark(unpickler: SafeUnpickler) -> None:
    unpickler.pop_to_mark()


def _duplicate_top(unpickler: SafeUnpickler) -> None:
    unpickler.stack.append(unpickler.stack[-1])


def _memoize_next(unpickler: SafeUnpickler) -> None:
    unpickler.memoize_top(len(unpickler.memo) + len(unpickler.sparse_memo))


def _memoize_at_u8(unpickler: SafeUnpickler) -> None:
    unpickler.memoize_top(unpickler.raw[unpickler.at])
    unpickler.at += 1


def _memoize_at_u32(unpickler: SafeUnpickler) -> None:
    unpickler.memoize_top(unpickler.read_number(_U32))


def _push_memoized_u8(unpickler: SafeUnpickler) -> None:
    unpickler.push_memoized(unpickler.raw[unpickler.at])
    unpickler.at += 1


def _push_memoized_u32(unpickler: SafeUnpickler) -> None:
    unpickler.push_memoized(unpickler.read_number(_U32))


def _push_constant(value: Any) -> Opcode:
    def push_value(unpickler: SafeUnpickler) -> None:
        unpickler.stack.append(value)

    return push_value


def _push_number(form: struct.Struct) -> Opcode:
    def push_value(unpickler: SafeUnpickler) -> None:
        unpickler.stack.append(unpickler.read_number(form))

    return push_value


def _push_byte(unpickler: SafeUnpickler) -> None:
    unpickler.stack.append(unpickler.raw[unpickler.at])
    unpickler.at += 1


def _push_integer(form: struct.Struct) -> Opcode:
    def push_value(unpickler: SafeUnpickler) -> None:
        size = unpickler.read_number(form)
        if size > _INTEGER:
            raise ValueError(f"it has an integer of {size} bytes; at most {_INTEGER} are allowed")
        unpickler.stack.append(int.from_bytes(unpickler.read_raw_bytes(size), "little", signed=True))

    return push_value


def _push_text(form: struct.Struct) -> Opcode:
    def push_value(unpickler: SafeUnpickler) -> None:
        unpickler.stack.append(unpickler.read_raw_bytes(unpickler.read_number(form)).decode("utf-8", "surrogatepass"))

    return push_value


def _push_bytes(form: struct.Struct, to_value: Callable[[bytes], Any] = bytes) -> Opcode:
    def push_value(unpickler: SafeUnpickler) -> None:
        unpickler.stack.append(to_value(unpickler.read_raw_bytes(unpickler.read_number(form))))

    return push_value


def _push_empty(container: type) -> Opcode:
    cost = _COSTS[container]

    def push_value(unpickler: SafeUnpickler) -> None:
        unpickler.budget.spend(cost)
        unpickler.stack.append(container())

    return push_value


def _build_tuple(unpickler: SafeUnpickler) -> None:
    unpickler.budget.spend(_TUPLE)
    items = unpickler.pop_to_mark()
    unpickler.stack.append(tuple(items))


def _build_list(unpickler: SafeUnpickler) -> None:
    items = unpickler.pop_to_mark()  # the steps of the mark cover this list
    unpickler.stack.append(items)


def _build_dict(unpickler: SafeUnpickler) -> None:
    unpickler.budget.spend(_COSTS[dict])
    items = unpickler.pop_to_mark()
    table: dict[Any, Any] = {}
    _insert_items(unpickler, table, items)
    unpickler.stack.append(table)


def _build_frozenset(unpickler: SafeUnpickler) -> None:
    unpickler.budget.spend(_FROZEN)
    items = unpickler.pop_to_mark()
    unpickler.key_checker.check_new(items)
    unpickler.stack.append(frozenset(items))


def _build_tuple_of(size: int) -> Opcode:
    def push_value(unpickler: SafeUnpickler) -> None:
        stack = unpickler.stack
        if len(stack) < size:
            raise IndexError
        unpickler.budget.spend(_TUPLE)
        stack[-size:] = [tuple(stack[-size:])]

    return push_value


def _append_item(unpickler: SafeUnpickler) -> None:
    item = unpickler.stack.pop()
    _container_at_top(unpickler, list | deque).append(item)


def _append_items(unpickler: SafeUnpickler) -> None:
    items = unpickler.pop_to_mark()
    _container_at_top(unpickler, list | deque).extend(items)


def _set_item(unpickler: SafeUnpickler) -> None:
    value, key = unpickler.stack.pop(), unpickler.stack.pop()
    table = _container_at_top(unpickler, dict)
    if not has_safe_hash(key):
        _insert_items(unpickler, table, [key, value])
        return
    if not table:
        unpickler.budget.spend(_FIRST)
    table[key] = value


def _set_items(unpickler: SafeUnpickler) -> None:
    items = unpickler.pop_to_mark()
    _insert_items(unpickler, _container_at_top(unpickler, dict), items)


def _insert_items(unpickler: SafeUnpickler, table: dict[Any, Any], flat: list[Any]) -> None:
    keys = flat[::2]
    if not table and keys:
        unpickler.budget.spend(_FIRST)
    unpickler.key_checker.check_new(keys, table)
    table.update(zip(keys, flat[1::2], strict=True))


def _add_items(unpickler: SafeUnpickler) -> None:
    items = unpickler.pop_to_mark()
    table = _container_at_top(unpickler, set)
    unpickler.key_checker.check_new(items, table)
    table.update(items)


def _container_at_top(unpickler: SafeUnpickler, expected: type | UnionType) -> Any:
    container = unpickler.stack[-1]
    if not isinstance(container, expected):
        raise TypeError(f"it adds items to {kind_of(container)}")
    return container


#: The handler of each opcode, except for those that look up or make objects.
OPCODES: dict[str, Opcode] = {
    ".": _stop_reading,
    "(": _push_mark,
    "0": _pop_top,
    "1": _pop_mark,
    "2": _duplicate_top,
    "\x94": _memoize_next,
    "q": _memoize_at_u8,
    "r": _memoize_at_u32,
    "h": _push_memoized_u8,
    "j": _push_memoized_u32,
    "\x80": _check_protocol,
    "\x95": _skip_frame,
    "N": _push_constant(None),
    "\x88": _push_constant(value=True),
    "\x89": _push_constant(value=False),
    ")": _push_constant(()),
    "J": _push_number(_I32),
    "K": _push_byte,
    "M": _push_number(_U16),
    "G": _push_number(_FLOAT),
    "\x8a": _push_integer(_U8),
    "\x8b": _push_integer(_U32),
    "\x8c": _push_text(_U8),
    "X": _push_text(_U32),
    "\x8d": _push_text(_U64),
    "U": _push_text(_U8),
    "T": _push_text(_U32),
    "C": _push_bytes(_U8),
    "B": _push_bytes(_U32),
    "\x8e": _push_bytes(_U64),
    "\x96": _push_bytes(_U64, bytearray),
    "]": _push_empty(list),
    "}": _push_empty(dict),
    "\x8f": _push_empty(set),
    "t": _build_tuple,
    "\x85": _build_tuple_of(1),
    "\x86": _build_tuple_of(2),
    "\x87": _build_tuple_of(3),
    "l": _build_list,
    "d": _build_dict,
    "a": _append_item,
    "e": _append_items,
    "s": _set_item,
    "u": _set_items,
    "\x90": _add_items,
    "\x91": _build_frozenset,
}


def opcode_table(object_opcodes: dict[str, Opcode]) -> list[Opcode]:
    """Return the handler of each byte, from 0 to 255, including ``object_opcodes``; unknown opcodes are refused."""
    handlers = OPCODES | object_opcodes
    return [handlers.get(chr(code), _refuse_opcode) for code in range(256)]
